"""Bias and bool mask in the Hopper attention forward: how they reach the scores; what they hide.

MODE of either: 0 it is not there, 1 the same for every row, 2 another for each, 3 the same but it
rides: the producer loads it by TMA beside K and V, one slot of `[64, BLOCK_N]` for each warpgroup.
One of the two can ride. Else each thread loads what it needs from global memory, in the layout of
the scores. Strides come in units of VECTOR elements; with VECTOR 0 the last dimension has a stride
of its own, else that is 1.

What hides a key from every row of a tile may leave it NaN, and 0 * NaN is NaN. That is rare, so no
step pays for it: a warpgroup that finds NaN in its O says so (`judge`), and the producer sends the
tile round again (`following_of`) as `-1 - tile`; then the rows of K and V that no row of the tile
sees are cleared in shared memory (`clear_unseen`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tileloom.device.barriers import arrive_each_thread, named_barrier_sync
from tileloom.device.compat import thread_barrier, tma_load
from tileloom.device.order import stay
from tileloom.ops.attention.pieces_gluon_sm90 import (
    CLEARED,
    slot_of,
)
from tileloom.ops.attention.pieces_rings_sm90 import keys_of, values_of

_WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def scores_of(
    ride_desc, ride_b, ride_h, any_desc, bias, bias_b, bias_h, bias_q, bias_k, mask, mask_b,
    mask_h, mask_q, mask_k, any_ptr, ring, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, BIAS_MODE: gl.constexpr, MASK_MODE: gl.constexpr,
):  # fmt: skip
    """Shared memory and barriers of bias and mask, with all that leads to them, as one tuple.

    What is not there is replaced by `any_desc`, `any_ptr` and `ring`: a partition takes no None.
    """
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    verdict_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    verdict = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 1], verdict_layout)
    judged = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for b in gl.static_range(2):
        mbarrier.init(judged.index(b), count=128 * CONSUMERS)
    if BIAS_MODE == 3 or MASK_MODE == 3:
        SLOTS: gl.constexpr = STAGES * CONSUMERS
        shape: gl.constexpr = [SLOTS, 1, 1, 64, BLOCK_N]
        ride = gl.allocate_shared_memory(ride_desc.dtype, shape, ride_desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
        for b in gl.static_range(SLOTS):
            mbarrier.init(full.index(b), count=1)
            mbarrier.init(empty.index(b), count=128)
    else:
        ride_desc = any_desc
        ride = ring
        full = judged
        empty = judged
    if BIAS_MODE == 0:
        bias = any_ptr
    if MASK_MODE == 0:
        mask = any_ptr
    return (
        ride_desc, ride_b, ride_h, ride, full, empty, verdict, judged, bias, bias_b, bias_h,
        bias_q, bias_k, mask, mask_b, mask_h, mask_q, mask_k,
    )  # fmt: skip


@gluon.jit
def load_ride(desc, batch, head, row, col, block, smem, full, empty, CONSUMERS: gl.constexpr):
    """Load a block of what rides, each warpgroup's rows into its slot; the producer's side."""
    STAGES: gl.constexpr = smem.type.shape[0] // CONSUMERS
    slot, phase = slot_of(block, STAGES)
    for w in gl.static_range(CONSUMERS):
        at = slot * CONSUMERS + w
        mbarrier.wait(empty.index(at), phase ^ 1)
        fence_async_shared()  # behind the consumers' loads; here, because it holds nobody up
        mbarrier.expect(full.index(at), desc.block_type.nbytes)
        tma_load(desc, [batch, head, row + 64 * w, col], full.index(at), smem.index(at))


@gluon.jit
def wait_ride(block, smem, full, WG: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait for the block of what rides; the slot that it is in."""
    STAGES: gl.constexpr = smem.type.shape[0] // CONSUMERS
    slot, phase = slot_of(block, STAGES)
    at = slot * CONSUMERS + WG
    mbarrier.wait(full.index(at), phase)
    return at


@gluon.jit
def widen(x):
    """A tensor as float32; of bfloat16, two neighbours by one instruction each.

    LLVM takes 16 bits out and shifts them, which are two for every other element.
    """
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [x], gl.float32, True, 2)
    else:
        return x.to(gl.float32)


@gluon.jit
def head_at(pointer, batch, head, stride_b, stride_h, VECTOR: gl.constexpr):
    """Where the first score of a head lies in a bias or mask."""
    UNIT: gl.constexpr = VECTOR if VECTOR > 0 else 1
    return pointer + (batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h) * UNIT


@gluon.jit
def rows_at(
    place, row, len_q, stride_q, like, MODE: gl.constexpr, VECTOR: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Where key 0 of each row lies, `[64]`, given that of row 0; that itself in mode 1.

    Rows that are not there are the last one, and before packed sequences the first.
    """
    UNIT: gl.constexpr = VECTOR if VECTOR > 0 else 1
    if MODE == 2:
        L: gl.constexpr = gl.reshape(like, [like.shape[0], like.shape[1] // 8, 8]).type.layout
        i = row + gl.arange(0, like.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))
        i = gl.maximum(i, 0) if PACKED else gl.minimum(i, len_q - 1)
        place = place + i.to(gl.int64) * (stride_q * UNIT)
    return place


@gluon.jit
def given_of(
    scores, careful, batch, head, tile_row, WG: gl.constexpr, len_q, like, BIAS_MODE: gl.constexpr,
    BIAS_VECTOR: gl.constexpr, MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """What the steps of a tile want of bias and mask; see `block_softmax`, `clear_if_careful`."""
    _, _, _, ride, full, empty, _, _ = scores[:8]
    bias, bias_b, bias_h, bias_q, bias_k, mask, mask_b, mask_h, mask_q, mask_k = scores[8:]
    row = tile_row + 64 * WG
    bias = head_at(bias, batch, head, bias_b, bias_h, BIAS_VECTOR)
    mask = head_at(mask, batch, head, mask_b, mask_h, MASK_VECTOR)
    bias_at = rows_at(bias, row, len_q, bias_q, like, BIAS_MODE, BIAS_VECTOR, PACKED)
    mask_at = rows_at(mask, row, len_q, mask_q, like, MASK_MODE, MASK_VECTOR, PACKED)
    return (
        careful, tile_row, len_q, bias, bias_at, bias_q, bias_k, mask, mask_at, mask_q, mask_k,
        ride, full, empty,
    )  # fmt: skip


@gluon.jit
def load_block(
    place, stride_k, col, like, MODE: gl.constexpr, VECTOR: gl.constexpr, EVEN: gl.constexpr
):
    """A block from global memory, in the layout of the scores: `[64, N]`, `[1, N]` in mode 1.

    Columns before 0 are not read. Column 8 a + b is the pointer of b plus a constant; see `mask`.
    """
    N8: gl.constexpr = like.shape[1] // 8
    L: gl.constexpr = gl.reshape(like, [like.shape[0], N8, 8]).type.layout
    KEYS: gl.constexpr = gl.SliceLayout(0, L)
    a = gl.arange(0, N8, gl.SliceLayout(1, KEYS)) * 8
    b = gl.arange(0, 8, gl.SliceLayout(0, KEYS))
    if EVEN:
        col = gl.multiple_of(col, 8)
    a_at = a.to(gl.int64)
    b_at = col.to(gl.int64) + b.to(gl.int64)
    if VECTOR == 0:
        a_at = a_at * stride_k
        b_at = b_at * stride_k
    seen = gl.expand_dims(a, 1) >= gl.expand_dims(0 - col - b, 0)
    a_at = gl.expand_dims(a_at, 1)
    b_at = gl.expand_dims(b_at, 0)
    if MODE == 2:
        place = gl.expand_dims(gl.expand_dims(place, 1), 2)
        seen = gl.expand_dims(seen, 0)
        a_at = gl.expand_dims(a_at, 0)
        b_at = gl.expand_dims(b_at, 0)
    at = (place + b_at) + a_at
    if EVEN:
        x = gl.load(at)
    else:
        seen, _ = gl.broadcast(seen, at)
        x = gl.load(at, mask=seen, other=0)
    return x if MODE == 2 else gl.expand_dims(x, 0)


@gluon.jit
def weigh(
    s, scale, col, block, bias_at, bias_k, mask_at, mask_k, ride, ride_full, ride_empty,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, BIAS_MODE: gl.constexpr, BIAS_VECTOR: gl.constexpr,
    MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Scores with their bias, scaled; without a bias as they were. What is hidden is -inf."""
    x = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    slot = 0
    if BIAS_MODE == 3 or MASK_MODE == 3:
        slot = wait_ride(block, ride, ride_full, WG, CONSUMERS)
        riding = ride.index(slot).reshape(s.shape).load(s.type.layout)
        riding = gl.reshape(riding, x.shape)
    if BIAS_MODE > 0:
        if BIAS_MODE == 3:
            bias = riding
        else:
            bias = load_block(bias_at, bias_k, col, s, BIAS_MODE, BIAS_VECTOR, EVEN)
        x = x * scale + widen(bias)
    if MASK_MODE > 0:
        if MASK_MODE == 3:
            shown = riding
        else:
            shown = load_block(mask_at, mask_k, col, s, MASK_MODE, MASK_VECTOR, EVEN)
        shown, _ = gl.broadcast(shown != 0, x)
        x = gl.where(shown, x, float("-inf"))
    if BIAS_MODE == 3 or MASK_MODE == 3:
        # Behind the arithmetic: what was loaded need not be held in registers all at once.
        arrive_each_thread(ride_empty.index(slot))
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def judge(acc, count, verdict, judged, WG: gl.constexpr, CONSUMERS: gl.constexpr, careful):
    """Say whether this warpgroup's O has NaN; not of a tile that goes round for the second time."""
    spoilt = gl.max(gl.max((acc != acc).to(gl.int32), 1), 0)
    spoilt = gl.where(careful, 0, spoilt)
    slot = count & 1
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    verdict.index(slot * CONSUMERS + WG).store(gl.full([1], spoilt, gl.int32, LAYOUT))
    arrive_each_thread(judged.index(slot))
    return spoilt


@gluon.jit
def is_spoilt(count, verdict, judged, CONSUMERS: gl.constexpr):
    """Wait for the verdicts over a tile; the producer's side."""
    slot = count & 1
    mbarrier.wait(judged.index(slot), (count >> 1) & 1)
    spoilt = 0
    for w in gl.static_range(CONSUMERS):
        one = verdict.index(slot * CONSUMERS + w).load(gl.BlockedLayout([1], [32], [1], [0]))
        spoilt = gl.maximum(spoilt, gl.max(one, 0))
    return spoilt != 0


@gluon.jit
def following_of(tile, suspect, fresh, end, count, verdict, judged, CONSUMERS: gl.constexpr):
    """The tile after the one that was just loaded, and the one whose verdict is still to come.

    A verdict is asked for when the tile after has been loaded, so that nobody waits for it: until
    then the consumers have work. Where nothing comes after, the last tile's is waited for as well.
    """
    following = fresh
    if suspect < end:
        if is_spoilt(count - 1, verdict, judged, CONSUMERS):
            following = -1 - suspect
    suspect = tile  # that of a second round is good, but waited for: no phase is left out
    if (following >= end) & (suspect < end):
        if is_spoilt(count, verdict, judged, CONSUMERS):
            following = -1 - suspect
        suspect = end
    return following, suspect


@gluon.jit
def _at(i, j, stride_q, stride_k, VECTOR: gl.constexpr):
    """Offsets of rows `i` `[M, 1]` and keys `j` `[N]`, both int64."""
    if VECTOR == 0:
        return gl.expand_dims(j * stride_k, 0) + i * stride_q
    else:
        return gl.expand_dims(j, 0) + i * (stride_q * VECTOR)


@gluon.jit
def _keep(tile, chunk, seen):
    """Set those of 16 rows of a tile to zero that are not seen."""
    D: gl.constexpr = tile.type.shape[1]
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    CLEAR: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    keep = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(1, CLEAR)) != 0, 1)
    rows = tile.slice(chunk * 16, 16, 0)
    rows.store(gl.where(keep, rows.load(CLEAR), 0.0))


@gluon.jit
def clear_unseen(
    rings, item, SLOTS: gl.constexpr, col, tile_row, len_q, lo, hi, bias_head, bias_q, bias_k,
    mask_head, mask_q, mask_k, WG: gl.constexpr, CONSUMERS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BIAS_MODE: gl.constexpr, BIAS_VECTOR: gl.constexpr,
    MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
):  # fmt: skip
    """Set the rows of K and V that no row of the tile sees to zero; `clear_hidden` for all masks.

    The warpgroups share the work, 16 keys at a time, and meet before any of them reads.
    """
    BLOCK_N: gl.constexpr = rings[0].type.shape[3]
    TILES: gl.constexpr = rings[0].type.shape[0] // rings[1].type.shape[0]
    L: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    thread_barrier()  # with the one below, so that what does not come here needs none
    tile_row = stay(tile_row)
    for chunk in gl.static_range(BLOCK_N // 16):
        if chunk % CONSUMERS == WG:
            j = col + chunk * 16 + gl.arange(0, 16, gl.SliceLayout(0, L))
            j_at = j.to(gl.int64)
            seen = gl.zeros([16], gl.int32, gl.SliceLayout(0, L))
            for part in range(CONSUMERS):
                i = tile_row + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
                i_at = gl.expand_dims(i.to(gl.int64), 1)
                there = (i >= 0) & (i < len_q)
                shown = gl.expand_dims(there, 1) & gl.expand_dims(j >= 0, 0)
                if HAS_RIGHT:
                    shown = shown & (gl.expand_dims(j, 0) <= gl.expand_dims(i + hi, 1))
                if HAS_LEFT:
                    shown = shown & (gl.expand_dims(j, 0) >= gl.expand_dims(i + lo, 1))
                if MASK_MODE > 0:
                    at = _at(i_at, j_at, mask_q, mask_k, MASK_VECTOR)
                    shown = shown & (gl.load(mask_head + at, mask=shown, other=0) != 0)
                if BIAS_MODE > 0:
                    at = _at(i_at, j_at, bias_q, bias_k, BIAS_VECTOR)
                    bias = gl.load(bias_head + at, mask=shown, other=0).to(gl.float32)
                    shown = shown & (bias != float("-inf"))
                seen = gl.maximum(seen, gl.max(shown.to(gl.int32), 0))
            for tile in gl.static_range(TILES):
                _keep(keys_of(rings, item % SLOTS, tile, SLOTS), chunk, seen)
            _keep(values_of(rings, (item + 1) % SLOTS, SLOTS), chunk, seen)
    thread_barrier()
    fence_async_shared()
    named_barrier_sync(CLEARED, 128 * CONSUMERS)


@gluon.jit
def clear_if_careful(
    rings, ring_full, item, col, lo, hi, given, WG: gl.constexpr, CONSUMERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BIAS_MODE: gl.constexpr,
    BIAS_VECTOR: gl.constexpr, MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
):  # fmt: skip
    """Clear K and V of a block before K is used, if the tile goes round for the second time."""
    SLOTS: gl.constexpr = 2 * ring_full[0].type.shape[0]
    careful, tile_row, len_q, bias_head, _, bias_q, bias_k = given[:7]
    mask_head, _, mask_q, mask_k = given[7:11]
    if careful:
        slot, phase = slot_of(item + 1, SLOTS)
        mbarrier.wait(ring_full[1].index(slot // 2), phase)
        clear_unseen(
            rings, item, SLOTS, col, tile_row, len_q, lo, hi, bias_head, bias_q, bias_k, mask_head,
            mask_q, mask_k, WG, CONSUMERS, HAS_LEFT, HAS_RIGHT, BIAS_MODE, BIAS_VECTOR, MASK_MODE,
            MASK_VECTOR,
        )  # fmt: skip
