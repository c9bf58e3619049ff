"""RMS and layer norm of long rows on Hopper: a cluster of CTAs takes a row.

Mathematics as in `kernel_triton_fwd.py`. Tile picture: cluster p takes row p, and CTA c of its CTAS
the columns c BLOCK .. (c + 1) BLOCK - 1, which it keeps in registers, two elements of 16 bits in
one:

    row p | CTA 0 | CTA 1 | ... |     each CTA: mean of its own columns, and squares about it,
                                      which all show each other; the row's; its own part of out

Who waits for whom: the CTAs of a cluster for each other, once (`tileloom.device.cluster`). All add
up in the same order. Programs that share rows by words in global memory, as in
`kernel_triton_split.py`, must have those written first, and take longer to see them.

Bytes moved: every tensor once, whatever the length of the rows; weight and bias from L2.

Offsets are 64-bit outside a row: columns are below CTAS * BLOCK.
"""

# ruff: noqa: RUF005  (Triton knows no *tuple inside a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cluster import cluster_arrive, cluster_collect, cluster_post, cluster_wait
from tileloom.ops.rowwise.pieces_gluon_sm90 import (
    add,
    all_of,
    hold,
    layout_of,
    load_part,
    row_start,
    store_part,
)

INTEGERS = ("width_units", "x_0", "r_0", "o_0")


@gluon.jit
def _variance(found, mean, n, BLOCK: gl.constexpr, CTAS: gl.constexpr):
    """Add up the squares about the row's mean, of parts with a mean each, over n."""
    total = 0.0 * mean
    for j in gl.static_range(CTAS):
        away = found[2 * j] - mean
        size = gl.maximum(gl.minimum(n - j * BLOCK, BLOCK), 0).to(gl.float32)
        total += found[2 * j + 1] + size * away * away
    return total / n


@gluon.jit
def _mean(found, n, BLOCK: gl.constexpr, CTAS: gl.constexpr):
    total = 0.0 * found[0]
    for j in gl.static_range(CTAS):
        size = gl.maximum(gl.minimum(n - j * BLOCK, BLOCK), 0).to(gl.float32)
        total += found[2 * j] * size
    return total / n


@gluon.jit(do_not_specialize=INTEGERS)
def norm_fwd_cluster_kernel(
    x, residual, weight, bias, out, stream, mean, rstd, eps, width_units, x_0, r_0, o_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr,
    EVEN: gl.constexpr, CENTRED: gl.constexpr,
):  # fmt: skip
    """Take one row a cluster.

    Absent tensors are None; strides come in units of VECTOR elements, and so does the width. EVEN
    says that the row has CTAS * BLOCK columns.
    """
    layout: gl.constexpr = layout_of(WARPS, CTAS, VECTOR)
    KIND: gl.constexpr = x.dtype.element_ty
    cluster_arrive()
    n = width_units * VECTOR
    row = gl.program_id(0)
    cta = gl.arange(0, CTAS, layout=gl.SliceLayout(1, layout))
    columns = cta[:, None] * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    seen = columns < n
    h = load_part(row_start(x, row, x_0, VECTOR), columns, seen, EVEN)
    if residual is not None:
        added = load_part(row_start(residual, row, r_0, VECTOR), columns, seen, EVEN)
        h = (h.to(gl.float32) + added.to(gl.float32)).to(KIND)
        store_part(row_start(stream, row, o_0, VECTOR), columns, seen, h, EVEN)
    z = h.to(gl.float32)
    numbers = ()
    if CENTRED:
        size = gl.maximum(gl.minimum(n - cta * BLOCK, BLOCK), 1).to(gl.float32)
        centre = gl.reduce(z, 1, add) / size
        numbers = (centre,)
        z = hold(h).to(gl.float32) - centre[:, None]
        if not EVEN:
            z = gl.where(seen, z, 0.0)
    numbers = numbers + (gl.reduce(z * z, 1, add),)
    cluster_wait()
    KINDS: gl.constexpr = 2 if CENTRED else 1
    found = cluster_collect(cluster_post(numbers, cta * 0, CTAS), KINDS, CTAS)
    y = hold(h).to(gl.float32)
    if CENTRED:
        centre = _mean(found, n, BLOCK, CTAS)
        scale = gl.rsqrt(_variance(found, centre, n, BLOCK, CTAS) + eps)
        y = y - centre[:, None]
        if mean is not None:
            gl.store(mean + row + cta * 0, centre, mask=cta == 0)
    else:
        scale = gl.rsqrt(all_of(found, CTAS) / n + eps)
    if rstd is not None:
        gl.store(rstd + row + cta * 0, scale, mask=cta == 0)
    y = y * scale[:, None]
    if weight is not None:
        y = y * load_part(weight, columns, seen, EVEN).to(gl.float32)
    if bias is not None:
        y = y + load_part(bias, columns, seen, EVEN).to(gl.float32)
    store_part(row_start(out, row, o_0, VECTOR), columns, seen, y.to(KIND), EVEN)
