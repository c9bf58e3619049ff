"""Softmax forward of long rows on Hopper: a cluster of CTAs takes a row.

Mathematics as in `kernel_triton.py`. Tile picture: cluster p takes row p, and each of its CTAS x
WARPS warps n columns of it, which it keeps in registers:

    row p | CTA 0: warp 0 | warp 1 | ... | CTA 1: warp 0 | ... |
            each warp: its own m and l, which all show each other; then its own columns of y

Who waits for whom: the warps of a cluster for each other, once (`tileloom.device.cluster`). All
join what they are shown in one order, so that every run gives the same bits.

Bytes moved: x once and y once, whatever the length of the rows.

Offsets are 64-bit outside a row: columns are below CTAS * WARPS * n.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cluster import cluster_begin, cluster_softmax, warp_layout
from tileloom.ops.rowwise.pieces_gluon_sm90 import add, columns_of, each, hold, most, row_start

INTEGERS = ("x_0", "y_0")


@gluon.jit(do_not_specialize=INTEGERS)
def softmax_fwd_cluster_kernel(
    x, y, x_0, y_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr,
    HOLD: gl.constexpr,
):  # fmt: skip
    """Take one row of CTAS * BLOCK columns a cluster; strides come in units of VECTOR elements.

    HOLD keeps x, and computes its exponentials twice; else they are kept, in twice the registers.
    """
    layout: gl.constexpr = warp_layout(WARPS, CTAS, VECTOR)
    box = cluster_begin(2, CTAS, WARPS)
    row = gl.program_id(0)
    columns = columns_of(layout, CTAS, WARPS, BLOCK // WARPS)
    shown = gl.load(row_start(x, row, x_0, VECTOR) + columns)
    z = shown.to(gl.float32)
    own = gl.reduce(z, 2, most)
    if HOLD:
        z = hold(shown).to(gl.float32)
    e = gl.exp(z - each(gl.where(own == float("-inf"), 0.0, own)))
    peak, total = cluster_softmax(box, own, gl.reduce(e, 2, add), CTAS, WARPS)
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    if HOLD:
        e = gl.exp(hold(shown).to(gl.float32) - each(peak))
    else:
        factor = gl.where(own == float("-inf"), 0.0, gl.exp(own - peak)) * factor
    out = e * each(factor)
    gl.store(row_start(y, row, y_0, VECTOR) + columns, out.to(y.dtype.element_ty))
