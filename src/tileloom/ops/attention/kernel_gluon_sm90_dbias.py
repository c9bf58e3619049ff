"""Gradient of an attention bias that batches or heads share, for Hopper (sm_90a) in Gluon.

    dbias[i, j] = sum over batches and heads that share it of  P * (dO V^T - delta)
    P = exp2(((scale Q K^T + bias) - LSE) log2(e) + log2(weight))

Picture. A program takes tiles of 128 queries and 128 keys of the gradient, one after the other; of
a tile it visits every batch and head that shares it, in a fixed order, and sums dS in registers:
each of two consumer warpgroups 64 queries. One producer warp loads Q and K, then dO and V of each
visit by TMA into the slots of one ring, ahead of the consumers, and the tile's bias once. The
sums leave by TMA, from where the bias lay. All products of a visit are in flight together, but
where masks cut tiles (registers); LSE, weights and delta of the next one are loaded ahead.

Scores are hidden one by one: no key that a row may not see reaches it, whatever it holds. A visit
of which no score is visible is left out by both sides.

Bytes moved: Q, K, V and dO once for each tile and visit (from L2, which is what limits it), the
bias and its gradient once.

Who waits for whom (mbarriers, by phase; counts in brackets):
    full[s]      (1)      producer's TMA -> consumers: slot s holds Q and K, or dO and V
    empty[s]     (256)    every consumer thread -> producer: slot s may be filled again
    bias_full    (1)      producer's TMA -> consumers: the tile's bias is there
    bias_empty   (2)      consumers -> producer: the tile's gradient has left its place
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tileloom.device.barriers import arrive_each_thread
from tileloom.device.compat import tma_load, tma_store
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import band_of
from tileloom.ops.attention.pieces_scores_sm90 import widen

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place_of(tile, own_h, q_blocks, k_blocks):
    """First row and first key of a tile, and its batch and head of the gradient."""
    rest = tile // k_blocks
    col = (tile - rest * k_blocks) * 128
    line = rest // q_blocks
    batch = line // own_h
    return (rest - line * q_blocks) * 128, col, batch, line - batch * own_h


@gluon.jit
def _visit_of(
    visit, own_batch, own_head, all_h, row, col, band, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Batch and head of a visit, its band, and whether the tile has a visible score in it."""
    lengths_ptr, len_q, len_k, left_top, right_top, left_bottom, right_bottom = band
    batch = own_batch + visit // all_h
    head = own_head + visit % all_h
    lo, hi, end, _first, last = band_of(
        lengths_ptr, batch, len_q, len_k, left_top, right_top, left_bottom, right_bottom,
        HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    is_seen = col < last
    if HAS_RIGHT:
        is_seen = is_seen & (col <= row + 127 + hi)
    if HAS_LEFT:
        is_seen = is_seen & (col + 127 >= row + lo)
    return batch, head, lo, hi, end, is_seen


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, bias_desc, smem, bias_smem, full, empty, bias_full, bias_empty,
    band, tiles, q_blocks, k_blocks, own_h, all_h, visits, group, bias_b, bias_h,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = full.type.shape[0]
    item = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col, own_batch, own_head = _place_of(tile, own_h, q_blocks, k_blocks)
        mbarrier.wait(bias_empty, (count & 1) ^ 1)
        mbarrier.expect(bias_full, 4 * bias_desc.block_type.nbytes)
        for i in gl.static_range(4):
            at = [own_batch * bias_b, own_head * bias_h, row + 64 * (i // 2), col + 64 * (i % 2)]
            tma_load(bias_desc, at, bias_full, bias_smem.index(i))
        count += 1
        for visit in range(visits):
            batch, head, _lo, _hi, _end, is_seen = _visit_of(
                visit, own_batch, own_head, all_h, row, col, band, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT
            )
            if is_seen:
                for part in gl.static_range(2):
                    slot, phase = slot_of(item, SLOTS)
                    mbarrier.wait(empty.index(slot), phase ^ 1)
                    mbarrier.expect(full.index(slot), 4 * q_desc.block_type.nbytes)
                    for w in gl.static_range(2):
                        at_q = [batch, head, row + 64 * w, 0]
                        at_k = [batch, head // group, col + 64 * w, 0]
                        if part == 0:
                            tma_load(q_desc, at_q, full.index(slot), smem.index(4 * slot + w))
                            tma_load(k_desc, at_k, full.index(slot), smem.index(4 * slot + 2 + w))
                        else:
                            tma_load(do_desc, at_q, full.index(slot), smem.index(4 * slot + w))
                            tma_load(v_desc, at_k, full.index(slot), smem.index(4 * slot + 2 + w))
                    item += 1


@gluon.jit
def _products(
    smem, slot, next_slot, WG: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Issue S and dP of 64 queries and 64 keys of a visit."""
    W: gl.constexpr = smem.type.shape[4]
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    q = smem.index(4 * slot + WG).reshape([64, W])
    k = smem.index(4 * slot + 2 + HALF).reshape([64, W])
    do = smem.index(4 * next_slot + WG).reshape([64, W])
    v = smem.index(4 * next_slot + 2 + HALF).reshape([64, W])
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _weighed(
    s, bias, rows, i, j, lo, hi, end, scale, is_inside, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """P, and the bias, -inf where a score is hidden, as are all of a row that sees no key."""
    lse, weight, _delta = rows
    b = widen(bias.reshape([64, 64]).load(LAYOUT))
    if not is_inside:
        is_shown = j < end
        if HAS_RIGHT:
            is_shown = is_shown & (j <= i + hi)
        if HAS_LEFT:
            is_shown = is_shown & (j >= i + lo)
        b = gl.where(is_shown, b, float("-inf"))
    return gl.exp2(((s * scale + b) - lse) * LOG2E + weight), b


@gluon.jit
def _rows_of(
    visit, own_batch, own_head, all_h, i, heads_q, len_q, padded_q, lse_ptr, weight_ptr, delta_ptr
):
    """Load what a visit's rows have: LSE, log2 of P's weight and -delta."""
    batch = own_batch + visit // all_h
    line = (batch * heads_q + own_head + visit % all_h).to(gl.int64)
    is_row = i < len_q
    lse = gl.load(lse_ptr + (line * len_q + i), mask=is_row, other=float("-inf"))
    weight = gl.load(weight_ptr + (line * len_q + i), mask=is_row, other=1.0)
    delta = gl.load(delta_ptr + (line * padded_q + i), mask=is_row, other=0.0)
    return lse, weight, delta


@gluon.jit
def _consumer(
    WG: gl.constexpr, dbias_desc, smem, bias_smem, full, empty, bias_full, bias_empty, lse_ptr,
    weight_ptr, delta_ptr, scale, band, tiles, q_blocks, k_blocks, own_h, all_h, visits, heads_q,
    padded_q, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    CUT: gl.constexpr = HAS_LENGTHS or HAS_LEFT or HAS_RIGHT
    SLOTS: gl.constexpr = full.type.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    _lengths, len_q, _len_k, _lt, _rt, _lb, _rb = band
    item = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col, own_batch, own_head = _place_of(tile, own_h, q_blocks, k_blocks)
        own = row + 64 * WG
        i = own + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        j = gl.expand_dims(col + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
        at = gl.expand_dims(i, 1)
        sum0 = gl.zeros([64, 64], gl.float32, LAYOUT)
        sum1 = gl.zeros([64, 64], gl.float32, LAYOUT)
        lse, weight, delta = _rows_of(
            0, own_batch, own_head, all_h, i, heads_q, len_q, padded_q, lse_ptr, weight_ptr,
            delta_ptr,
        )  # fmt: skip
        mbarrier.wait(bias_full, count & 1)
        for visit in range(visits):
            _batch, _head, lo, hi, end, is_seen = _visit_of(
                visit, own_batch, own_head, all_h, row, col, band, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT
            )
            next_lse, next_weight, next_delta = _rows_of(
                gl.minimum(visit + 1, visits - 1), own_batch, own_head, all_h, i, heads_q, len_q,
                padded_q, lse_ptr, weight_ptr, delta_ptr,
            )  # fmt: skip
            if is_seen:
                rows = (
                    gl.expand_dims(lse, 1),
                    gl.expand_dims(gl.log2(weight), 1),
                    gl.expand_dims(delta, 1),
                )
                is_inside = col + 127 < end
                if HAS_RIGHT:
                    is_inside = is_inside & (col + 127 <= own + hi)
                if HAS_LEFT:
                    is_inside = is_inside & (col >= own + 63 + lo)
                slot, phase = slot_of(item, SLOTS)
                next_slot, next_phase = slot_of(item + 1, SLOTS)
                mbarrier.wait(full.index(slot), phase)
                mbarrier.wait(full.index(next_slot), next_phase)
                s0, dp0 = _products(smem, slot, next_slot, WG, 0, LAYOUT)
                if not CUT:
                    s1, dp1 = _products(smem, slot, next_slot, WG, 1, LAYOUT)
                s0 = warpgroup_mma_wait(1 if CUT else 3, deps=[s0])
                p0, b0 = _weighed(
                    s0, bias_smem.index(2 * WG), rows, at, j, lo, hi, end, scale, is_inside,
                    HAS_LEFT, HAS_RIGHT, LAYOUT,
                )  # fmt: skip
                dp0 = warpgroup_mma_wait(0 if CUT else 2, deps=[dp0])
                sum0 += gl.where(b0 == float("-inf"), 0.0, p0 * (dp0 + rows[2]))
                if CUT:  # masks take the registers that the second half would
                    s1, dp1 = _products(smem, slot, next_slot, WG, 1, LAYOUT)
                s1 = warpgroup_mma_wait(1, deps=[s1])
                arrive_each_thread(empty.index(slot))
                dp1 = warpgroup_mma_wait(0, deps=[dp1])
                arrive_each_thread(empty.index(next_slot))
                p1, b1 = _weighed(
                    s1, bias_smem.index(2 * WG + 1), rows, at, j + 64, lo, hi, end, scale,
                    is_inside, HAS_LEFT, HAS_RIGHT, LAYOUT,
                )  # fmt: skip
                sum1 += gl.where(b1 == float("-inf"), 0.0, p1 * (dp1 + rows[2]))
                item += 2
            lse, weight, delta = next_lse, next_weight, next_delta
        for half in gl.static_range(2):
            total = sum0 if half == 0 else sum1
            place = bias_smem.index(2 * WG + half)
            place.store(gl.reshape(total.to(dbias_desc.dtype), [1, 1, 64, 64]))
            fence_async_shared()
            tma_store(dbias_desc, [own_batch, own_head, own, col + 64 * half], place)
        tma.store_wait(0)
        mbarrier.arrive(bias_empty, count=1)
        count += 1


INT32_ARGUMENTS = (
    "tiles", "q_blocks", "k_blocks", "own_h", "all_h", "visits", "group", "bias_b", "bias_h",
    "heads_q", "len_q", "len_k", "padded_q", "left_top", "right_top", "left_bottom", "right_bottom",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", *INT32_ARGUMENTS])
def attention_dbias_sm90_kernel(
    q_desc, k_desc, v_desc, do_desc, bias_desc, dbias_desc, lse_ptr, weight_ptr, delta_ptr,
    lengths_ptr, scale, tiles, q_blocks, k_blocks, own_h, all_h, visits, group, bias_b, bias_h,
    heads_q, len_q, len_k, padded_q, left_top, right_top, left_bottom, right_bottom,
    SLOTS: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    W: gl.constexpr = q_desc.block_type.shape[3]
    smem = gl.allocate_shared_memory(q_desc.dtype, [4 * SLOTS, 1, 1, 64, W], q_desc.layout)
    bias_smem = gl.allocate_shared_memory(bias_desc.dtype, [4, 1, 1, 64, 64], bias_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    bias_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    bias_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    mbarrier.init(bias_full, count=1)
    mbarrier.init(bias_empty, count=2)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=256)
    fence_async_shared()
    if not HAS_LENGTHS:
        lengths_ptr = 0
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    gl.warp_specialize([
        (_consumer, (0, dbias_desc, smem, bias_smem, full, empty, bias_full, bias_empty, lse_ptr,
                     weight_ptr, delta_ptr, scale,
                     (lengths_ptr, len_q, len_k, left_top, right_top, left_bottom, right_bottom),
                     tiles, q_blocks, k_blocks, own_h, all_h, visits, heads_q, padded_q,
                     HAS_LENGTHS, HAS_LEFT, HAS_RIGHT)),
        (_consumer, (1, dbias_desc, smem, bias_smem, full, empty, bias_full, bias_empty, lse_ptr,
                     weight_ptr, delta_ptr, scale,
                     (lengths_ptr, len_q, len_k, left_top, right_top, left_bottom, right_bottom),
                     tiles, q_blocks, k_blocks, own_h, all_h, visits, heads_q, padded_q,
                     HAS_LENGTHS, HAS_LEFT, HAS_RIGHT)),
        (_producer, (q_desc, k_desc, v_desc, do_desc, bias_desc, smem, bias_smem, full, empty,
                     bias_full, bias_empty,
                     (lengths_ptr, len_q, len_k, left_top, right_top, left_bottom, right_bottom),
                     tiles, q_blocks, k_blocks, own_h, all_h, visits, group, bias_b, bias_h,
                     HAS_LENGTHS, HAS_LEFT, HAS_RIGHT)),
    ], [4, 1], [240, 24])  # fmt: skip
