"""Attention backward for Hopper (sm_90a) in Gluon, head dims up to 64, without bias, mask, dropout.

The mathematics, the blocks, the packed sequences and the float32 dQ buffer are those of
`kernel_gluon_sm90_bwd.py`. What a narrow head leaves room for is another order of the products.

Picture. A block owns 128 keys of one key head and walks over blocks of 64 queries, each of two
consumer warpgroups with 64 keys. K and V of a warpgroup stay in its registers, so that S^T and dP^T
read shared memory for one operand only. dK and dQ of a step are put off to the next: that step
issues S^T, dP^T, dK and dQ at once, and computes P^T while they run; dV runs under dS^T.

    step j:  S^T(j), dP^T(j), dK(j - 1), dQ(j - 1) issued;  P^T(j);  dV(j) issued;  dS^T(j)

dS^T goes through shared memory, where both warpgroups read it for dQ, each for half of the columns.
A warpgroup needs the other's dS^T of the step before only. The two take turns to issue a step's
products, so that one computes while the tensor cores work for the other: 5 to 19 % faster than
without (H200, 2026-11-28). A warp of its own adds dQ to the buffer by TMA reductions.

The statistics are -LSE log2(e), which P^T's exponent adds, and -delta.

Bytes moved: as there.

Who waits for whom (mbarriers, by phase; counts in brackets):
    kv_full[i]   (1)      producer's TMA -> consumers: K (0) and V (1) are there
    q_full[s]    (1)      producer's TMA -> consumers: Q and its statistic of slot s are there
    do_full[s]   (1)      the same for dO and -delta
    q_empty[s]   (256)    every consumer thread -> producer: slot s of Q may be filled again
    do_empty[s]  (256)    the same for dO
    ds_full[j % 2] (256)  every consumer thread -> consumers: its part of dS^T of step j is written,
                          and what it read of step j - 2 in this place has been read
    dq_full[i]   (128)    consumer i -> writer: its half of dQ may be added
    dq_empty[i]  (1)      writer -> consumer i: it has been read; in a fixed order (which
                          `pieces_order_sm90.py` keeps) both by the first of the two
Named barriers 9, 10 (256): warpgroup 0, 1 may issue the products of its step.
Named barrier 8 (256): before the loop hidden keys are cleared and dS^T of no step is 0; after it K
has been read by both.
"""

from __future__ import annotations

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

from tileloom.device.barriers import (
    arrive_each_thread,
    named_barrier_arrive,
    named_barrier_sync,
)
from tileloom.device.compat import tma_load
from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.device.tma import tma_reduce_add
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    band_of,
    clear_outside,
    following,
    fragment_order,
    keys_of_program,
    mask_transposed,
    masked_rows,
    queries_of,
    query_gradient,
    store_keys,
)
from tileloom.ops.attention.pieces_order_sm90 import add_in_turn, order_of, program_in_turn

SHARED = gl.constexpr(8)
TURN = gl.constexpr(9)
LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)


@gluon.jit
def _producer(
    descs, smem, full, empty, batch_q, batch_k, kv_head, group, key, start, stop, missing, line,
    padded_q,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem = smem
    kv_full, q_full, do_full = full
    q_empty, do_empty = empty
    STAGES: gl.constexpr = q_smem.type.shape[0]
    mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma_load(k_desc, [batch_k, kv_head, key + 64 * w, 0], kv_full.index(0), k_smem.index(w))
    row = start
    head = kv_head * group
    for j in range((stop - start) // ROWS * group):
        slot, phase = slot_of(j, STAGES)
        at = [batch_q, head, row - missing, 0]
        mbarrier.wait(q_empty.index(slot), phase ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 4 * ROWS)
        tma_load(q_desc, at, q_full.index(slot), q_smem.index(slot))
        tma_load(lse_desc, [line], q_full.index(slot), lse_smem.index(slot))
        if j == 0:
            mbarrier.expect(kv_full.index(1), 2 * v_desc.block_type.nbytes)
            for w in gl.static_range(2):
                at_v = [batch_k, kv_head, key + 64 * w, 0]
                tma_load(v_desc, at_v, kv_full.index(1), v_smem.index(w))
        mbarrier.wait(do_empty.index(slot), phase ^ 1)
        mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + 4 * ROWS)
        tma_load(do_desc, at, do_full.index(slot), do_smem.index(slot))
        tma_load(delta_desc, [line], do_full.index(slot), delta_smem.index(slot))
        head += (row + ROWS == stop).to(gl.int32)
        row, line = following(row, line, start, stop, padded_q, ROWS)


@gluon.jit
def _writer(
    dq_desc, dq_smem, dq_full, dq_empty, group, start, stop, line, padded_q, order,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Add dQ of each step to the buffer."""
    steps = (stop - start) // ROWS * group
    row = start
    seen = 0
    first_line = line
    for j in range(steps):
        if ORDERED:
            seen = add_in_turn(
                order, j, steps, start, stop, first_line, padded_q, seen, dq_desc, dq_smem,
                dq_full, dq_empty.index(0), ROWS, 64,
            )  # fmt: skip
        else:
            for w in gl.static_range(2):
                mbarrier.wait(dq_full.index(w), j & 1)
                tma_reduce_add(dq_desc, [line // 2 + 16 * w, 0], dq_smem.index(w))
            tma.store_wait(1)
            mbarrier.arrive(dq_empty.index(0), count=1)
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(1), count=1)
            row, line = following(row, line, start, stop, padded_q, ROWS)


@gluon.jit
def _hand_over(dq, dq_smem, dq_full, dq_empty, j, WG: gl.constexpr, ORDERED: gl.constexpr):
    """Give the writer this warpgroup's half of dQ of step j."""
    EMPTY: gl.constexpr = 0 if ORDERED else WG
    mbarrier.wait(dq_empty.index(EMPTY), (j & 1) ^ 1)
    dq_smem.index(WG).store(fragment_order(dq))
    fence_async_shared()
    arrive_each_thread(dq_full.index(WG))


@gluon.jit
def _own_keys(smem, full, key, first, last, CUT: gl.constexpr, LAYOUT: gl.constexpr):
    """64 rows of K or V in registers; zeros, in shared memory too, for what no query sees."""
    x = smem.reshape([64, smem.type.shape[3]])
    mbarrier.wait(full, 0)
    if CUT:
        if (key < first) | (key + 64 > last):
            clear_outside(x, key, first, last)
    return x.load(LAYOUT)


@gluon.jit
def _consumer(
    WG: gl.constexpr, given, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    (dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
     kv_full, q_full, do_full, q_empty, do_empty, ds_full, dq_full, dq_empty, scale, batch_k,
     kv_head, group, block_key, start, stop, end, lo, hi, first, last, keys, dk_out, dv_out,
     head_dims_8) = given  # fmt: skip
    STAGES: gl.constexpr = q_smem.type.shape[0]
    CUT: gl.constexpr = HAS_LENGTHS or HAS_LEFT or HAS_RIGHT
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    steps = (stop - start) // ROWS * group
    # Without it the path of no step merges zeros with a wgmma in flight, and ptxas serialises all.
    gl.assume(steps > 0)
    key = block_key + 64 * WG
    c = scale * LOG2E
    zero = gl.zeros([64, ROWS], gl.float32, S_LAYOUT)
    dk = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, S_LAYOUT))
    dv = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, S_LAYOUT))
    ds_half = gl.zeros([64, ROWS], dtype, A_LAYOUT)
    ds_smem.index(2 + WG).store(gl.zeros([64, ROWS], dtype, S_LAYOUT))
    fence_async_shared()
    k = _own_keys(k_smem.index(WG), kv_full.index(0), key, first, last, CUT, A_LAYOUT)
    v = _own_keys(v_smem.index(WG), kv_full.index(1), key, first, last, CUT, A_LAYOUT)
    below, above = masked_rows(key, end, lo, hi, ROWS, HAS_LEFT, HAS_RIGHT)
    named_barrier_sync(SHARED, 256)
    if WG == 1:
        named_barrier_arrive(TURN, 256)
    row = start
    for j in range(steps):
        slot, phase = slot_of(j, STAGES)
        old, _phase = slot_of(gl.maximum(j - 1, 0), STAGES)
        q = q_smem.index(slot).reshape([ROWS, 64])
        do = do_smem.index(slot).reshape([ROWS, 64])
        mbarrier.wait(q_full.index(slot), phase)
        named_barrier_sync(TURN + WG, 256)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Of no step: dS^T is 0, and Q that of this step.
        dk = warpgroup_mma(ds_half, q_smem.index(old).reshape([ROWS, 64]), dk, is_async=True)
        before = (j + 1) & 1
        mbarrier.wait(ds_full.index(before), ((j - 1) >> 1) & 1)
        ds0, ds1 = ds_smem.index(before * 2), ds_smem.index(before * 2 + 1)
        dq = query_gradient(ds0, ds1, k_smem, WG, ROWS, 64, DQ_LAYOUT)
        if WG == 0 or j + 1 < steps:
            named_barrier_arrive(TURN + 1 - WG, 256)
        x = warpgroup_mma_wait(4, deps=[s])
        if (row < below) | (row > above):
            x = mask_transposed(x, key, row, end, lo, hi, HAS_LEFT, HAS_RIGHT)
        p = gl.exp2(gl.fma(x, c, gl.expand_dims(lse_smem.index(slot).load(COLUMNS), 0)))
        p_half = gl.convert_layout(p.to(dtype), A_LAYOUT, assert_trivial=True)
        dv = warpgroup_mma(p_half, do, dv, is_async=True)
        dp, dq, dk = warpgroup_mma_wait(1, deps=[dp, dq, dk])
        if (j > 0) & (j - 1 + STAGES < steps):
            arrive_each_thread(q_empty.index(old))
        delta = gl.expand_dims(delta_smem.index(slot).load(COLUMNS), 0)
        ds = (p * (dp + delta)).to(dtype)
        ds_smem.index((j & 1) * 2 + WG).store(ds)
        fence_async_shared()
        arrive_each_thread(ds_full.index(j & 1))
        if j > 0:
            _hand_over(dq, dq_smem, dq_full, dq_empty, j - 1, WG, ORDERED)
        dv = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[dv]))
        dk = warpgroup_mma_init(dk)
        if j + STAGES < steps:
            arrive_each_thread(do_empty.index(slot))
        ds_half = gl.convert_layout(ds, A_LAYOUT, assert_trivial=True)
        row = gl.where(row + ROWS == stop, start, row + ROWS)
    old, _phase = slot_of(steps - 1, STAGES)
    dk = warpgroup_mma(ds_half, q_smem.index(old).reshape([ROWS, 64]), dk, is_async=True)
    before = (steps + 1) & 1
    mbarrier.wait(ds_full.index(before), ((steps - 1) >> 1) & 1)
    ds0, ds1 = ds_smem.index(before * 2), ds_smem.index(before * 2 + 1)
    dq = query_gradient(ds0, ds1, k_smem, WG, ROWS, 64, DQ_LAYOUT)
    dq, dk, dv = warpgroup_mma_wait(0, deps=[dq, dk, dv])
    _hand_over(dq, dq_smem, dq_full, dq_empty, steps - 1, WG, ORDERED)
    v_at, k_at = v_smem.index(WG), k_smem.index(WG)
    dv = dv.to(dtype)
    store_keys(dv_desc, v_at, dv, batch_k, kv_head, key, keys, dv_out, head_dims_8[1], PACKED)
    named_barrier_sync(SHARED, 256)  # the other warpgroup has read this half of K for its dQ
    dk = (dk * scale).to(dtype)
    store_keys(dk_desc, k_at, dk, batch_k, kv_head, key, keys, dk_out, head_dims_8[0], PACKED)
    tma.store_wait(0)


INT32_ARGUMENTS = (
    "heads_q", "heads_kv", "group", "len_q", "len_k", "padded_q", "key_blocks",
    "left_top", "right_top", "left_bottom", "right_bottom", "heads_a_round", "head_dim_8",
    "head_dim_v_8", "sequences", "total_q", "total_k", "dk_h", "dk_l", "dv_h", "dv_l",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", *INT32_ARGUMENTS])
def attention_bwd_narrow_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, lengths_ptr,
    scale, heads_q, heads_kv, group, len_q, len_k, padded_q, key_blocks, left_top, right_top,
    left_bottom, right_bottom, cu_q, cu_k, dk_ptr, dv_ptr, progress, heads_a_round, head_dim_8,
    head_dim_v_8, sequences, total_q, total_k, dk_h, dk_l, dv_h, dv_l,
    STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 64], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 64], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, 64], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 64, ROWS], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 16, 128], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(ds_full.index(i), count=256)
        mbarrier.init(dq_full.index(i), count=128)
        mbarrier.init(dq_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=256)
        mbarrier.init(do_empty.index(i), count=256)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # nothing above touches global memory
    if not HAS_LENGTHS:
        lengths_ptr = 0
    PACKED: gl.constexpr = cu_q is not None
    ORDERED: gl.constexpr = progress is not None
    packed, dk_out, dv_out = (), (), ()
    if PACKED:
        packed = (cu_q, cu_k, sequences, total_q, total_k)
        dk_out = (dk_ptr, dk_h, dk_l)
        dv_out = (dv_ptr, dv_h, dv_l)
    program = program_in_turn(progress, key_blocks, heads_a_round, PACKED, ORDERED)
    batch, kv_head, key, batch_q, batch_k, rows, keys, missing, line = keys_of_program(
        program, key_blocks, heads_q, heads_kv, len_q, len_k, padded_q, packed, ROWS, 128, PACKED,
        False,
    )  # fmt: skip
    lo, hi, end, first, last = band_of(
        lengths_ptr, batch, rows, keys, left_top, right_top, left_bottom, right_bottom,
        HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    if PACKED:  # rows are counted from the front of the first block
        lo -= missing
        hi -= missing
        last = gl.where(key == -128, key, last)  # no key is there
    start, stop = queries_of(key, last, rows + missing, lo, hi, ROWS, 128, HAS_LEFT, HAS_RIGHT)
    line += start
    order = ()
    if ORDERED:
        order = order_of(
            progress, program, key, last, rows + missing, keys, lo, hi, ROWS, 128, HAS_LEFT,
            HAS_RIGHT, PACKED,
        )  # fmt: skip
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    gl.warp_specialize([
        (_consumer, (0, (
            dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem,
            dq_smem, kv_full, q_full, do_full, q_empty, do_empty, ds_full, dq_full, dq_empty, scale,
            batch_k, kv_head, group, key, start, stop, end, lo, hi, first, last, keys, dk_out,
            dv_out, (head_dim_8, head_dim_v_8),
        ), PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED)),
        (_consumer, (1, (
            dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem,
            dq_smem, kv_full, q_full, do_full, q_empty, do_empty, ds_full, dq_full, dq_empty, scale,
            batch_k, kv_head, group, key, start, stop, end, lo, hi, first, last, keys, dk_out,
            dv_out, (head_dim_8, head_dim_v_8),
        ), PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED)),
        (_producer, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc),
                     (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem),
                     (kv_full, q_full, do_full), (q_empty, do_empty), batch_q, batch_k, kv_head,
                     group, key, start, stop, missing, line, padded_q)),
        (_writer, (dq_desc, dq_smem, dq_full, dq_empty, group, start, stop, line, padded_q, order,
                   ORDERED)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
