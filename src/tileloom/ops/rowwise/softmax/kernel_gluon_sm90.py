"""Softmax forward of long rows on Hopper: a cluster of CTAs takes a row.

Mathematics as in `kernel_triton.py`. Tile picture: cluster p takes row p, and CTA c of its CTAS the
columns c BLOCK .. (c + 1) BLOCK - 1, which it keeps in registers, two elements of 16 bits in one:

    row p | CTA 0 | CTA 1 | ... |     each CTA: its own m and l, which all show each other; join
                                      them; y = exp(x - m) / l for its own columns

Who waits for whom: the CTAs of a cluster for each other, once (`tileloom.device.cluster`). All join
what they are shown in one order, so that every run gives the same bits.

Bytes moved: x once and y once, whatever the length of the rows.

Offsets are 64-bit outside a row: columns are below CTAS * BLOCK.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cluster import cluster_arrive, cluster_collect, cluster_post, cluster_wait
from tileloom.ops.rowwise.pieces_gluon_sm90 import (
    add,
    hold,
    layout_of,
    load_part,
    most,
    row_start,
    store_part,
)

INTEGERS = ("width", "x_0", "y_0")


@gluon.jit
def _finite(peak):
    """Give the peak, or 0 for a row or a part that shows nothing."""
    return gl.where(peak == float("-inf"), 0.0, peak)


@gluon.jit(do_not_specialize=INTEGERS)
def softmax_fwd_cluster_kernel(
    x, y, width, x_0, y_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Take one row a cluster; the width and strides come in units of VECTOR elements.

    EVEN says that the row has CTAS * BLOCK columns.
    """
    layout: gl.constexpr = layout_of(WARPS, CTAS, VECTOR)
    cluster_arrive()
    row = gl.program_id(0)
    cta = gl.arange(0, CTAS, layout=gl.SliceLayout(1, layout))
    columns = cta[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    seen = columns < width * VECTOR
    z = load_part(row_start(x, row, x_0, VECTOR), columns, seen, EVEN, float("-inf"))
    peak = gl.reduce(z.to(gl.float32), 1, most)
    z = hold(z)
    total = gl.reduce(gl.exp(z.to(gl.float32) - _finite(peak)[:, None]), 1, add)
    cluster_wait()
    found = cluster_collect(cluster_post((peak, total), cta * 0, CTAS), 2, CTAS)
    peak = found[0]
    for j in gl.static_range(1, CTAS):
        peak = gl.maximum(peak, found[2 * j])
    peak = _finite(peak)
    total = found[1] * gl.exp(found[0] - peak)
    for j in gl.static_range(1, CTAS):
        total += found[2 * j + 1] * gl.exp(found[2 * j] - peak)
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    out = gl.exp(hold(z).to(gl.float32) - peak[:, None]) * factor[:, None]
    store_part(row_start(y, row, y_0, VECTOR), columns, seen, out.to(y.dtype.element_ty), EVEN)
