"""Attention backward for Hopper (sm_90a) in Gluon, head dims up to 64, without bias, mask, dropout.

The mathematics, the blocks, the packed sequences and the float32 dQ buffer are those of
`kernel_gluon_sm90_bwd.py`. What a narrow head leaves room for is another order of the products.

Picture. A program owns 128 keys of one key head and walks over blocks of 64 queries, each of two
consumer warpgroups with 64 keys. K and V of a warpgroup stay in its registers, so that S^T and dP^T
read shared memory for one operand only. dK and dQ of a step are put off to the next: that step
issues S^T, dP^T, dK and dQ at once, and computes P^T while they run; dV runs under dS^T.

    step j:  S^T(j), dP^T(j), dK(j - 1), dQ(j - 1) issued;  P^T(j);  dV(j) issued;  dS^T(j)

dS^T goes through shared memory, where both warpgroups read it for dQ, each for half of the columns.
A warpgroup needs the other's dS^T of the step before only. The two take turns to issue a step's
products, so that one computes while the tensor cores work for the other: 5 to 19 % faster than
without (H200, 2026-11-28). A warp of its own adds dQ to the buffer by TMA reductions.

Persistent (there is a counter): as many programs as multiprocessors draw blocks of keys, each when
the loads of the one before are issued (no sooner, or they end far apart), and the producer mails a
block's turn to the others. The next K, V, Q and dO arrive while a block ends; K and V have two
places, slots of rows go on in turn, and steps count on through all blocks of a program (from block
to block modulo the least that all slots and phases come round in: no count outgrows one block's).

The statistics are -LSE log2(e), which P^T's exponent adds, and -delta.

Bytes moved: as there.

Who waits for whom (mbarriers, by phase; counts in brackets):
    kv_full[i]   (1)      producer's TMA -> consumers: K (0) and V (1) are there, of place 1 (2, 3)
    q_full[s]    (1)      producer's TMA -> consumers: Q and its statistic of slot s are there
    do_full[s]   (1)      the same for dO and -delta
    q_empty[s]   (256)    every consumer thread -> producer: slot s of Q may be filled again
    do_empty[s]  (256)    the same for dO
    ds_full[j % 2] (256)  every consumer thread -> consumers: its part of dS^T of step j is written,
                          and what it read of step j - 2 in this place has been read
    dq_full[i]   (128)    consumer i -> writer: its half of dQ may be added
    dq_empty[i]  (1)      writer -> consumer i: it has been read; in a fixed order (which
                          `pieces_order_sm90.py` keeps) both by the first of the two
Persistent only:
    kv_empty[p]  (2)      each consumer -> producer: dK and dV have been stored out of K and V of
                          place p, which may be filled again
    mail_full[n % 2] (1)  producer -> consumers and writer: the turn of block n is there
    mail_empty[n % 2] (288)  every thread of those -> producer: it has been read
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
from tileloom.device.mail import receive, send
from tileloom.device.tma import tma_reduce_add
from tileloom.ops.attention.pieces_blocks_sm90_bwd import ROWS, batch_to_load, block_of, drawn
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    clear_outside,
    following,
    fragment_order,
    mask_transposed,
    masked_rows,
    query_gradient,
    store_keys,
)
from tileloom.ops.attention.pieces_order_sm90 import add_in_turn, program_in_turn
from tileloom.ops.attention.pieces_step_sm90 import from_pairs, packed_pairs

SHARED = gl.constexpr(8)
TURN = gl.constexpr(9)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    descs, smem, full, empty, group, padded_q, mail, counter, units, block, work,
    PERSISTENT: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Load all that is read; PERSISTENT: of every block of keys drawn, whose turns are mailed."""
    if PERSISTENT:
        mail, mail_full, mail_empty = mail
        turn = gl.program_id(0)
        if ORDERED:
            turn = gl.atomic_add(counter, 1, sem="relaxed")
        send(mail, mail_full, mail_empty, 0, turn)
        count = 0
        done = 0
        while turn < units:
            keys, rows, _order, _batch = drawn(
                turn, units, work, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
            )
            place, phase = slot_of(count, 2)
            mbarrier.wait(empty[2].index(place), phase ^ 1)
            done = _load(descs, smem, full, empty, group, padded_q, keys, rows, place, done, PACKED)
            count += 1
            turn = gl.atomic_add(counter, 1, sem="relaxed")
            if not ORDERED:
                turn += gl.num_programs(0)
            send(mail, mail_full, mail_empty, count, turn)
    else:
        _load(descs, smem, full, empty, group, padded_q, block[0], block[1], 0, 0, PACKED)


@gluon.jit
def _load(
    descs, smem, full, empty, group, padded_q, keys, rows, place, done, PACKED: gl.constexpr
):  # fmt: skip
    """Load a block of keys into a place, and rows into slots from the one of step `done` on."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem = smem
    kv_full, q_full, do_full = full
    q_empty, do_empty, _kv_empty = empty
    batch_k, kv_head, key, _first, last, _keys, _end, _lo, _hi = keys
    batch_k = batch_to_load(batch_k, key, last, PACKED)
    batch_q, start, stop, missing, line = rows
    STAGES: gl.constexpr = q_smem.type.shape[0]
    mbarrier.expect(kv_full.index(2 * place), 2 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        at_k = [batch_k, kv_head, key + 64 * w, 0]
        tma_load(k_desc, at_k, kv_full.index(2 * place), k_smem.index(2 * place + w))
    row = start
    head = kv_head * group
    steps = (stop - start) // ROWS * group
    for j in range(steps):
        slot, phase = slot_of(done + j, STAGES)
        at = [batch_q, head, row - missing, 0]
        mbarrier.wait(q_empty.index(slot), phase ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 4 * ROWS)
        tma_load(q_desc, at, q_full.index(slot), q_smem.index(slot))
        tma_load(lse_desc, [line], q_full.index(slot), lse_smem.index(slot))
        if j == 0:
            mbarrier.expect(kv_full.index(2 * place + 1), 2 * v_desc.block_type.nbytes)
            for w in gl.static_range(2):
                at_v = [batch_k, kv_head, key + 64 * w, 0]
                tma_load(v_desc, at_v, kv_full.index(2 * place + 1), v_smem.index(2 * place + w))
        mbarrier.wait(do_empty.index(slot), phase ^ 1)
        mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes + 4 * ROWS)
        tma_load(do_desc, at, do_full.index(slot), do_smem.index(slot))
        tma_load(delta_desc, [line], do_full.index(slot), delta_smem.index(slot))
        head += (row + ROWS == stop).to(gl.int32)
        row, line = following(row, line, start, stop, padded_q, ROWS)
    return (done + steps) % (4 * STAGES)


@gluon.jit
def _writer(
    dq_desc, dq_smem, dq_full, dq_empty, group, padded_q, mail, units, block, work,
    PERSISTENT: gl.constexpr, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add dQ of each step to the buffer."""
    if PERSISTENT:
        mail, mail_full, mail_empty = mail
        count = 0
        done = 0
        turn = receive(mail, mail_full, mail_empty, 0, 1)
        while turn < units:
            _keys, rows, order, _batch = drawn(
                turn, units, work, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
            )
            done = _add(
                dq_desc, dq_smem, dq_full, dq_empty, group, padded_q, rows, order, done, ORDERED
            )
            count += 1
            turn = receive(mail, mail_full, mail_empty, count, 1)
    else:
        _add(
            dq_desc, dq_smem, dq_full, dq_empty, group, padded_q, block[1], block[2], 0, ORDERED
        )  # fmt: skip


@gluon.jit
def _add(
    dq_desc, dq_smem, dq_full, dq_empty, group, padded_q, rows, order, done, ORDERED: gl.constexpr
):
    """Add dQ of the steps of a block of keys, before which there were `done`."""
    _batch_q, start, stop, _missing, line = rows
    steps = (stop - start) // ROWS * group
    row = start
    seen = 0
    first_line = line
    for j in range(steps):
        if ORDERED:
            seen = add_in_turn(
                order, j, steps, start, stop, first_line, padded_q, seen, dq_desc, dq_smem,
                dq_full, dq_empty.index(0), ROWS, 64, done,
            )  # fmt: skip
        else:
            for w in gl.static_range(2):
                mbarrier.wait(dq_full.index(w), (done + j) & 1)
                tma_reduce_add(dq_desc, [line // 2 + 16 * w, 0], dq_smem.index(w))
            tma.store_wait(1)
            mbarrier.arrive(dq_empty.index(0), count=1)
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(1), count=1)
            row, line = following(row, line, start, stop, padded_q, ROWS)
    return (done + steps) & 1


@gluon.jit
def _hand_over(dq, dq_smem, dq_full, dq_empty, j, WG: gl.constexpr, ORDERED: gl.constexpr):
    """Give the writer this warpgroup's half of dQ of step j."""
    EMPTY: gl.constexpr = 0 if ORDERED else WG
    mbarrier.wait(dq_empty.index(EMPTY), (j & 1) ^ 1)
    dq_smem.index(WG).store(fragment_order(dq))
    fence_async_shared()
    arrive_each_thread(dq_full.index(WG))


@gluon.jit
def _own_keys(smem, full, phase, key, first, last, CUT: gl.constexpr, LAYOUT: gl.constexpr):
    """64 rows of K or V in registers; zeros, in shared memory too, for what no query sees."""
    x = smem.reshape([64, smem.type.shape[3]])
    mbarrier.wait(full, phase)
    if CUT:
        if (key < first) | (key + 64 > last):
            clear_outside(x, key, first, last)
    return x.load(LAYOUT)


@gluon.jit
def _consumer(
    WG: gl.constexpr, given, mail, units, block, work, PERSISTENT: gl.constexpr,
    PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        mail, mail_full, mail_empty = mail
        count = 0
        done = 0
        turn = receive(mail, mail_full, mail_empty, 0)
        while turn < units:
            keys, rows, _order, _batch = drawn(
                turn, units, work, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
            )
            done = _walk(
                WG, given, keys, rows, count, done, PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT,
                HAS_RIGHT, ORDERED,
            )  # fmt: skip
            count += 1
            turn = receive(mail, mail_full, mail_empty, count)
    else:
        _walk(
            WG, given, block[0], block[1], 0, 0, PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT,
            HAS_RIGHT, ORDERED,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _walk(
    WG: gl.constexpr, given, keys_of, rows_of, count, done, PERSISTENT: gl.constexpr,
    PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Block of keys `count` of a program, from step `done` on; returns the step that is next."""
    (dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem,
     kv_full, q_full, do_full, q_empty, do_empty, kv_empty, ds_full, dq_full, dq_empty, scale,
     group, dk_out, dv_out, head_dims_8) = given  # fmt: skip
    batch_k, kv_head, block_key, first, last, keys, end, lo, hi = keys_of
    _batch_q, start, stop, _missing, _line = rows_of
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
    words = gl.zeros([64, ROWS], gl.float32, S_LAYOUT)
    words = packed_pairs(words, dtype)
    place, kv_phase = slot_of(count, 2)
    ds_smem.index(((done + 1) & 1) * 2 + WG).store(gl.zeros([64, ROWS], dtype, S_LAYOUT))
    fence_async_shared()
    k_at, v_at = k_smem.index(2 * place + WG), v_smem.index(2 * place + WG)
    k_full, v_full = kv_full.index(2 * place), kv_full.index(2 * place + 1)
    k = _own_keys(k_at, k_full, kv_phase, key, first, last, CUT, A_LAYOUT)
    v = _own_keys(v_at, v_full, kv_phase, key, first, last, CUT, A_LAYOUT)
    below, above = masked_rows(key, end, lo, hi, ROWS, HAS_LEFT, HAS_RIGHT)
    if PERSISTENT:
        if count > 0:
            tma.store_wait(0)  # dK and dV of the block before have been read
            mbarrier.arrive(kv_empty.index(place ^ 1), count=1)
    named_barrier_sync(SHARED, 256)
    if WG == 1:
        named_barrier_arrive(TURN, 256)
    row = start
    after = done + steps
    # The last slots are needed again by the next block only.
    kept = 0 if PERSISTENT else STAGES
    for j in range(done, after):
        slot, phase = slot_of(j, STAGES)
        old, _phase = slot_of(gl.maximum(j - 1, done), STAGES)
        q = q_smem.index(slot).reshape([ROWS, 64])
        do = do_smem.index(slot).reshape([ROWS, 64])
        mbarrier.wait(q_full.index(slot), phase)
        named_barrier_sync(TURN + WG, 256)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Of no step: dS^T is 0, and Q that of this step.
        ds_half = from_pairs(words, dtype, A_LAYOUT)
        dk = warpgroup_mma(ds_half, q_smem.index(old).reshape([ROWS, 64]), dk, is_async=True)
        before = (j + 1) & 1
        mbarrier.wait(ds_full.index(before), ((j - 1) >> 1) & 1)
        ds0, ds1 = ds_smem.index(before * 2), ds_smem.index(before * 2 + 1)
        dq = query_gradient(ds0, ds1, k_smem, WG, ROWS, 64, DQ_LAYOUT, 2 * place)
        if WG == 0 or j + 1 < after:
            named_barrier_arrive(TURN + 1 - WG, 256)
        x = warpgroup_mma_wait(4, deps=[s])
        if (row < below) | (row > above):
            x = mask_transposed(x, key, row, end, lo, hi, HAS_LEFT, HAS_RIGHT)
        p = gl.exp2(gl.fma(x, c, gl.expand_dims(lse_smem.index(slot).load(COLUMNS), 0)))
        p_half = gl.convert_layout(p.to(dtype), A_LAYOUT, assert_trivial=True)
        dv = warpgroup_mma(p_half, do, dv, is_async=True)
        dp, dq, dk = warpgroup_mma_wait(1, deps=[dp, dq, dk])
        if (j > done) & (j - 1 + kept < after):
            arrive_each_thread(q_empty.index(old))
        delta = gl.expand_dims(delta_smem.index(slot).load(COLUMNS), 0)
        words = packed_pairs(p * (dp + delta), dtype)
        ds_smem.index((j & 1) * 2 + WG).store(from_pairs(words, dtype, S_LAYOUT))
        fence_async_shared()
        arrive_each_thread(ds_full.index(j & 1))
        if j > done:
            _hand_over(dq, dq_smem, dq_full, dq_empty, j - 1, WG, ORDERED)
        dv = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[dv]))
        dk = warpgroup_mma_init(dk)
        if j + kept < after:
            arrive_each_thread(do_empty.index(slot))
        row = gl.where(row + ROWS == stop, start, row + ROWS)
    old, _phase = slot_of(after - 1, STAGES)
    ds_half = from_pairs(words, dtype, A_LAYOUT)
    dk = warpgroup_mma(ds_half, q_smem.index(old).reshape([ROWS, 64]), dk, is_async=True)
    before = (after + 1) & 1
    mbarrier.wait(ds_full.index(before), ((after - 1) >> 1) & 1)
    ds0, ds1 = ds_smem.index(before * 2), ds_smem.index(before * 2 + 1)
    dq = query_gradient(ds0, ds1, k_smem, WG, ROWS, 64, DQ_LAYOUT, 2 * place)
    dq, dk, dv = warpgroup_mma_wait(0, deps=[dq, dk, dv])
    if PERSISTENT:
        arrive_each_thread(q_empty.index(old))
    _hand_over(dq, dq_smem, dq_full, dq_empty, after - 1, WG, ORDERED)
    dv = dv.to(dtype)
    store_keys(dv_desc, v_at, dv, batch_k, kv_head, key, keys, dv_out, head_dims_8[1], PACKED)
    named_barrier_sync(SHARED, 256)  # the other warpgroup has read this half of K for its dQ
    dk = (dk * scale).to(dtype)
    store_keys(dk_desc, k_at, dk, batch_k, kv_head, key, keys, dk_out, head_dims_8[0], PACKED)
    return after % (4 * STAGES)


INT32_ARGUMENTS = (
    "heads_q", "heads_kv", "group", "len_q", "len_k", "padded_q", "key_blocks",
    "left_top", "right_top", "left_bottom", "right_bottom", "heads_a_round", "head_dim_8",
    "head_dim_v_8", "sequences", "total_q", "total_k", "dk_h", "dk_l", "dv_h", "dv_l",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", *INT32_ARGUMENTS])
def attention_bwd_narrow_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, lengths_ptr,
    scale, heads_q, heads_kv, group, len_q, len_k, padded_q, key_blocks, left_top, right_top,
    left_bottom, right_bottom, cu_q, cu_k, dk_ptr, dv_ptr, progress, counter, heads_a_round,
    head_dim_8, head_dim_v_8, sequences, total_q, total_k, dk_h, dk_l, dv_h, dv_l,
    STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PERSISTENT: gl.constexpr = counter is not None
    PLACES: gl.constexpr = 2 if PERSISTENT else 1
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 64], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 64], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2 * PLACES, 1, 1, 64, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2 * PLACES, 1, 1, 64, 64], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 64, ROWS], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 16, 128], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2 * PLACES, 1], bars)
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
    kv_empty, mail = (), ()
    if PERSISTENT:
        kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        letters = gl.allocate_shared_memory(
            gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        for i in gl.static_range(2):
            mbarrier.init(kv_full.index(2 + i), count=1)
            mbarrier.init(kv_empty.index(i), count=2)
            mbarrier.init(mail_full.index(i), count=1)
            mbarrier.init(mail_empty.index(i), count=256 + 32)
        mail = (letters, mail_full, mail_empty)
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
    if not ORDERED:
        progress = 0
    work = (
        heads_q, heads_kv, len_q, len_k, padded_q, key_blocks, heads_a_round, lengths_ptr, left_top,
        right_top, left_bottom, right_bottom, packed, progress,
    )  # fmt: skip
    units, block = (), ()
    if PERSISTENT:
        units = key_blocks * heads_kv
        if not PACKED:
            units *= sequences
    else:
        counter = 0
        program = program_in_turn(progress, key_blocks, heads_a_round, PACKED, ORDERED)
        block = block_of(
            program, work, ROWS, 128, PACKED, False, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
        )
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    gl.warp_specialize([
        (_consumer, (0, (
            dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem,
            dq_smem, kv_full, q_full, do_full, q_empty, do_empty, kv_empty, ds_full, dq_full,
            dq_empty, scale, group, dk_out, dv_out, (head_dim_8, head_dim_v_8),
        ), mail, units, block, work, PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
            ORDERED)),
        (_consumer, (1, (
            dk_desc, dv_desc, q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, ds_smem,
            dq_smem, kv_full, q_full, do_full, q_empty, do_empty, kv_empty, ds_full, dq_full,
            dq_empty, scale, group, dk_out, dv_out, (head_dim_8, head_dim_v_8),
        ), mail, units, block, work, PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
            ORDERED)),
        (_producer, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc),
                     (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem),
                     (kv_full, q_full, do_full), (q_empty, do_empty, kv_empty), group, padded_q,
                     mail, counter, units, block, work, PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT,
                     HAS_RIGHT, ORDERED)),
        (_writer, (dq_desc, dq_smem, dq_full, dq_empty, group, padded_q, mail, units, block, work,
                   PERSISTENT, PACKED, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
