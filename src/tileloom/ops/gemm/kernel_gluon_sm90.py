"""GEMM for Hopper (sm_90a) in Gluon: C = activation(A B + bias) + residual.

Picture. Persistent blocks, one an SM, take tiles of BLOCK_M x BLOCK_N in the order of a scheduler
of `tileloom.scheduling`. One producer warp loads boxes of A and B by TMA into a ring; two consumer
warpgroups (three for 192 rows) hold the tile in registers, split along M (64 or 128 rows each) or,
for tiles of 64 rows, along N. One wgmma is kept in flight, and the slot before it handed back.

    ring:   [ A0 B0 ][ A1 B1 ] ... [ A(STAGES-1) B(STAGES-1) ]         filled along k, 64 a step
    C:      accumulator -> slices of 128 bytes a row in shared memory -> TMA store

The epilogue overlaps the next tile's loads: the producer never waits for a store. With
EARLY it also overlaps the next tile's first step (`pieces_early_sm90.py`). TMA fills what
lies past M, N or K with zeros and clips what is stored. With chunks of rows (async input) a tile
waits for all chunks that have rows in it, and a tile is stored early if the next one's are there.

The rows that the last tile lacks are not loaded but for those of a started box: of it the first
EDGE rows, in boxes of `edge_desc`. Zeros would take the TMA unit longer than rows.

With SWAP_AB the kernel is given the product B^T A^T of the same tensors and turns its tiles as it
stores them: its rows are C's columns. Few rows of A then fill the few columns of a tile.

With SPLITS several blocks share a tile, each a part of k: they leave their sums in float32 in
`partials`, and who comes last, by a counter of the tile that it sets back to 0, adds them in order.

Launched with `launch_pdl`, a block begins while the kernel ahead still ends: barriers, partitions
and the first tile's place are ready when `gdc_wait` lets both sides at global memory.

Bytes moved: C once; A once for each column of tiles and B once for each row, from L2 where the
group of the raster lets them.

Who waits for whom (mbarriers, by phase; counts in brackets):
    full[s]  (1)            producer's TMA -> consumers: A and B of slot s are there
    empty[s] (128 * CONSUMERS) each consumer thread -> producer: slot s may be filled again
             (CONSUMERS with a wide tail, where a warpgroup meets and one thread says it)
    residual_full[i]  (1)   a consumer's own TMA -> itself: slice i of its residual is there
    mail_full[i] (1), mail_empty[i] (128 * CONSUMERS): the dynamic scheduler's, see its class
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.device.memory import globaltimer, load_acquire, store_release
from tileloom.ops.gemm.pieces_activation import activate_gluon
from tileloom.ops.gemm.pieces_early_sm90 import consumer_early, send_signalled
from tileloom.ops.gemm.pieces_gluon_sm90 import (
    clear_edge,
    gather_parts,
    k_range,
    leave_part,
    load_bias,
    load_part,
    load_residual,
    padded,
    rows_of_part,
    slots,
    stack,
    step_on,
    store_tile,
)
from tileloom.ops.gemm.pieces_multiply_sm90 import multiply, zeros
from tileloom.scheduling.device import (
    AsyncInputScheduler,
    DynamicPersistentScheduler,
    StaticPersistentScheduler,
    TileOrder,
)


@gluon.jit
def _load_steps(
    a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem, tail_smem, full, empty, batch, row, col,
    first, k_steps, stage, phase, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr, TAIL: gl.constexpr, A_EDGE: gl.constexpr,
    B_EDGE: gl.constexpr,
):  # fmt: skip
    A_PARTS: gl.constexpr = 1 if SPLIT_N else CONSUMERS
    B_PARTS: gl.constexpr = CONSUMERS if SPLIT_N else 1
    STAGES: gl.constexpr = a_smem.type.shape[0] // A_PARTS
    WM: gl.constexpr = a_smem.type.shape[3 if A_TRANSPOSED else 2]
    BLOCK_K: gl.constexpr = a_smem.type.shape[2 if A_TRANSPOSED else 3]
    FRONT: gl.constexpr = b_smem.type.shape[2 if B_TRANSPOSED else 3]
    WN: gl.constexpr = FRONT + TAIL
    ROWS: gl.constexpr = A_EDGE if A_EDGE > 0 else A_PARTS * WM
    COLUMNS: gl.constexpr = B_EDGE if B_EDGE > 0 else B_PARTS * WN
    BYTES: gl.constexpr = (ROWS + COLUMNS) * BLOCK_K * a_desc.dtype.primitive_bitwidth // 8
    for step in range(k_steps):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        k = (first + step) * BLOCK_K
        for w in gl.static_range(A_PARTS):
            load_part(a_desc, edge_desc, a_smem, stage * A_PARTS + w, bar, batch, row + w * WM, k,
                      rows_of_part(ROWS, w, WM), A_TRANSPOSED)  # fmt: skip
        for w in gl.static_range(B_PARTS):
            slot = stage * B_PARTS + w
            load_part(b_desc, edge_desc, b_smem, slot, bar, batch, col + w * WN, k,
                      rows_of_part(COLUMNS, w, WN), not B_TRANSPOSED)  # fmt: skip
            if TAIL > 0:
                load_part(tail_desc, edge_desc, tail_smem, slot, bar, batch, col + w * WN + FRONT,
                          k, TAIL, not B_TRANSPOSED)  # fmt: skip
        stage, phase = step_on(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _producer(
    scheduler, signals, a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem, tail_smem, full,
    empty, status, claim, timeout_us, m, n, k_steps, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr, CHUNKED: gl.constexpr, DYNAMIC: gl.constexpr,
    SPLITS: gl.constexpr, TAIL: gl.constexpr, A_EDGE: gl.constexpr, B_EDGE: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 1
    count = 0
    seen = -1
    late = -1
    is_there = gl.to_tensor(False)
    work = scheduler.initial_work_tile_info()
    gdc_wait()
    if CHUNKED:
        deadline = gl.where(timeout_us < 0, 2**63 - 1, globaltimer() + timeout_us * 1000)
    while work.is_valid_tile:
        if CHUNKED:
            if (late < 0) & (is_there == 0):
                seen, late = signals.wait_signal(work, seen, deadline)
                if late >= 0:  # one program says it to the host; none waits any more
                    if gl.atomic_cas(claim, 0, 1, sem="relaxed") == 0:
                        gl.store(status + 1, signals.epoch)
                        flag = load_acquire(signals.flags + late, "sys")
                        gl.store(status + 2, flag)
                        store_release(status, late + 1, "sys")
        batch, first, steps = k_range(work.l_idx, k_steps, SPLITS)
        col = work.n_idx * BLOCK_N
        whole = steps  # all of them in one loop, or in the other
        if A_EDGE > 0:
            whole = gl.where(work.row + BLOCK_M > m, 0, steps)
        elif B_EDGE > 0:
            whole = gl.where(col + BLOCK_N > n, 0, steps)
        stage, phase = _load_steps(
            a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem, tail_smem, full, empty, batch,
            work.row, col, first, whole, stage, phase, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N,
            CONSUMERS, TAIL, 0, 0,
        )  # fmt: skip
        if A_EDGE + B_EDGE > 0:
            stage, phase = _load_steps(
                a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem, tail_smem, full, empty, batch,
                work.row, col, first, steps - whole, stage, phase, A_TRANSPOSED, B_TRANSPOSED,
                SPLIT_N, CONSUMERS, TAIL, A_EDGE, B_EDGE,
            )  # fmt: skip
        if DYNAMIC:
            if CHUNKED:
                work, seen, is_there = send_signalled(scheduler, signals, seen, late, count)
            else:
                work = scheduler.fetch_next_work(count)
        else:
            work = scheduler.fetch_next_work(work)
        count += 1
    if CHUNKED:  # not before: a kernel behind this one must not take room from who brings rows
        gdc_launch_dependents()


@gluon.jit
def _consumer_late(
    WG: gl.constexpr, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials, counters,
    a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n, k_steps, WM: gl.constexpr,
    WN: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, DYNAMIC: gl.constexpr,
    SPLITS: gl.constexpr, SWAP_AB: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = CONSUMERS * WN if SPLIT_N else WN
    if HAS_BIAS:
        bias_smem = bias_smem.index(WG)
    stage = 0
    phase = 0
    count = 0  # tiles done
    stored = 0  # of these, tiles stored: with SPLITS not every one
    work = scheduler.initial_work_tile_info()
    gdc_wait()
    while work.is_valid_tile:
        row = work.row + (0 if SPLIT_N else WG * WM)
        col = work.n_idx * BLOCK_N + (WG * WN if SPLIT_N else 0)
        rows = work.rows_end - row
        batch, _first, steps = k_range(work.l_idx, k_steps, SPLITS)
        if HAS_BIAS:
            bias = load_bias(bias_ptr, row, rows, col, n, bias_smem, SWAP_AB)
        if HAS_RESIDUAL and SPLITS == 1:
            load_residual(residual_desc, c_smem, residual_full, batch, row, col, WG, BUFFERS,
                          SWAP_AB)  # fmt: skip
        acc, tail, _before, stage, phase = multiply(
            zeros(WM, WN - TAIL), zeros(WM, TAIL if TAIL > 0 else WN), a_smem, b_smem, tail_smem,
            full, empty, steps, stage, phase, WG, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS,
            TAIL, 0, False,
        )  # fmt: skip
        if HAS_BIAS:
            bias_smem.store(bias)
        if SPLITS == 1:
            # Where no bias, in registers for a slice at a time, comes before it: all at once.
            IS_FIRST: gl.constexpr = not HAS_BIAS and TAIL == 0
            if IS_FIRST:
                acc = activate_gluon(acc, ACTIVATION, c_smem.dtype.fp_mantissa_width)
            store_tile(acc, 0, out_desc, bias_smem, c_smem, residual_full, stored & 1, batch, row,
                       col, WG, BUFFERS, "" if IS_FIRST else ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                       SWAP_AB)  # fmt: skip
            if TAIL > 0:
                store_tile(tail, (WN - TAIL) // c_smem.type.shape[3], out_desc, bias_smem, c_smem,
                           residual_full, stored & 1, batch, row, col, WG, BUFFERS, ACTIVATION,
                           HAS_BIAS, HAS_RESIDUAL, SWAP_AB)  # fmt: skip
            stored += 1
        else:
            tile = work.linear - work.l_idx * (scheduler.order.total // SPLITS)
            part = (tile.to(gl.int64) * CONSUMERS + WG) * SPLITS
            is_last = leave_part(acc, partials, counters, part, work.l_idx, SPLITS)
            if is_last:
                if HAS_RESIDUAL:
                    load_residual(residual_desc, c_smem, residual_full, batch, row, col, WG,
                                  BUFFERS, SWAP_AB)  # fmt: skip
                whole = gather_parts(partials, part, acc, SPLITS)
                store_tile(whole, 0, out_desc, bias_smem, c_smem, residual_full, stored & 1, batch,
                           row, col, WG, BUFFERS, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                           SWAP_AB)  # fmt: skip
                stored += 1
        if DYNAMIC:
            work = scheduler.receive_next_work(count)
        else:
            work = scheduler.fetch_next_work(work)
        count += 1
    tma.store_wait(0)


@gluon.jit
def _consumer(
    WG: gl.constexpr, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials, counters,
    a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n, k_steps, WM: gl.constexpr,
    WN: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, DYNAMIC: gl.constexpr,
    SPLITS: gl.constexpr, SWAP_AB: gl.constexpr, TAIL: gl.constexpr, EARLY: gl.constexpr,
    CHUNKED: gl.constexpr,
):  # fmt: skip
    if EARLY:
        consumer_early(
            WG, scheduler, out_desc, a_smem, b_smem, c_smem, full, empty, k_steps, WM, WN,
            A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS, SWAP_AB, CHUNKED,
        )  # fmt: skip
    else:
        _consumer_late(
            WG, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials, counters, a_smem,
            b_smem, tail_smem, c_smem, full, empty, residual_full, n, k_steps, WM, WN, A_TRANSPOSED,
            B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC,
            SPLITS, SWAP_AB, TAIL,
        )  # fmt: skip


# Sizes stay run-time data, 1 and multiples of 16 as well: another shape compiles nothing.
SIZES = (
    "epoch", "timeout_us", "m", "n", "k_steps", "tiles_n", "total", "rows", "chunks", "pivot",
)  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def matmul_kernel(
    a_desc, b_desc, tail_desc, edge_desc, out_desc, residual_desc, out_ptr, bias_ptr, table, flags,
    status, claim, counter, partials, epoch: tl.int64, timeout_us: tl.int64, m, n, k_steps, tiles_n,
    total, rows, chunks, pivot, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, SWIZZLE: gl.constexpr, ALONG_M: gl.constexpr, UNIFORM: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, CHUNKED: gl.constexpr,
    DYNAMIC: gl.constexpr, ANY: gl.constexpr, SPLITS: gl.constexpr,
    SWAP_AB: gl.constexpr, TAIL: gl.constexpr, EARLY: gl.constexpr,
    BLOCK_K: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    SPLIT_N: gl.constexpr = BLOCK_M == 64
    CONSUMERS: gl.constexpr = 3 if BLOCK_M == 192 else 2
    A_PARTS: gl.constexpr = 1 if SPLIT_N else CONSUMERS
    B_PARTS: gl.constexpr = CONSUMERS if SPLIT_N else 1
    WM: gl.constexpr = BLOCK_M // A_PARTS
    WN: gl.constexpr = BLOCK_N // B_PARTS
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    a_smem = gl.allocate_shared_memory(
        a_desc.dtype, slots(STAGES * A_PARTS, WM, BLOCK_K, A_TRANSPOSED), a_desc.layout
    )
    b_smem = gl.allocate_shared_memory(
        b_desc.dtype, slots(STAGES * B_PARTS, WN - TAIL, BLOCK_K, not B_TRANSPOSED), b_desc.layout
    )
    if TAIL > 0:
        tail_smem = gl.allocate_shared_memory(
            tail_desc.dtype, stack(STAGES * B_PARTS, tail_desc), tail_desc.layout
        )
    else:  # never used
        tail_desc = b_desc
        tail_smem = b_smem
    A_EDGE: gl.constexpr = 0 if SWAP_AB else EDGE
    B_EDGE: gl.constexpr = EDGE if SWAP_AB else 0
    if A_EDGE > 0:
        clear_edge(edge_desc, a_smem, EDGE, A_PARTS)
    elif B_EDGE > 0:
        clear_edge(edge_desc, b_smem, EDGE, B_PARTS)
    else:
        edge_desc = b_desc  # never used
    c_smem = gl.allocate_shared_memory(
        out_desc.dtype, stack(CONSUMERS * BUFFERS, out_desc), out_desc.layout
    )
    if not CHUNKED:
        gdc_launch_dependents()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    residual_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * BUFFERS, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS if TAIL >= 64 else 128 * CONSUMERS)
    if HAS_RESIDUAL:
        for i in gl.static_range(CONSUMERS * BUFFERS):
            mbarrier.init(residual_full.index(i), count=1)
    if not HAS_RESIDUAL:
        residual_desc = out_desc  # never used; a partition takes no None
    bias_smem = full
    if HAS_BIAS:
        bias_smem = gl.allocate_shared_memory(
            bias_ptr.dtype.element_ty, [CONSUMERS, WM if SWAP_AB else padded(WN)],
            gl.SwizzledSharedLayout(1, 1, 1, [0]),
        )  # fmt: skip
    else:
        bias_ptr = out_ptr  # never used
    if UNIFORM:
        table = out_ptr  # never used
    if not CHUNKED:
        status = out_ptr  # never used
        claim = out_ptr
    if not DYNAMIC and SPLITS == 1:
        counter = out_ptr  # never used
    if SPLITS == 1:
        partials = out_ptr  # never used
    order = TileOrder(m, tiles_n, total, rows, chunks, pivot, table, BLOCK_M, SWIZZLE, ALONG_M,
                      UNIFORM)  # fmt: skip
    signals = ()
    if CHUNKED:
        signals = AsyncInputScheduler(order, flags, epoch.to(gl.int32), ANY)
    if DYNAMIC:
        mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
        for i in gl.static_range(2):
            mbarrier.init(mail_full.index(i), count=1)
            mbarrier.init(mail_empty.index(i), count=128 * CONSUMERS)
        scheduler = DynamicPersistentScheduler(order, counter, mail, mail_full, mail_empty)
    elif CHUNKED:
        scheduler = signals
    else:
        scheduler = StaticPersistentScheduler(order)
    fence_async_shared()
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials,
                         counter, a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n,
                         k_steps, WM, WN, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS,
                         ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC, SPLITS, SWAP_AB, TAIL,
                         EARLY, CHUNKED)),
            (_consumer, (1, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials,
                         counter, a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n,
                         k_steps, WM, WN, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS,
                         ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC, SPLITS, SWAP_AB, TAIL,
                         EARLY, CHUNKED)),
            (_producer, (scheduler, signals, a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem,
                         tail_smem, full, empty, status, claim, timeout_us, m, n, k_steps,
                         BLOCK_M, BLOCK_N, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, CHUNKED,
                         DYNAMIC, SPLITS, TAIL, A_EDGE, B_EDGE)),
        ], [4, 1], [240, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials,
                         counter, a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n,
                         k_steps, WM, WN, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS,
                         ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC, SPLITS, SWAP_AB, TAIL,
                         EARLY, CHUNKED)),
            (_consumer, (1, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials,
                         counter, a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n,
                         k_steps, WM, WN, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS,
                         ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC, SPLITS, SWAP_AB, TAIL,
                         EARLY, CHUNKED)),
            (_consumer, (2, scheduler, out_desc, residual_desc, bias_ptr, bias_smem, partials,
                         counter, a_smem, b_smem, tail_smem, c_smem, full, empty, residual_full, n,
                         k_steps, WM, WN, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, BUFFERS,
                         ACTIVATION, HAS_BIAS, HAS_RESIDUAL, DYNAMIC, SPLITS, SWAP_AB, TAIL,
                         EARLY, CHUNKED)),
            (_producer, (scheduler, signals, a_desc, b_desc, tail_desc, edge_desc, a_smem, b_smem,
                         tail_smem, full, empty, status, claim, timeout_us, m, n, k_steps,
                         BLOCK_M, BLOCK_N, A_TRANSPOSED, B_TRANSPOSED, SPLIT_N, CONSUMERS, CHUNKED,
                         DYNAMIC, SPLITS, TAIL, A_EDGE, B_EDGE)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
