"""RMS and layer norm of long rows on Hopper: a cluster of CTAs takes a row, or a few.

Mathematics as in `kernel_triton_fwd.py`. Tile picture: cluster p takes ROWS rows, p ROWS and on,
and each of its CTAS x WARPS warps n columns of them, which it keeps in registers, two elements of
16 bits in one:

    a row | CTA 0: warp 0 | warp 1 | ... | CTA 1: warp 0 | ... |
            each warp: the mean of its own columns, and the squares about it, which all show each
            other; the row's; its own columns of out

Who waits for whom: the warps of a cluster for each other, once (`tileloom.device.cluster`). All add
up in the same order. Weight and bias are read once for the ROWS rows, when the sums are there.

Bytes moved: every tensor once, whatever the length of the rows; weight and bias from L2.

Offsets are 64-bit outside a row: columns are below CTAS * WARPS * n.
"""

# ruff: noqa: RUF005  (Triton knows no *tuple inside a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cluster import cluster_begin, cluster_moments, cluster_sums, warp_layout
from tileloom.ops.rowwise.pieces_gluon_sm90 import add, columns_of, each, hold, row_start

INTEGERS = ("count", "x_0", "r_0", "o_0")


@gluon.jit(do_not_specialize=INTEGERS)
def norm_fwd_cluster_kernel(
    x, residual, weight, bias, out, stream, mean, rstd, eps, count, x_0, r_0, o_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr,
    ROWS: gl.constexpr, CENTRED: gl.constexpr,
):  # fmt: skip
    """Take ROWS rows of CTAS * BLOCK columns a cluster; the last row again beyond all.

    Absent tensors are None; strides come in units of VECTOR elements.
    """
    layout: gl.constexpr = warp_layout(WARPS, CTAS, VECTOR)
    KIND: gl.constexpr = x.dtype.element_ty
    KINDS: gl.constexpr = 2 if CENTRED else 1
    WIDTH: gl.constexpr = BLOCK * CTAS
    SIZE: gl.constexpr = BLOCK // WARPS
    box = cluster_begin(KINDS * ROWS, CTAS, WARPS)
    columns = columns_of(layout, CTAS, WARPS, SIZE)
    rows = ()
    hs = ()
    for r in gl.static_range(ROWS):
        row = gl.minimum(gl.program_id(0) * ROWS + r, count - 1)
        rows = rows + (row,)
        hs = hs + (gl.load(row_start(x, row, x_0, VECTOR) + columns),)
    numbers = ()
    seen = ()
    for r in gl.static_range(ROWS):
        h = hs[r]
        if residual is not None:
            added = gl.load(row_start(residual, rows[r], r_0, VECTOR) + columns)
            h = (h.to(gl.float32) + added.to(gl.float32)).to(KIND)
            gl.store(row_start(stream, rows[r], o_0, VECTOR) + columns, h)
        seen = seen + (h,)
        z = h.to(gl.float32)
        if CENTRED:
            own = gl.reduce(z, 2, add) * (1.0 / SIZE)
            z = hold(h).to(gl.float32) - each(own)
            numbers = numbers + (own,)
        numbers = numbers + (gl.reduce(z * z, 2, add),)
    if CENTRED:
        found = cluster_moments(box, numbers, SIZE, CTAS, WARPS)
    else:
        found = cluster_sums(box, numbers, CTAS, WARPS)
    if weight is not None:
        w = gl.load(weight + columns)
    if bias is not None:
        b = gl.load(bias + columns)
    first: gl.constexpr = gl.SliceLayout(2, layout)
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, first)), 1)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, first)), 0)
    at = (cta + warp) * 0
    is_first = (cta + warp) == 0
    for r in gl.static_range(ROWS):
        y = hold(seen[r]).to(gl.float32)
        if CENTRED:
            y = y - each(found[2 * r])
            if mean is not None:
                gl.store(mean + rows[r] + at, found[2 * r], mask=is_first)
        scale = gl.rsqrt(found[KINDS * r + KINDS - 1] / WIDTH + eps)
        if rstd is not None:
            gl.store(rstd + rows[r] + at, scale, mask=is_first)
        y = y * each(scale)
        if weight is not None:
            y = y * hold(w).to(gl.float32)
        if bias is not None:
            y = y + hold(b).to(gl.float32)
        gl.store(row_start(out, rows[r], o_0, VECTOR) + columns, y.to(KIND))
