"""The pieces of the Hopper attention backward: ranges, masks, the fragment order of dQ.

`kernel_gluon_sm90_bwd.py` puts them together and explains the roles and the barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from tileloom.device.compat import tma_store
from tileloom.ops.attention.pieces_gluon_sm90 import store_registers
from tileloom.ops.attention.pieces_packed import rows_of, sequence_of


@gluon.jit
def keys_of_program(
    program, key_blocks, heads_q, heads_kv, len_q, len_k, padded_q, packed, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, PACKED: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Which keys a program owns, and the rows beside them; of packed sequences `pieces_packed.py`.

    SHARED: the batches of a head are neighbours, since they share its bias or mask in L2.

    Returns batch (the sequence), key head and first key, which may be negative; the batch's index
    in descriptors of queries and of keys; its lengths; how many query rows are missing at the front
    of its blocks; the place of block 0 of its first query head in what has a line for each query.
    """
    index = program // key_blocks
    block = program - index * key_blocks
    group = heads_q // heads_kv
    if PACKED:
        cu_q, cu_k, sequences, total_q, total_k = packed
        sequence, start = sequence_of(block, cu_k, sequences, BLOCK_N)
        first_q, rows = rows_of(cu_q, sequence, total_q, len_q)
        first_k, keys = rows_of(cu_k, sequence, total_k, len_k)
        sequence = sequence.to(gl.int32)
        key = gl.maximum(keys - (gl.maximum(block - start, 0) + 1) * BLOCK_N, -BLOCK_N)
        missing = gl.maximum(gl.cdiv(rows, BLOCK_M), 1) * BLOCK_M - rows
        line = index * group * padded_q + (first_q // BLOCK_M + sequence) * BLOCK_M
        return sequence, index, key, first_q, first_k, rows, keys, missing, line
    else:
        if SHARED:
            batches = gl.num_programs(0) // (key_blocks * heads_kv)
            kv_head = index // batches
            batch = index - kv_head * batches
        else:
            batch = index // heads_kv
            kv_head = index - batch * heads_kv
        line = (batch * heads_q + kv_head * group) * padded_q
        return batch, kv_head, block * BLOCK_N, batch, batch, len_q, len_k, 0, line


@gluon.jit
def band_of(
    lengths_ptr, batch, len_q, len_k, left_top, right_top, left_bottom, right_bottom,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """The band i + lo <= j <= i + hi, j < end; the keys `first .. last - 1` that a row sees."""
    end = len_k
    if HAS_LENGTHS:
        end = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch.to(gl.int64)), 0), len_k).to(
            gl.int32
        )
    shift = end - len_q
    lo = 0
    hi = 0
    first = 0
    last = end
    if HAS_LEFT:
        lo = gl.maximum(-left_top, shift - left_bottom)
        first = gl.maximum(lo, 0)
    if HAS_RIGHT:
        hi = gl.minimum(right_top, right_bottom + shift)
        last = gl.minimum(end, len_q + hi)
    if HAS_LEFT and HAS_RIGHT:
        if hi < lo:  # bounds that contradict each other
            last = first
    return lo, hi, end, first, last


@gluon.jit
def queries_of(
    key, last, len_q, lo, hi, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Rows `start .. stop - 1` of the query blocks that may see keys from `key` on.

    At least one block, for the loop that must not run zero times.
    """
    total = gl.cdiv(len_q, BLOCK_M)
    start = 0
    stop = total
    if HAS_RIGHT:
        start = gl.minimum(gl.maximum(key - hi, 0) // BLOCK_M, total - 1)
    if HAS_LEFT:
        stop = gl.minimum(total, gl.cdiv(gl.maximum(key + BLOCK_N - lo, 0), BLOCK_M))
    stop = gl.where(key >= last, start + 1, gl.maximum(stop, start + 1))
    return start * BLOCK_M, stop * BLOCK_M


@gluon.jit
def following(row, line, start, stop, padded_q, BLOCK_M: gl.constexpr):
    """The query block after `row`: block by block, then head by head of the group.

    `line` is its place in what has one line for each query of each head.
    """
    is_last = row + BLOCK_M == stop
    line += gl.where(is_last, padded_q - (stop - start) + BLOCK_M, BLOCK_M)
    return gl.where(is_last, start, row + BLOCK_M), line


@gluon.jit
def masked_rows(
    key, end, lo, hi, BLOCK_M: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):
    """For 64 keys from `key` on: blocks below the first row or above the second need a mask."""
    FAR: gl.constexpr = 1 << 30
    below = 0
    above = FAR
    if HAS_RIGHT:
        below = key + 63 - hi
    if HAS_LEFT:
        above = key - lo - (BLOCK_M - 1)
    return gl.where((key + 64 > end) | (key < 0), FAR, below), above


@gluon.jit
def mask_transposed(s, key, row, end, lo, hi, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Hide from S^T `[keys, queries]` what is outside the band.

    Query 8 a + b is compared as `8 a >= limit - b`, as in `pieces_gluon_sm90.mask`.
    """
    FAR: gl.constexpr = 1 << 30
    x = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    L: gl.constexpr = x.type.layout
    j = key + gl.arange(0, x.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))
    a = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, L)))
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    a = gl.expand_dims(gl.expand_dims(a * 8, 0), 2)
    b = gl.expand_dims(gl.expand_dims(row + b, 0), 1)
    is_key = (j >= 0) & (j < end)
    least = gl.where(is_key, -FAR, FAR)
    if HAS_RIGHT:
        least = gl.where(is_key, j - hi, FAR)
    x = gl.where(a >= gl.expand_dims(gl.expand_dims(least, 1), 2) - b, x, float("-inf"))
    if HAS_LEFT:
        most = gl.expand_dims(gl.expand_dims(j - lo, 1), 2)
        x = gl.where(a <= most - b, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def clear_outside(x, key, first, last):
    """Set rows of keys outside `first .. last - 1` to zero, so that 0 * NaN cannot reach a sum."""
    D: gl.constexpr = x.type.shape[1]
    LANES: gl.constexpr = D // 8
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 4 * WARPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    for chunk in gl.static_range(x.type.shape[0] // ROWS):
        part = x.slice(chunk * ROWS, ROWS, 0)
        j = key + chunk * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        shown = gl.expand_dims((j >= first) & (j < last), 1)
        part.store(gl.where(shown, part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def columns_of(statistic, LAYOUT: gl.constexpr):
    """A number for each column, the same in all rows: `[1, columns]`."""
    return gl.expand_dims(statistic.load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def columns_start(statistic, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start values of an accumulator: a number for each column, the same in all rows.

    The sum then holds it, and no register has to.
    """
    x = gl.expand_dims(statistic.load(gl.SliceLayout(0, LAYOUT)), 0)
    return x.broadcast_to([KEYS, statistic.shape[0]])


@gluon.jit
def query_gradient(
    ds0, ds1, k_smem, WG: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr, first=0,
):  # fmt: skip
    """One half of dQ = dS K over both halves of the keys: columns of 64 queries, or rows of 128.

    `first` is the place of the first half of the keys in `k_smem`.
    """
    HALF: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    zero = gl.zeros([64, HALF], gl.float32, LAYOUT)
    k0 = k_smem.index(first).reshape([64, D])
    k1 = k_smem.index(first + 1).reshape([64, D])
    if BLOCK_M == 64:
        k0 = k0.slice(WG * HALF, HALF, 1)
        k1 = k1.slice(WG * HALF, HALF, 1)
    else:
        ds0 = ds0.slice(WG * 64, 64, 1)
        ds1 = ds1.slice(WG * 64, 64, 1)
    dq = warpgroup_mma(ds0.permute((1, 0)), k0, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def fragment_order(x):
    """Rows and columns of a wgmma accumulator `[64, N]` as a thread holds them: only names change.

    The order is (column / 16, row / 16, row % 16 / 8, row % 8, column % 8 / 2, column % 16 / 8,
    column % 2): a thread owns runs of 16 bytes, a warp 512 bytes.
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 16, 2, 4, 2])
    x = x.permute((3, 0, 1, 2, 5, 4, 6))
    return x.reshape([64 * N // 128, 128])


@gluon.jit
def fragment_inverse(x, N: gl.constexpr):
    """What `fragment_order` has renamed, as `[64, N]` again."""
    x = x.reshape([N // 16, 4, 2, 8, 4, 2, 2])
    x = x.permute((1, 2, 3, 0, 5, 4, 6))
    return x.reshape([64, N])


@gluon.jit
def halves(x):
    """The left and the right half of the columns of a register tile; no data moves."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.constexpr_function
def sorted_registers(layout):
    """The same owners, registers numbered by address: a thread's accesses are 16 bytes wide."""
    return gl.DistributedLinearLayout(
        sorted(layout.reg_bases), layout.lane_bases, layout.warp_bases, layout.block_bases,
        layout.shape,
    )  # fmt: skip


@gluon.jit
def reduce_add(ptr, start, x):
    """Add a tile in fragment order to `ptr + start`, a 64-bit offset: 16 bytes a thread."""
    flat = x.reshape([x.shape[0] * x.shape[1]])
    LAYOUT: gl.constexpr = sorted_registers(flat.type.layout)
    at = start + gl.arange(0, flat.shape[0], LAYOUT)
    gl.atomic_add(ptr + at, gl.convert_layout(flat, LAYOUT), sem="relaxed")


@gluon.jit
def store_keys(desc, smem, x, batch, head, key, len_k, out, head_dim_8, PACKED: gl.constexpr):
    """Write dK or dV of 64 keys by TMA; where they begin before a packed sequence, from registers.

    `out` has a pointer, and the strides of heads and rows in units of 8 elements.
    """
    if PACKED:
        ptr, head_stride, row_stride = out
        if key < 0:  # TMA stores nothing that begins before row 0
            at = (batch.to(gl.int64) * row_stride + head.to(gl.int64) * head_stride) * 8
            store_registers(ptr + at, row_stride, x, key, len_k, head_dim_8)
        else:
            smem.store(gl.reshape(x, [1, 1, x.shape[0], x.shape[1]]))
            fence_async_shared()
            tma_store(desc, [batch, head, key, 0], smem)
    else:
        smem.store(gl.reshape(x, [1, 1, x.shape[0], x.shape[1]]))
        fence_async_shared()
        tma_store(desc, [batch, head, key, 0], smem)
