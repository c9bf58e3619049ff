"""RMS and layer norm of long rows on Hopper: a cluster of CTAs walks over rows.

Mathematics as in `kernel_triton_fwd.py`. Tile picture: cluster p of P takes the rows p, p + P, ...,
and each of its CTAS x WARPS warps the same columns of each. The weight's and the bias's columns
stay in registers. A thread copies into shared memory what it will read itself, by `cp.async`:

    turn r: | asks for row r + STAGES - 1 | sends its sums of row r + 1 | takes those of all warps
              of row r and writes its columns of it |

Who waits for whom: a thread for its own copies of row r + 1 (`wait_group`); the threads of a CTA
for each other twice a turn, as the compiler does not see that nobody reads what another copies;
the warps of a cluster for each other, once a turn, for what was sent a turn before
(`tileloom.device.cluster`). All add up in the same order.

Bytes moved: every tensor once; weight and bias once a cluster.

Offsets are 64-bit outside a row: columns are below CTAS * BLOCK.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tileloom.device.cluster import cluster_ring, cluster_send, cluster_take, warp_layout
from tileloom.ops.rowwise.norm.pieces_walk_sm90 import (
    ask,
    both_of,
    join_pair,
    pair_of,
    pieces_of,
    ring_of,
    vector_of,
)
from tileloom.ops.rowwise.pieces_gluon_sm90 import add, columns_of, each

INTEGERS = ("count", "clusters", "x_0", "o_0")


@gluon.jit
def _send(numbers, turn, rows, slot, layout: gl.constexpr, SIZE: gl.constexpr,
          CENTRED: gl.constexpr, IS_BF16: gl.constexpr, CTAS: gl.constexpr,
          WARPS: gl.constexpr):  # fmt: skip
    """Send the sums of a warp's columns of a row, to all warps of the cluster."""
    n: gl.constexpr = SIZE // 2 // len(rows)
    zero = gl.zeros([CTAS, WARPS, n], gl.float32, layout)
    if CENTRED:
        total = zero
        for k in gl.static_range(len(rows)):
            low, high = pair_of(rows[k].index(slot).load(layout), IS_BF16)
            total += low + high
        own = gl.reduce(total, 2, add) * (1.0 / SIZE)
    squares = zero
    for k in gl.static_range(len(rows)):
        low, high = pair_of(rows[k].index(slot).load(layout), IS_BF16)
        if CENTRED:
            low -= each(own)
            high -= each(own)
        squares += low * low + high * high
    squares = gl.reduce(squares, 2, add)
    if CENTRED:
        cluster_send(numbers, turn, (own, squares), CTAS, WARPS)
    else:
        cluster_send(numbers, turn, (squares,), CTAS, WARPS)


@gluon.jit(do_not_specialize=INTEGERS)
def norm_fwd_walk_kernel(
    x, weight, bias, out, mean, rstd, eps, count, clusters, x_0, o_0,
    BLOCK: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    CENTRED: gl.constexpr,
):  # fmt: skip
    """Rows of CTAS * BLOCK columns of 16 bits; absent tensors are None, strides in 8 elements.

    Weight and bias are of 16 bits or float32.
    """
    IS_BF16: gl.constexpr = x.dtype.element_ty == gl.bfloat16
    KINDS: gl.constexpr = 2 if CENTRED else 1
    WIDTH: gl.constexpr = BLOCK * CTAS
    SIZE: gl.constexpr = BLOCK // WARPS
    PIECES: gl.constexpr = pieces_of(SIZE)
    n: gl.constexpr = SIZE // 2 // PIECES
    STEP: gl.constexpr = CTAS * WARPS * n
    layout: gl.constexpr = warp_layout(WARPS, CTAS, 4)
    words: gl.constexpr = gl.pointer_type(gl.int32)
    rows = ring_of(CTAS, WARPS, n, PIECES, STAGES)
    numbers = cluster_ring(KINDS, CTAS, WARPS)
    columns = columns_of(layout, CTAS, WARPS, n)
    x = gl.cast(x, words)
    out = gl.cast(out, words)
    in_x = x_0.to(gl.int64) * 4
    in_out = o_0.to(gl.int64) * 4
    begin = gl.program_id(0)
    for s in gl.static_range(STAGES - 1):
        ask(rows, s, x, begin + s * clusters, count, in_x, columns, STEP)
        async_copy.commit_group()
    if weight is not None:
        w = vector_of(weight, columns, STEP, PIECES)
    if bias is not None:
        b = vector_of(bias, columns, STEP, PIECES)
    first: gl.constexpr = gl.SliceLayout(2, layout)
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, first)), 1)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, first)), 0)
    at = (cta + warp) * 0
    is_first = (cta + warp) == 0
    async_copy.wait_group(STAGES - 2)
    _send(numbers, 0, rows, 0, layout, SIZE, CENTRED, IS_BF16, CTAS, WARPS)
    turn = 0
    slot = 0
    for row in range(begin, count, clusters):
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        following = gl.where(slot == STAGES - 1, 0, slot + 1)
        ask(rows, free, x, row + (STAGES - 1) * clusters, count, in_x, columns, STEP)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 2)
        if row + clusters < count:
            _send(numbers, turn + 1, rows, following, layout, SIZE, CENTRED, IS_BF16, CTAS, WARPS)
        found = cluster_take(numbers, turn, at.to(gl.float32), KINDS, SIZE if CENTRED else 0, CTAS,
                             WARPS)  # fmt: skip
        scale = gl.rsqrt(found[KINDS - 1] / WIDTH + eps)
        if rstd is not None:
            gl.store(rstd + row + at, scale, mask=is_first)
        if CENTRED:
            if mean is not None:
                gl.store(mean + row + at, found[0], mask=is_first)
        to = out + row * in_out + columns
        for k in gl.static_range(PIECES):
            low, high = pair_of(rows[k].index(slot).load(layout), IS_BF16)
            if CENTRED:
                low -= each(found[0])
                high -= each(found[0])
            low *= each(scale)
            high *= each(scale)
            if weight is not None:
                w_low, w_high = both_of(w[k], weight.dtype.element_ty)
                low *= w_low
                high *= w_high
            if bias is not None:
                b_low, b_high = both_of(b[k], bias.dtype.element_ty)
                low += b_low
                high += b_high
            gl.store(to + k * STEP, join_pair(low, high, IS_BF16))
        slot = following
        turn += 1
