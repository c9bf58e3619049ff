"""Gradients of RMS and layer norm on Hopper: a cluster of CTAs walks over rows.

Mathematics as in `kernel_triton_bwd.py`. Tile picture: cluster p of P takes the rows p, p + P, ...,
and each of its CTAS x WARPS warps the same columns of each. The weight's columns and the shares of
dweight and dbias, two numbers a column, stay in registers. A thread copies into shared memory what
it will read itself of h and g, by `cp.async`:

    turn r: | asks for row r + STAGES - 1 | adds row r + 1 to the shares and sends its sums | takes
              those of all warps of row r and writes its columns of it |

Who waits for whom: as in `kernel_gluon_sm90_fwd_walk.py`.

Bytes moved: g, h and dh once; the weight once a cluster; the workspace of the shares is written and
read once, one share a cluster.

Offsets are 64-bit outside a row: columns are below CTAS * BLOCK.
"""

# ruff: noqa: RUF005  (Triton knows no *tuple inside a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tileloom.device.cluster import cluster_ring, cluster_send, cluster_take, warp_layout
from tileloom.device.grids import gdc_launch_dependents
from tileloom.ops.rowwise.norm.pieces_walk_sm90 import (
    ask,
    both_of,
    join_pair,
    leave,
    pair_of,
    pieces_of,
    ring_of,
    vector_of,
)
from tileloom.ops.rowwise.pieces_gluon_sm90 import add, columns_of, each

INTEGERS = ("count", "clusters", "g_0", "h_0", "o_0")


@gluon.jit
def _numbers(mean, rstd, row, count):
    """Mean and rstd of a row; the last row's beyond all."""
    row = gl.minimum(row, count - 1)
    centre = 0.0
    if mean is not None:
        centre = gl.load(mean + row)
    return centre, gl.load(rstd + row)


@gluon.jit
def _away(h, centre, IS_BF16: gl.constexpr, CENTRED: gl.constexpr):
    low, high = pair_of(h, IS_BF16)
    if CENTRED:
        low -= centre
        high -= centre
    return low, high


@gluon.jit
def _begin(
    numbers, turn, g_rows, h_rows, slot, centre, scale, w, weight, dweight, dbias,
    layout: gl.constexpr, IS_BF16: gl.constexpr, CENTRED: gl.constexpr, DWEIGHT: gl.constexpr,
    DBIAS: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add a row to the shares, and send the sums of this warp's columns."""
    across = gl.zeros_like(dweight[0][0])
    flat = gl.zeros_like(across)
    of_weight = ()
    of_bias = ()
    for k in gl.static_range(len(g_rows)):
        low, high = _away(h_rows[k].index(slot).load(layout), centre, IS_BF16, CENTRED)
        g_low, g_high = pair_of(g_rows[k].index(slot).load(layout), IS_BF16)
        low *= g_low
        high *= g_high
        if DWEIGHT:
            share = dweight[k]
            of_weight = of_weight + ((share[0] + low * scale, share[1] + high * scale),)
        if DBIAS:
            share = dbias[k]
            of_bias = of_bias + ((share[0] + g_low, share[1] + g_high),)
        if weight is not None:
            w_low, w_high = both_of(w[k], weight.dtype.element_ty)
            low *= w_low
            high *= w_high
            g_low *= w_low
            g_high *= w_high
        across += low + high
        if CENTRED:
            flat += g_low + g_high
    if CENTRED:
        sums = gl.reduce(across, 2, add), gl.reduce(flat, 2, add)
    else:
        sums = (gl.reduce(across, 2, add),)
    cluster_send(numbers, turn, sums, CTAS, WARPS)
    return of_weight if DWEIGHT else dweight, of_bias if DBIAS else dbias


@gluon.jit(do_not_specialize=INTEGERS)
def norm_bwd_walk_kernel(
    g, h, weight, mean, rstd, dh, partial, count, clusters, g_0, h_0, o_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    DWEIGHT: gl.constexpr, DBIAS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Rows of CTAS * BLOCK columns of 16 bits; absent tensors are None, strides in 8 elements.

    `partial` is `[clusters, DWEIGHT + DBIAS, n]`, even columns first. OVERLAPS as in
    `norm_bwd_kernel`.
    """
    IS_BF16: gl.constexpr = h.dtype.element_ty == gl.bfloat16
    CENTRED: gl.constexpr = mean is not None
    KINDS: gl.constexpr = 2 if CENTRED else 1
    PIECES: gl.constexpr = pieces_of(BLOCK // WARPS)
    n: gl.constexpr = BLOCK // WARPS // 2 // PIECES
    STEP: gl.constexpr = CTAS * WARPS * n
    WIDTH: gl.constexpr = CTAS * BLOCK
    layout: gl.constexpr = warp_layout(WARPS, CTAS, 4)
    words: gl.constexpr = gl.pointer_type(gl.int32)
    g_rows = ring_of(CTAS, WARPS, n, PIECES, STAGES)
    h_rows = ring_of(CTAS, WARPS, n, PIECES, STAGES)
    numbers = cluster_ring(KINDS, CTAS, WARPS)
    columns = columns_of(layout, CTAS, WARPS, n)
    g = gl.cast(g, words)
    h = gl.cast(h, words)
    dh = gl.cast(dh, words)
    in_g = g_0.to(gl.int64) * 4
    in_h = h_0.to(gl.int64) * 4
    in_out = o_0.to(gl.int64) * 4
    begin = gl.program_id(0)
    for s in gl.static_range(STAGES - 1):
        ask(h_rows, s, h, begin + s * clusters, count, in_h, columns, STEP)
        ask(g_rows, s, g, begin + s * clusters, count, in_g, columns, STEP)
        async_copy.commit_group()
    w = ()
    if weight is not None:
        w = vector_of(weight, columns, STEP, PIECES)
    first: gl.constexpr = gl.SliceLayout(2, layout)
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, first)), 1)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, first)), 0)
    like = (cta + warp).to(gl.float32)
    zero = gl.zeros([CTAS, WARPS, n], gl.float32, layout)
    dweight = ()
    dbias = ()
    for _ in gl.static_range(PIECES):
        dweight = dweight + ((zero, zero),)
        dbias = dbias + ((zero, zero),)
    centre, scale = _numbers(mean, rstd, begin, count)
    next_centre, next_scale = _numbers(mean, rstd, begin + clusters, count)
    async_copy.wait_group(STAGES - 2)
    dweight, dbias = _begin(
        numbers, 0, g_rows, h_rows, 0, centre, scale, w, weight, dweight, dbias,
        layout, IS_BF16, CENTRED, DWEIGHT, DBIAS, CTAS, WARPS,
    )  # fmt: skip
    turn = 0
    slot = 0
    for row in range(begin, count, clusters):
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        following = gl.where(slot == STAGES - 1, 0, slot + 1)
        ahead = row + (STAGES - 1) * clusters
        ask(h_rows, free, h, ahead, count, in_h, columns, STEP)
        ask(g_rows, free, g, ahead, count, in_g, columns, STEP)
        async_copy.commit_group()
        ahead_centre, ahead_scale = _numbers(mean, rstd, row + 2 * clusters, count)
        async_copy.wait_group(STAGES - 2)
        if row + clusters < count:
            dweight, dbias = _begin(
                numbers, turn + 1, g_rows, h_rows, following, next_centre, next_scale, w, weight,
                dweight, dbias, layout, IS_BF16, CENTRED, DWEIGHT, DBIAS, CTAS, WARPS,
            )  # fmt: skip
        found = cluster_take(numbers, turn, like, KINDS, 0, CTAS, WARPS)
        slope = each(found[0]) / WIDTH * scale * scale * scale
        if CENTRED:
            flat = each(found[1]) / WIDTH * scale
        to = dh + row * in_out + columns
        for k in gl.static_range(PIECES):
            low, high = _away(h_rows[k].index(slot).load(layout), centre, IS_BF16, CENTRED)
            low *= slope
            high *= slope
            if CENTRED:
                low += flat
                high += flat
            g_low, g_high = pair_of(g_rows[k].index(slot).load(layout), IS_BF16)
            if weight is not None:
                w_low, w_high = both_of(w[k], weight.dtype.element_ty)
                g_low *= w_low
                g_high *= w_high
            both = join_pair(g_low * scale - low, g_high * scale - high, IS_BF16)
            gl.store(to + k * STEP, both)
        centre, scale = next_centre, next_scale
        next_centre, next_scale = ahead_centre, ahead_scale
        slot = following
        turn += 1
    if DWEIGHT or DBIAS:
        if OVERLAPS:
            gdc_launch_dependents()
        share = partial + begin.to(gl.int64) * ((DWEIGHT + DBIAS) * WIDTH)
        for k in gl.static_range(PIECES):
            at = share + columns + k * STEP
            if DWEIGHT:
                leave(at, dweight[k], WIDTH)
            if DBIAS:
                leave(at + DWEIGHT * WIDTH, dbias[k], WIDTH)
