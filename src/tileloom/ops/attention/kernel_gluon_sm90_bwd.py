"""Attention backward for Hopper (sm_90a) in Gluon, head dims up to 128; V's may differ.

    S^T = K Q^T;  P^T = exp2(S^T c - LSE log2(e)),  c = scale * log2(e);   dV = P^T dO
    dP^T = V dO^T;  dS^T = P^T * (dP^T - delta),  delta = rowsum(dO * O) - dLSE
    dK = scale * dS^T Q;   dQ = scale * dS K

Picture. A block owns 128 keys of one key head and walks over the query blocks that may see them,
head after head of the group. One producer warp loads Q, dO and their statistics by TMA; each of two
consumer warpgroups owns 64 keys, and keeps dK and dV in registers. Scores are transposed (keys are
rows), so that P^T and dS^T are operands of dV and dK straight from registers. Only dS goes through
shared memory, where both warpgroups read both halves of it for dQ: each computes one half of dQ
(of the columns with 64 queries, of the rows with 128) and adds it to a float32 buffer by a TMA
reduction, while dK's product runs.

With Q and dO come their statistics: -LSE log2(e), with a bias or mask -LSE / scale, where S^T then
starts; -delta. Rows that are not there, or see no key, have -inf, so that P is 0.

Packed sequences: blocks of keys and of queries are laid from the right end of each sequence, so
that TMA loads zeros for what is missing at the front and nothing of a neighbour
(`pieces_packed.py`). The band counts rows from the front of the first block of queries.

Dropout: where four keys take the numbers of one Philox call, a warpgroup of its own decides, ahead
of the consumers (DROPOUT 2, `pieces_dropper_sm90_bwd.py`); else each consumer for itself (1).

A bias, a bool mask and the gradient of a bias: see `pieces_gluon_sm90_scores.py`. Both are
in what S^T starts from; dS lies in shared memory as `[queries, keys]` if TMA is to write it out.

Bytes moved: K, V, dK, dV once; Q, dO once for each key block (from L2 for all but the first);
bias, mask and the bias's gradient once for every head; the float32 dQ buffer, padded to whole query
blocks, once by each key block, and three times more by what runs before and after
(`kernel_triton_bwd_ends.py`: zeros, delta; scale, order, rounding). The buffer is in the order in
which threads hold dQ, so that no step rearranges it.

Who waits for whom (mbarriers, by phase; counts in brackets):
    kv_full[i]   (1)      producer's TMA -> consumers: K (0) and V (1) are there
    q_full[s]    (1)      producer's TMA -> consumers: Q and its statistic of slot s are there
    do_full[s]   (1)      the same for dO and -delta
    empty[s]     (256)    every consumer thread -> producer: slot s may be filled again
    dq_full[i]   (1)      consumer i -> producer: its half of dQ may be added; these two only in
    dq_empty     (1)      producer -> consumers: both are; a fixed order, `pieces_order_sm90.py`
Named barrier 8 (256): both halves of dS are written. dS has two buffers: a warpgroup that writes
one again has passed the barrier of the step between, before which the other has drained its dQ.
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

from tileloom.device.barriers import arrive_each_thread, named_barrier_sync
from tileloom.device.compat import tma_load, tma_store
from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.device.tma import tma_reduce_add
from tileloom.ops.attention.pieces_blocks_sm90_bwd import batch_to_load, block_of
from tileloom.ops.attention.pieces_dropper_sm90_bwd import allocate_words, dropper, taken_scores
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    clear_outside,
    columns_of,
    following,
    fragment_order,
    mask_transposed,
    masked_rows,
    query_gradient,
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
    release_scores,
    row_sums,
    score_memory,
    scores_start,
    store_scores,
    store_sums,
    unpoisoned,
)
from tileloom.ops.attention.pieces_order_sm90 import add_in_turn, program_in_turn
from tileloom.ops.attention.pieces_philox import philox_state

SHARED = gl.constexpr(8)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, do_smem,
    lse_smem, delta_smem, kv_full, q_full, do_full, empty, batch_q, batch_k, kv_head, group,
    key, start, stop, missing, line, padded_q, bias, mask, scores, order, dq_desc, dq_smem, dq_full,
    dq_empty, BLOCK_M: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = q_smem.type.shape[0]
    D: gl.constexpr = q_smem.type.shape[4]
    mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma_load(k_desc, [batch_k, kv_head, key + 64 * w, 0], kv_full.index(0), k_smem.index(w))
    row = start
    head = kv_head * group
    steps = (stop - start) // BLOCK_M * group
    first_line = line
    seen = 0
    for j in range(steps + 2 if ORDERED else steps):
        if j < steps:
            slot, phase = slot_of(j, STAGES)
            at = [batch_q, head, row - missing, 0]
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 4 * BLOCK_M)
            tma_load(q_desc, at, q_full.index(slot), q_smem.index(slot))
            tma_load(lse_desc, [line], q_full.index(slot), lse_smem.index(slot))
            if j == 0:
                mbarrier.expect(kv_full.index(1), 2 * v_desc.block_type.nbytes)
                for w in gl.static_range(2):
                    at_v = [batch_k, kv_head, key + 64 * w, 0]
                    tma_load(v_desc, at_v, kv_full.index(1), v_smem.index(w))
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + 4 * BLOCK_M)
            tma_load(do_desc, at, do_full.index(slot), do_smem.index(slot))
            tma_load(delta_desc, [line], do_full.index(slot), delta_smem.index(slot))
            if BIAS == TILE or MASK == TILE:
                fetch_scores(bias, mask, scores, j, head, row, key, 2, BIAS, MASK)
            head += (row + BLOCK_M == stop).to(gl.int32)
            row, line = following(row, line, start, stop, padded_q, BLOCK_M)
        if ORDERED:
            if j >= 2:  # what the consumers need to get so far has been loaded
                seen = add_in_turn(
                    order, j - 2, steps, start, stop, first_line, padded_q, seen, dq_desc,
                    dq_smem, dq_full, dq_empty, BLOCK_M, D,
                )  # fmt: skip


@gluon.jit
def _consumer(
    WG: gl.constexpr, own, large, given, PACKED: gl.constexpr, BLOCK_M: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BIAS: gl.constexpr,
    MASK: gl.constexpr, DBIAS: gl.constexpr, DROPOUT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    if BIAS == NONE and MASK == NONE:
        _walk(WG, large, 0, given, PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK,
              DBIAS, DROPOUT, ORDERED, False)  # fmt: skip
    else:
        k_smem, v_smem, full, block_key, first, last = own
        poison = loaded_poison(
            k_smem.index(WG), v_smem.index(WG), full, block_key + 64 * WG, first, last
        )  # fmt: skip
        if (large[0] != 0) | (gl.sum(poison, 0) != 0.0):
            _walk(WG, large, poison, given, PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS,
                  MASK, DBIAS, DROPOUT, ORDERED, True)  # fmt: skip
        else:
            _walk(WG, large, poison, given, PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS,
                  MASK, DBIAS, DROPOUT, ORDERED, False)  # fmt: skip


@gluon.jit
def _walk(
    WG: gl.constexpr, large, poison, given, PACKED: gl.constexpr, BLOCK_M: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BIAS: gl.constexpr,
    MASK: gl.constexpr, DBIAS: gl.constexpr, DROPOUT: gl.constexpr, ORDERED: gl.constexpr,
    SLOW: gl.constexpr,
):  # fmt: skip
    (dk_desc, dv_desc, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem,
     dq_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head, group, heads_q,
     block_key, start, stop, line, padded_q, end, lo, hi, first, last, len_q, len_k, keys, dk_out,
     dv_out, head_dims_8, bias, mask, scores, dbias, missing, dropout, handed, dq_full,
     dq_empty) = given  # fmt: skip
    HIDES: gl.constexpr = BIAS != NONE or MASK != NONE
    STAGES: gl.constexpr = q_smem.type.shape[0]
    D: gl.constexpr = q_smem.type.shape[4]
    D_V: gl.constexpr = do_smem.type.shape[4]
    HALF: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, V_LAYOUT, 2)
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    steps = (stop - start) // BLOCK_M * group
    # Without it the path of no step merges zeros with a wgmma in flight, and ptxas serialises all.
    gl.assume(steps > 0)
    shift = missing if PACKED else 0  # from rows of blocks to those of a packed sequence
    key = block_key + 64 * WG
    k = k_smem.index(WG).reshape([64, D])
    v = v_smem.index(WG).reshape([64, D_V])
    c = scale * LOG2E
    dk = warpgroup_mma_init(gl.zeros([64, D], gl.float32, D_LAYOUT))
    dv = warpgroup_mma_init(gl.zeros([64, D_V], gl.float32, V_LAYOUT))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    if (HAS_LENGTHS or HAS_LEFT or HAS_RIGHT) and not HIDES:
        if (key < first) | (key + 64 > last):
            clear_outside(k, key, first, last)
            clear_outside(v, key, first, last)
    row = start
    head = kv_head * group
    zero = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    if SLOW:
        poison = gl.expand_dims(gl.convert_layout(poison, gl.SliceLayout(1, S_LAYOUT)), 1)
    below, above = masked_rows(key, end, lo, hi, BLOCK_M, HAS_LEFT, HAS_RIGHT)
    if DBIAS == KEYS:
        sums = row_sums(zero)
        SUMS: gl.constexpr = sums.type.layout
    for j in range(steps):
        slot, phase = slot_of(j, STAGES)
        q = q_smem.index(slot).reshape([BLOCK_M, D])
        do = do_smem.index(slot).reshape([BLOCK_M, D_V])
        mbarrier.wait(q_full.index(slot), phase)
        s = zero
        if HIDES:
            s = scores_start(
                lse_smem.index(slot), scale, bias, mask, scores, j, head, row - shift, block_key,
                len_q, len_k, WG, 2, S_LAYOUT, BIAS, MASK, SLOW, PACKED,
            )  # fmt: skip
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=HIDES, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        if DROPOUT == 1:
            words = kept_words(
                dropout, batch, head, heads_q, row - shift, key, len_q, len_k, BLOCK_M
            )  # fmt: skip
        x = warpgroup_mma_wait(1, deps=[s])
        if (row < below) | (row > above):
            x = mask_transposed(x, key, row, end, lo, hi, HAS_LEFT, HAS_RIGHT)
        if SLOW and BIAS != NONE:
            b = bias_numbers(
                bias, scores, j, head, row - shift, block_key, len_q, len_k, WG, 2, BIAS, BLOCK_M,
                S_LAYOUT, PACKED,
            )  # fmt: skip
            x = large_exponent(x, scale, b, large, batch, heads_q, head, row - shift, len_q, PACKED)
        elif HIDES:
            x = x * c
        else:
            x = gl.fma(x, c, columns_of(lse_smem.index(slot), S_LAYOUT))
        if SLOW:
            x = unpoisoned(x, poison)
        p = gl.exp2(x)
        kept_p = p
        if DROPOUT:
            if DROPOUT == 2:
                kept = taken_scores(handed, j, WG, BLOCK_M, S_LAYOUT)
            else:
                kept = kept_scores(words, BLOCK_M, S_LAYOUT)
            kept_p = gl.where(kept, p, 0.0)
        p_half = gl.convert_layout(kept_p.to(dtype), P_LAYOUT, assert_trivial=True)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(p_half, do, dv, is_async=True)
        if DROPOUT:
            dp = gl.where(kept, dp, 0.0) * dropout[3]
        ds = (p * (dp + columns_of(delta_smem.index(slot), S_LAYOUT))).to(dtype)
        buffer = (j & 1) * 2
        keys_first(ds_smem.index(buffer + WG), DBIAS).store(ds)
        fence_async_shared()
        release_scores(scores, j, BIAS, MASK)
        named_barrier_sync(SHARED, 256)
        ds0 = keys_first(ds_smem.index(buffer), DBIAS)
        ds1 = keys_first(ds_smem.index(buffer + 1), DBIAS)
        dq = query_gradient(ds0, ds1, k_smem, WG, BLOCK_M, D, DQ_LAYOUT)
        ds_half = gl.convert_layout(ds, DS_LAYOUT, assert_trivial=True)
        dk = warpgroup_mma(ds_half, q, dk, is_async=True)
        if DBIAS == KEYS:
            sums += row_sums(ds)
        elif DBIAS == ANYWHERE:
            store_scores(dbias, ds, head, row - shift, block_key, len_q, len_k, WG, PACKED)
        dq, dv, dk = warpgroup_mma_wait(1, deps=[dq, dv, dk])
        if not ORDERED or DBIAS == TILE:
            tma.store_wait(0)
        if ORDERED:
            mbarrier.wait(dq_empty, (j & 1) ^ 1)
        dq_smem.index(WG).store(fragment_order(dq))
        fence_async_shared()
        if ORDERED:
            mbarrier.arrive(dq_full.index(WG), count=1)
        else:
            tma_reduce_add(dq_desc, [line * (D // 64) // 2 + WG * HALF // 2, 0], dq_smem.index(WG))
        if DBIAS == TILE:
            tma_store(dbias, [batch, head, row, key], ds_smem.index(buffer + WG))
        elif DBIAS == KEYS:
            if row + BLOCK_M == stop:
                store_sums(dbias, sums, head, block_key, len_k, WG, PACKED)
                sums = gl.zeros([64, 4], gl.float32, SUMS)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        dv = warpgroup_mma_init(dv)
        dk = warpgroup_mma_init(dk)
        arrive_each_thread(empty.index(slot))
        head += (row + BLOCK_M == stop).to(gl.int32)
        row, line = following(row, line, start, stop, padded_q, BLOCK_M)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    v = v_smem.index(WG)
    if DROPOUT:
        dv = dv * dropout[3]
    dv = dv.to(dtype)
    store_keys(dv_desc, v, dv, batch_k, kv_head, key, keys, dv_out, head_dims_8[1], PACKED)
    named_barrier_sync(SHARED, 256)  # the other warpgroup has read this half of K for its dQ
    k = k_smem.index(WG)
    dk = (dk * scale).to(dtype)
    store_keys(dk_desc, k, dk, batch_k, kv_head, key, keys, dk_out, head_dims_8[0], PACKED)
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
def attention_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, lengths_ptr,
    flags, lse_ptr, weight_ptr, bias, mask, dbias, seed_at, offset_at,
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
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    D_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4 if DBIAS == TILE else 2)
    DS_SHAPE: gl.constexpr = [4, 1, 1, BLOCK_M, 64] if DBIAS == TILE else [4, 64, BLOCK_M]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D_V], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D_V], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, DS_SHAPE, DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M * D // 256, 128], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    ORDERED: gl.constexpr = progress is not None
    dq_full = 0
    dq_empty = 0
    if ORDERED:
        dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        dq_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
        mbarrier.init(dq_full.index(0), count=1)
        mbarrier.init(dq_full.index(1), count=1)
        mbarrier.init(dq_empty, count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=256)
    bias_smem, mask_smem, score_full, score_empty = score_memory(
        bias, mask, SCORE_STAGES, 2, BLOCK_M, 256, BIAS, MASK
    )
    handed = 0
    if DROPOUT == 2:
        handed = allocate_words(BLOCK_M, 2)
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
        program, work, BLOCK_M, 128, PACKED, SHARED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
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
    if DROPOUT == 2:
        R: gl.constexpr = 208 if D + D_V <= 128 else 224
        gl.warp_specialize([
            (_consumer, (0, (k_smem, v_smem, kv_full, key, first, last),
                         (has_large, lse_ptr, weight_ptr, lse_step), (
                dk_desc, dv_desc, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
                ds_smem, dq_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head,
                group, heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q,
                len_k, keys, dk_out, dv_out, (head_dim_8, head_dim_v_8),
                (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
                (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
                (seed, offset, threshold, keep_scale), handed, dq_full, dq_empty,
            ), PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT,
                ORDERED)),
            (_consumer, (1, (k_smem, v_smem, kv_full, key, first, last),
                         (has_large, lse_ptr, weight_ptr, lse_step), (
                dk_desc, dv_desc, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
                ds_smem, dq_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head,
                group, heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q,
                len_k, keys, dk_out, dv_out, (head_dim_8, head_dim_v_8),
                (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
                (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
                (seed, offset, threshold, keep_scale), handed, dq_full, dq_empty,
            ), PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT,
                ORDERED)),
            (dropper, ((seed, offset, threshold, keep_scale), handed, batch, kv_head, group,
                       heads_q, key, start, stop, missing if PACKED else 0, padded_q, len_q,
                       len_k, BLOCK_M, 2 if R < 224 else 1)),
            (_producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem,
                         v_smem, do_smem, lse_smem, delta_smem, kv_full, q_full, do_full, empty,
                         batch_q, load_k, kv_head, group, key, start, stop, missing, line,
                         padded_q, (bias, bias_at, bias_h, bias_q, bias_k),
                         (mask, mask_at, mask_h, mask_q, mask_k),
                         (bias_smem, mask_smem, score_full, score_empty), order, dq_desc, dq_smem,
                         dq_full, dq_empty, BLOCK_M, BIAS, MASK, ORDERED)),
        ], [4, 4, 1], [R, 488 - 2 * R, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, (k_smem, v_smem, kv_full, key, first, last),
                         (has_large, lse_ptr, weight_ptr, lse_step), (
                dk_desc, dv_desc, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
                ds_smem, dq_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head,
                group, heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q,
                len_k, keys, dk_out, dv_out, (head_dim_8, head_dim_v_8),
                (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
                (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
                (seed, offset, threshold, keep_scale), handed, dq_full, dq_empty,
            ), PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT,
                ORDERED)),
            (_consumer, (1, (k_smem, v_smem, kv_full, key, first, last),
                         (has_large, lse_ptr, weight_ptr, lse_step), (
                dk_desc, dv_desc, dq_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem,
                ds_smem, dq_smem, kv_full, q_full, do_full, empty, scale, batch, batch_k, kv_head,
                group, heads_q, key, start, stop, line, padded_q, end, lo, hi, first, last, len_q,
                len_k, keys, dk_out, dv_out, (head_dim_8, head_dim_v_8),
                (bias, bias_at, bias_h, bias_q, bias_k), (mask, mask_at, mask_h, mask_q, mask_k),
                (bias_smem, mask_smem, score_full, score_empty), dbias, missing,
                (seed, offset, threshold, keep_scale), handed, dq_full, dq_empty,
            ), PACKED, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, BIAS, MASK, DBIAS, DROPOUT,
                ORDERED)),
            (_producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem,
                         v_smem, do_smem, lse_smem, delta_smem, kv_full, q_full, do_full, empty,
                         batch_q, load_k, kv_head, group, key, start, stop, missing, line,
                         padded_q, (bias, bias_at, bias_h, bias_q, bias_k),
                         (mask, mask_at, mask_h, mask_q, mask_k),
                         (bias_smem, mask_smem, score_full, score_empty), order, dq_desc, dq_smem,
                         dq_full, dq_empty, BLOCK_M, BIAS, MASK, ORDERED)),
        ], [4, 1], [240, 24])  # fmt: skip
