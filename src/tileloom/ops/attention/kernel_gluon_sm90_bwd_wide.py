"""Attention backward for Hopper (sm_90a) in Gluon, head dims to 256, one of them above 128.

The mathematics, the float32 dQ buffer and the start values of accumulators are those of
`kernel_gluon_sm90_bwd.py`; dK and dV of 128 keys would not fit into registers here.

Picture. A block owns 64 keys of one key head and walks over blocks of 64 queries. The two consumer
warpgroups have different roles, so that each holds one accumulator `[64, 256]` at most:

    warpgroup 0:  S^T = K Q^T,   P^T = exp2(..), to shared memory;   dV += P^T dO
    warpgroup 1:  dP^T = V dO^T, dS^T = P^T * (dP^T - delta), to shared memory;   dK += dS^T Q
    both:         one half of the columns of dQ = dS K, added to the buffer from registers

P^T is handed over in float32 and in fragment order, free of bank conflicts. The next S^T or dP^T is
issued when half of dQ has left. Bias and mask are warpgroup 0's, which also sees to it that hidden
keys hold no NaN, before warpgroup 1 reads V; a bias's gradient is warpgroup 1's.

Bytes moved: as there, with Q, dO and the buffer once for each 64 keys.

Who waits for whom (mbarriers, by phase; counts in brackets):
    kv_full[i]    (1)      producer's TMA -> consumers: K (0) and V (1) are there
    q_full[s]     (1)      producer's TMA -> consumers: Q and -LSE / scale of slot s are there
    do_full[s]    (1)      the same for dO and -delta
    empty[s]      (256)    every consumer thread -> producer: slot s may be filled again
    turn[j % 2]   (1)      producer -> consumers: dQ of step j may be added; these two only in
    added[j % 2]  (2)      consumers -> producer: it is; a fixed order, `pieces_order_sm90.py`
Named barrier 8 (256): P^T is written; what warpgroup 0 read of dS before is read.
Named barrier 9 (256): dS^T is written; P^T has been read.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tileloom.device.barriers import arrive_each_thread, named_barrier_arrive, named_barrier_sync
from tileloom.device.compat import tma_load, tma_store
from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.ops.attention.pieces_blocks_sm90_bwd import batch_to_load, block_of
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    clear_outside,
    columns_start,
    following,
    fragment_inverse,
    fragment_order,
    halves,
    mask_transposed,
    masked_rows,
    reduce_add,
    sorted_registers,
    store_keys,
)
from tileloom.ops.attention.pieces_gluon_sm90_dropout import kept_scores, kept_words
from tileloom.ops.attention.pieces_gluon_sm90_scores import (
    ANYWHERE,
    KEYS,
    NONE,
    TILE,
    bias_numbers,
    fetch_scores,
    first_gradient,
    first_number,
    keys_first,
    large_exponent,
    large_rows,
    loaded_poison,
    next_block,
    release_scores,
    row_sums,
    score_memory,
    scores_start,
    store_scores,
    store_sums,
    unpoisoned,
)
from tileloom.ops.attention.pieces_order_sm90 import (
    count_in_turn,
    give_turn,
    program_in_turn,
)
from tileloom.ops.attention.pieces_philox import philox_state

P_READY = gl.constexpr(8)
DS_READY = gl.constexpr(9)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, do_smem,
    lse_smem, delta_smem, kv_full, q_full, do_full, empty, batch_q, batch_k, kv_head,
    group, key, start, stop, missing, line, padded_q, bias, mask, scores, order, turn, added,
    BIAS: gl.constexpr, MASK: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = q_smem.type.shape[0]
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes)
    tma_load(k_desc, [batch_k, kv_head, key, 0], kv_full.index(0), k_smem)
    row = start
    head = kv_head * group
    steps = (stop - start) // 64 * group
    seen = 0
    for j in range(steps + 2 if ORDERED else steps):
        if j < steps:
            slot, phase = slot_of(j, STAGES)
            at = [batch_q, head, row - missing, 0]
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 256)
            tma_load(q_desc, at, q_full.index(slot), q_smem.index(slot))
            tma_load(lse_desc, [line], q_full.index(slot), lse_smem.index(slot))
            if j == 0:
                mbarrier.expect(kv_full.index(1), v_desc.block_type.nbytes)
                tma_load(v_desc, [batch_k, kv_head, key, 0], kv_full.index(1), v_smem)
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + 256)
            tma_load(do_desc, at, do_full.index(slot), do_smem.index(slot))
            tma_load(delta_desc, [line], do_full.index(slot), delta_smem.index(slot))
            if BIAS == TILE or MASK == TILE:
                fetch_scores(bias, mask, scores, j, head, row, key, 1, BIAS, MASK)
            head += (row + 64 == stop).to(gl.int32)
            row, line = following(row, line, start, stop, padded_q, 64)
        if ORDERED:
            if j == 1:
                seen = give_turn(order, 0, steps, start, stop, seen, turn, 64)
                seen = give_turn(order, 1, steps, start, stop, seen, turn, 64)
            elif j >= 2:  # what the consumers need to get so far has been loaded
                seen = count_in_turn(order, j - 2, steps, start, stop, seen, turn, added, 64)


@gluon.jit
def _consumer(
    WG: gl.constexpr, own, large, given, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr,
    DBIAS: gl.constexpr, DROPOUT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    if BIAS == NONE and MASK == NONE:
        _walk(WG, large, 0, given, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS,
              DROPOUT, ORDERED, False)  # fmt: skip
    elif WG == 1:
        named_barrier_sync(P_READY, 256)  # K and V hold no NaN
        _walk(WG, large, 0, given, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS,
              DROPOUT, ORDERED, False)  # fmt: skip
    else:
        k_smem, v_smem, full, key, first, last = own
        poison = loaded_poison(k_smem, v_smem, full, key, first, last)
        named_barrier_sync(P_READY, 256)
        if (large[0] != 0) | (gl.sum(poison, 0) != 0.0):
            _walk(WG, large, poison, given, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK,
                  DBIAS, DROPOUT, ORDERED, True)  # fmt: skip
        else:
            _walk(WG, large, poison, given, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK,
                  DBIAS, DROPOUT, ORDERED, False)  # fmt: skip


@gluon.jit
def _walk(
    WG: gl.constexpr, large, poison, given, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr,
    DBIAS: gl.constexpr, DROPOUT: gl.constexpr, ORDERED: gl.constexpr, SLOW: gl.constexpr,
):  # fmt: skip
    (dk_desc, dv_desc, buffer_ptr, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, p_smem,
     ds_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head, group, heads_q, key,
     start, stop, line, padded_q, end, lo, hi, first, last, len_q, len_k, keys, dk_out, dv_out,
     head_dims_8, bias, mask, scores, dbias, missing, dropout, turn, added) = given  # fmt: skip
    HIDES: gl.constexpr = BIAS != NONE or MASK != NONE
    COUNTS: gl.constexpr = HIDES or DROPOUT
    STAGES: gl.constexpr = q_smem.type.shape[0]
    D: gl.constexpr = q_smem.type.shape[4]
    D_V: gl.constexpr = do_smem.type.shape[4]
    Y: gl.constexpr = D_V if WG == 0 else D  # columns of the second product and its sum
    HALF: gl.constexpr = D // 2
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    Y_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Y_LAYOUT, 2)
    steps = (stop - start) // 64 * group
    # Without it the path of no step merges zeros with a wgmma in flight, and ptxas serialises all.
    gl.assume(steps > 0)
    shift = missing if PACKED else 0  # from rows of blocks to those of a packed sequence
    zero = gl.zeros([64, HALF], gl.float32, DQ_LAYOUT)
    acc = warpgroup_mma_init(gl.zeros([64, Y], gl.float32, Y_LAYOUT))
    c = scale * LOG2E
    k = k_smem.reshape([64, D])
    # x: the tile of the first product, with its statistic; y: that of the second.
    if WG == 0:
        own = k
        x_smem = q_smem
        y_smem = do_smem
        statistic = lse_smem
        x_full = q_full
        y_full = do_full
    else:
        own = v_smem.reshape([64, D_V])
        x_smem = do_smem
        y_smem = q_smem
        statistic = delta_smem
        x_full = do_full
        y_full = q_full
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    if (HAS_LENGTHS or HAS_LEFT or HAS_RIGHT) and not HIDES:
        if (key < first) | (key + 64 > last):
            clear_outside(own, key, first, last)
    if SLOW:
        poison = gl.expand_dims(poison, 1)
    mbarrier.wait(x_full.index(0), 0)
    x = x_smem.index(0).reshape([64, D + D_V - Y])
    row = start
    head = kv_head * group
    IS_SHIFTED: gl.constexpr = WG == 0 or not DROPOUT
    if WG == 0 and HIDES:
        t = scores_start(
            statistic.index(0), scale, bias, mask, scores, 0, head, row - shift, key, len_q,
            len_k, 0, 1, S_LAYOUT, BIAS, MASK, SLOW, PACKED,
        )  # fmt: skip
        if (BIAS == TILE or MASK == TILE) and not SLOW:
            fence_async_shared()
            release_scores(scores, 0, BIAS, MASK)
    elif IS_SHIFTED:
        t = columns_start(statistic.index(0), 64, S_LAYOUT)
    else:
        t = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    t = warpgroup_mma(own, x.permute((1, 0)), t, use_acc=IS_SHIFTED, is_async=True)
    below, above = masked_rows(key, end, lo, hi, 64, HAS_LEFT, HAS_RIGHT)
    if DBIAS == KEYS:
        sums = row_sums(gl.zeros([64, 64], gl.float32, S_LAYOUT))
        SUMS: gl.constexpr = sums.type.layout
    if DROPOUT and WG == 0:
        words = kept_words(dropout, batch, head, heads_q, row - shift, key, len_q, len_k, 64)
    for j in range(steps):
        if COUNTS:
            next_row, next_line, next_head = next_block(
                row, line, head, j + 1 == steps, start, stop, padded_q, 64
            )
        slot, phase = slot_of(j, STAGES)
        r = warpgroup_mma_wait(0, deps=[t])
        if WG == 0:
            if (row < below) | (row > above):
                r = mask_transposed(r, key, row, end, lo, hi, HAS_LEFT, HAS_RIGHT)
            if SLOW and BIAS != NONE:
                b = bias_numbers(
                    bias, scores, j, head, row - shift, key, len_q, len_k, 0, 1, BIAS, 64, S_LAYOUT,
                    PACKED,
                )  # fmt: skip
                r = large_exponent(
                    r, scale, b, large, batch, heads_q, head, row - shift, len_q, PACKED
                )
            else:
                r = r * c
            if SLOW:
                r = unpoisoned(r, poison)
                if BIAS == TILE or MASK == TILE:
                    fence_async_shared()
                    release_scores(scores, j, BIAS, MASK)
            r = gl.exp2(r)
            handed = r
            if DROPOUT:  # what is dropped is handed over with a minus sign
                kept = kept_scores(words, 64, S_LAYOUT)
                handed = gl.where(kept, r, 0.0 - r)
                r = gl.where(kept, r, 0.0)
            p_smem.store(fragment_order(handed))
            named_barrier_arrive(P_READY, 256)
            r = r.to(dtype)
        else:
            named_barrier_sync(P_READY, 256)
            FRAGMENT: gl.constexpr = sorted_registers(fragment_order(r).type.layout)
            p = fragment_inverse(p_smem.load(FRAGMENT), 64)
            p = gl.convert_layout(p, S_LAYOUT)
            if DROPOUT:
                delta = columns_start(delta_smem.index(slot), 64, S_LAYOUT)
                r = gl.where(p > 0.0, r, 0.0) * dropout[3] + delta
                p = gl.abs(p)
            r = (p * r).to(dtype)
            if DBIAS == TILE:
                tma.store_wait(0)
            keys_first(ds_smem, DBIAS).store(r)
            fence_async_shared()
            named_barrier_arrive(DS_READY, 256)
            if DBIAS == KEYS:
                sums += row_sums(r)
                if row + 64 == stop:
                    store_sums(dbias, sums, head, key, len_k, 0, PACKED)
                    sums = gl.zeros([64, 4], gl.float32, SUMS)
            elif DBIAS == ANYWHERE:
                store_scores(dbias, r, head, row - shift, key, len_q, len_k, 0, PACKED)
        r = gl.convert_layout(r, P_LAYOUT, assert_trivial=True)
        mbarrier.wait(y_full.index(slot), phase)
        acc = warpgroup_mma(r, y_smem.index(slot).reshape([64, Y]), acc, is_async=True)
        if WG == 0:
            named_barrier_sync(DS_READY, 256)
        k_half = k.slice(WG * HALF, HALF, 1)
        ds_tile = keys_first(ds_smem, DBIAS).permute((1, 0))
        dq = warpgroup_mma(ds_tile, k_half, zero, use_acc=False, is_async=True)
        if WG == 1 and DBIAS == TILE:
            tma_store(dbias, [batch, head, row, key], ds_smem)
        dq, acc = warpgroup_mma_wait(0, deps=[dq, acc])
        acc = warpgroup_mma_init(acc)
        if j + 1 < steps:
            arrive_each_thread(empty.index(slot))
        at = line.to(gl.int64) * D + WG * 64 * HALF
        if ORDERED:
            mbarrier.wait(turn.index(j & 1), (j >> 1) & 1)
        left, right = halves(dq)
        reduce_add(buffer_ptr, at, fragment_order(left))
        coming = gl.minimum(j + 1, steps - 1)  # the last step repeats its own, which nobody uses
        next_slot, next_phase = slot_of(coming, STAGES)
        mbarrier.wait(x_full.index(next_slot), next_phase)
        x = x_smem.index(next_slot).reshape([64, D + D_V - Y])
        if WG == 0 and HIDES:
            t = scores_start(
                statistic.index(next_slot), scale, bias, mask, scores, coming, next_head,
                next_row - shift, key, len_q, len_k, 0, 1, S_LAYOUT, BIAS, MASK, SLOW, PACKED,
            )  # fmt: skip
            if (BIAS == TILE or MASK == TILE) and not SLOW:
                fence_async_shared()
                if j + 1 < steps:
                    release_scores(scores, j + 1, BIAS, MASK)
        elif IS_SHIFTED:
            t = columns_start(statistic.index(next_slot), 64, S_LAYOUT)
        else:
            t = gl.zeros([64, 64], gl.float32, S_LAYOUT)
        t = warpgroup_mma(own, x.permute((1, 0)), t, use_acc=IS_SHIFTED, is_async=True)
        if DROPOUT and WG == 0:
            words = kept_words(
                dropout, batch, next_head, heads_q, next_row - shift, key, len_q, len_k, 64
            )
        t = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[t]))
        reduce_add(buffer_ptr, at + 32 * HALF, fragment_order(right))
        if ORDERED:
            mbarrier.arrive(added.index(j & 1), count=1)
        if COUNTS:
            row = next_row
            line = next_line
            head = next_head
        else:
            row, line = following(row, line, start, stop, padded_q, 64)
    t, acc = warpgroup_mma_wait(0, deps=[t, acc])
    named_barrier_sync(P_READY, 256)  # the other warpgroup has read K for its last dQ
    if WG == 0:
        if DROPOUT:
            acc = acc * dropout[3]
        store_keys(
            dv_desc, v_smem, acc.to(dtype), batch_k, kv_head, key, keys, dv_out, head_dims_8[1],
            PACKED,
        )  # fmt: skip
    else:
        dk = (acc * scale).to(dtype)
        store_keys(dk_desc, k_smem, dk, batch_k, kv_head, key, keys, dk_out, head_dims_8[0], PACKED)
    tma.store_wait(0)


INT32_ARGUMENTS = (
    "heads_q", "heads_kv", "group", "len_q", "len_k", "padded_q", "key_blocks",
    "left_top", "right_top", "left_bottom", "right_bottom", "heads_a_round", "head_dim_8",
    "head_dim_v_8", "sequences", "total_q", "total_k", "dk_h", "dk_l", "dv_h", "dv_l",
)  # fmt: skip
INT64_ARGUMENTS = (
    "bias_b", "bias_h", "bias_q", "bias_k", "mask_b", "mask_h", "mask_q", "mask_k", "seed",
    "offset", "threshold",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", "keep_scale", *INT32_ARGUMENTS, *INT64_ARGUMENTS])
def attention_bwd_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, buffer_ptr,
    lengths_ptr, flags, lse_ptr, weight_ptr, bias, mask, dbias, seed_at, offset_at,
    seed: tl.int64, offset: tl.int64, threshold: tl.int64, keep_scale, scale, heads_q, heads_kv,
    group, len_q, len_k, padded_q, key_blocks, left_top, right_top, left_bottom, right_bottom, cu_q,
    cu_k, dk_ptr, dv_ptr, progress, heads_a_round, head_dim_8, head_dim_v_8, sequences, total_q,
    total_k, dk_h, dk_l, dv_h, dv_l,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, DBIAS: gl.constexpr,
    SCORE_STAGES: gl.constexpr, DROPOUT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[3]
    D_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4 if DBIAS == TILE else 2)
    DS_SHAPE: gl.constexpr = [1, 1, 64, 64] if DBIAS == TILE else [64, 64]
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, D_V], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 64, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 64, D_V], v_desc.layout)
    p_smem = gl.allocate_shared_memory(gl.float32, [32, 128], FLAT)
    ds_smem = gl.allocate_shared_memory(dtype, DS_SHAPE, DS_LAYOUT)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 64], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    ORDERED: gl.constexpr = progress is not None
    turn = 0
    added = 0
    if ORDERED:
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        added = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        for i in gl.static_range(2):
            mbarrier.init(turn.index(i), count=1)
            mbarrier.init(added.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=256)
    bias_smem, mask_smem, score_full, score_empty = score_memory(
        bias, mask, SCORE_STAGES, 1, 64, 128, BIAS, MASK
    )
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # nothing above touches global memory
    if not HAS_LENGTHS:
        lengths_ptr = 0
    PACKED: gl.constexpr = cu_q is not None
    packed, dk_out, dv_out = (), (), ()
    if PACKED:
        packed = (cu_q, cu_k, sequences, total_q, total_k)
        dk_out = (dk_ptr, dk_h, dk_l)
        dv_out = (dv_ptr, dv_h, dv_l)
    program = program_in_turn(progress, key_blocks, heads_a_round, PACKED, ORDERED)
    work = (
        heads_q, heads_kv, len_q, len_k, padded_q, key_blocks, heads_a_round, lengths_ptr, left_top,
        right_top, left_bottom, right_bottom, packed, progress,
    )  # fmt: skip
    keys_of, rows_of, order, batch = block_of(
        program, work, 64, 64, PACKED, SHARED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
    )
    batch_k, kv_head, key, first, last, keys, end, lo, hi = keys_of
    batch_q, start, stop, missing, line = rows_of
    load_k = batch_to_load(batch_k, key, last, PACKED)
    if DROPOUT:
        seed, offset = philox_state(seed_at, offset_at, seed, offset)
    has_large, lse_step = 0, 0
    bias_at, mask_at = batch * bias_b, batch * mask_b
    if BIAS != NONE:
        has_large, lse_ptr, weight_ptr, lse_step = large_rows(
            flags, lse_ptr, weight_ptr, batch, batch_q, kv_head, group, heads_q, len_q, sequences,
            total_q, PACKED,
        )  # fmt: skip
        bias = first_number(bias, batch, key, bias_b, bias_k, BIAS)
    if MASK != NONE:
        mask = first_number(mask, batch, key, mask_b, mask_k, MASK)
    if DBIAS != NONE:
        dbias = first_gradient(dbias, batch * heads_q, key, len_q, len_k, DBIAS)
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    gl.warp_specialize([
        (_consumer, (0, (k_smem, v_smem, kv_full, key, first, last),
                     (has_large, lse_ptr, weight_ptr, lse_step), (
            dk_desc, dv_desc, buffer_ptr, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
            p_smem, ds_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head, group,
            heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q, len_k, keys,
            dk_out, dv_out, (head_dim_8, head_dim_v_8),
            (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
            (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
            (seed, offset, threshold, keep_scale), turn, added,
        ), PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT, ORDERED)),
        (_consumer, (1, (k_smem, v_smem, kv_full, key, first, last),
                     (has_large, lse_ptr, weight_ptr, lse_step), (
            dk_desc, dv_desc, buffer_ptr, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
            p_smem, ds_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head, group,
            heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q, len_k, keys,
            dk_out, dv_out, (head_dim_8, head_dim_v_8),
            (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
            (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
            (seed, offset, threshold, keep_scale), turn, added,
        ), PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT, ORDERED)),
        (_producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem,
                     do_smem, lse_smem, delta_smem, kv_full, q_full, do_full, empty,
                     batch_q, load_k, kv_head, group, key, start, stop, missing, line, padded_q,
                     (bias, bias_at, bias_h, bias_q, bias_k),
                     (mask, mask_at, mask_h, mask_q, mask_k),
                     (bias_smem, mask_smem, score_full, score_empty), order, turn, added, BIAS,
                     MASK, ORDERED)),
    ], [4, 1], [240, 24])  # fmt: skip
