"""Attention backward for Hopper (sm_90a) in Gluon, head dims of Q and K 136 to 192, of V to 128.

Without bias, mask and dropout, and dQ in no fixed order (in one it lost to the wide kernel: 246 to
272 TFLOP/s, H200, 2026-11-29, 4k, causal). The mathematics, the packed sequences and the float32 dQ
buffer are those of `kernel_gluon_sm90_bwd.py`.

Picture. A block owns 128 keys of one key head and walks over blocks of 64 queries. dK and dV,
128 x (192 + 128), take 160 registers of each of its 256 threads, and S^T and dP^T 64 more. So there
are no other warps: all threads have 255 registers, and one of them issues the loads. Tiles are
powers of two: Q, K, dQ and dK come as 128 columns and the `rest`, 64.

    step j:  S^T, dP^T issued;  P^T;  dS^T;  dV issued;  dQ issued;  dK issued;  dQ added

Each warpgroup computes the scores of 64 keys, and 96 columns of dQ = dS K over all of them: dS^T
goes through shared memory.

Bytes moved: as there.

Who waits for whom (mbarriers, by phase):
    kv_full[i] (1)      TMA -> all: K (0) and V (1) are there
    full[s]    (1)      TMA -> all: Q, dO and their statistics of slot s are there
A slot is filled again for step j + 1 behind a barrier of the block in step j, before which every
thread has waited for its products of step j - 1. That barrier stands between them and dS^T of step
j as well; a second one between dS^T and the dQ that reads it from the other warpgroup.
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

from tileloom.device.compat import thread_barrier, tma_load, tma_store
from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.device.tma import tma_reduce_add
from tileloom.ops.attention.pieces_blocks_sm90_bwd import block_of
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    clear_outside,
    columns_of,
    following,
    fragment_order,
    mask_transposed,
    masked_rows,
)
from tileloom.ops.attention.pieces_order_sm90 import program_in_turn

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(128)


@gluon.jit
def _load(descs, smem, full, slot, batch, head, row, line):
    """Bring Q, dO and their statistics of a step into a slot."""
    q_desc, rest_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, rest_smem, do_smem, lse_smem, delta_smem = smem
    q_bytes: gl.constexpr = q_desc.block_type.nbytes + rest_desc.block_type.nbytes
    mbarrier.expect(full.index(slot), q_bytes + do_desc.block_type.nbytes + 8 * ROWS)
    tma_load(q_desc, [batch, head, row, 0], full.index(slot), q_smem.index(slot))
    tma_load(rest_desc, [batch, head, row, 128], full.index(slot), rest_smem.index(slot))
    tma_load(lse_desc, [line], full.index(slot), lse_smem.index(slot))
    tma_load(do_desc, [batch, head, row, 0], full.index(slot), do_smem.index(slot))
    tma_load(delta_desc, [line], full.index(slot), delta_smem.index(slot))


@gluon.jit
def _store_rows(ptr, row_stride, x, key, keys, head_dim_8):
    """Write 128 rows from shared memory, but for those before row 0 and from `keys` on.

    Not from registers as `store_registers`: all are taken. Stride and head dim come in units of 8
    elements.
    """
    LANES: gl.constexpr = x.type.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [8, 1], [1, 0])
    c = gl.expand_dims(gl.arange(0, x.type.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    for chunk in gl.static_range(4):
        i = key + chunk * 32 + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
        at = gl.expand_dims(i.to(gl.int64) * row_stride * 8, 1) + c
        shown = gl.expand_dims((i >= 0) & (i < keys), 1) & (c < head_dim_8 * 8)
        gl.store(ptr + at, x.slice(chunk * 32, 32, 0).load(LAYOUT), mask=shown)


INT32_ARGUMENTS = (
    "heads_q", "heads_kv", "group", "len_q", "len_k", "padded_q", "key_blocks",
    "left_top", "right_top", "left_bottom", "right_bottom", "heads_a_round", "head_dim_8",
    "head_dim_v_8", "sequences", "total_q", "total_k", "dk_h", "dk_l", "dv_h", "dv_l",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", *INT32_ARGUMENTS])
def attention_bwd_192_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc,
    dk_rest_desc, dv_desc, dq_desc, dq_rest_desc, lengths_ptr,
    scale, heads_q, heads_kv, group, len_q, len_k, padded_q, key_blocks, left_top, right_top,
    left_bottom, right_bottom, cu_q, cu_k, dk_ptr, dv_ptr, heads_a_round, head_dim_8,
    head_dim_v_8, sequences, total_q, total_k, dk_h, dk_l, dv_h, dv_l,
    STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    D_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D_V, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    DQ_REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    A_K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, K_LAYOUT, 2)
    A_V_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, V_LAYOUT, 2)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 128], q_desc.layout)
    q_rest_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, 64], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D_V], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 128], k_desc.layout)
    k_rest_smem = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 64], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D_V], v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [KEYS, ROWS], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(gl.float32, [64, 128], dq_desc.layout)
    dq_rest_smem = gl.allocate_shared_memory(gl.float32, [32, 128], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # nothing above touches global memory
    if not HAS_LENGTHS:
        lengths_ptr = 0
    PACKED: gl.constexpr = cu_q is not None
    packed = ()
    if PACKED:
        packed = (cu_q, cu_k, sequences, total_q, total_k)
    program = program_in_turn(0, key_blocks, heads_a_round, PACKED, False)
    work = (
        heads_q, heads_kv, len_q, len_k, padded_q, key_blocks, heads_a_round, lengths_ptr, left_top,
        right_top, left_bottom, right_bottom, packed, (),
    )  # fmt: skip
    keys_of, rows_of, _order, _batch = block_of(
        program, work, ROWS, KEYS, PACKED, False, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, False
    )
    batch_k, kv_head, key, first, last, keys, end, lo, hi = keys_of
    batch_q, start, stop, missing, line = rows_of
    k_bytes: gl.constexpr = k_desc.block_type.nbytes + k_rest_desc.block_type.nbytes
    mbarrier.expect(kv_full.index(0), k_bytes)
    tma_load(k_desc, [batch_k, kv_head, key, 0], kv_full.index(0), k_smem)
    tma_load(k_rest_desc, [batch_k, kv_head, key, 128], kv_full.index(0), k_rest_smem)
    mbarrier.expect(kv_full.index(1), v_desc.block_type.nbytes)
    tma_load(v_desc, [batch_k, kv_head, key, 0], kv_full.index(1), v_smem)
    descs = (q_desc, q_rest_desc, do_desc, lse_desc, delta_desc)
    smem = (q_smem, q_rest_smem, do_smem, lse_smem, delta_smem)
    head = kv_head * group
    _load(descs, smem, full, 0, batch_q, head, start - missing, line)
    steps = (stop - start) // ROWS * group
    # Without it the path of no step merges zeros with a wgmma in flight, and ptxas serialises all.
    gl.assume(steps > 0)
    c = scale * LOG2E
    zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
    dq_zero = gl.zeros([ROWS, 128], gl.float32, DQ_LAYOUT)
    dq_rest_zero = gl.zeros([ROWS, 64], gl.float32, DQ_REST_LAYOUT)
    dk = warpgroup_mma_init(gl.zeros([KEYS, 128], gl.float32, K_LAYOUT))
    dk_rest = warpgroup_mma_init(zero)
    dv = warpgroup_mma_init(gl.zeros([KEYS, D_V], gl.float32, V_LAYOUT))
    k = k_smem.reshape([KEYS, 128])
    k_rest = k_rest_smem.reshape([KEYS, 64])
    v = v_smem.reshape([KEYS, D_V])
    below, above = masked_rows(key, end, lo, hi, ROWS, HAS_LEFT, HAS_RIGHT)
    below_last, _above = masked_rows(key + 64, end, lo, hi, ROWS, HAS_LEFT, HAS_RIGHT)
    below = gl.maximum(below, below_last)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    if PACKED or HAS_LENGTHS or HAS_LEFT or HAS_RIGHT:
        if (key < first) | (key + KEYS > last):
            clear_outside(k, key, first, last)
            clear_outside(k_rest, key, first, last)
            clear_outside(v, key, first, last)
    row = start
    for j in range(steps):
        slot, phase = slot_of(j, STAGES)
        q = q_smem.index(slot).reshape([ROWS, 128])
        q_rest = q_rest_smem.index(slot).reshape([ROWS, 64])
        do = do_smem.index(slot).reshape([ROWS, D_V])
        mbarrier.wait(full.index(slot), phase)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(k_rest, q_rest.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        thread_barrier()
        next_row, next_line = following(row, line, start, stop, padded_q, ROWS)
        if j + 1 < steps:
            head += (next_row != row + ROWS).to(gl.int32)
            _load(descs, smem, full, (j + 1) % STAGES, batch_q, head, next_row - missing, next_line)
        x = warpgroup_mma_wait(1, deps=[s])
        if (row < below) | (row > above):
            x = mask_transposed(x, key, row, end, lo, hi, HAS_LEFT, HAS_RIGHT)
        p = gl.exp2(gl.fma(x, c, columns_of(lse_smem.index(slot), S_LAYOUT)))
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp + columns_of(delta_smem.index(slot), S_LAYOUT))).to(dtype)
        p_half = gl.convert_layout(p.to(dtype), A_V_LAYOUT, assert_trivial=True)
        ds_smem.store(ds)
        fence_async_shared()
        dv = warpgroup_mma(p_half, do, dv, is_async=True)
        thread_barrier()
        ds_tile = ds_smem.permute((1, 0))
        dq = warpgroup_mma(ds_tile, k, dq_zero, use_acc=False, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        dv = warpgroup_mma_init(dv)
        dq_rest = warpgroup_mma(ds_tile, k_rest, dq_rest_zero, use_acc=False, is_async=True)
        ds_half = gl.convert_layout(ds, A_K_LAYOUT, assert_trivial=True)
        ds_rest = gl.convert_layout(ds, A_LAYOUT, assert_trivial=True)
        dk = warpgroup_mma(ds_half, q, dk, is_async=True)
        dk_rest = warpgroup_mma(ds_rest, q_rest, dk_rest, is_async=True)
        dq, dq_rest, dk, dk_rest = warpgroup_mma_wait(2, deps=[dq, dq_rest, dk, dk_rest])
        tma.store_wait(0)
        dq_smem.store(fragment_order(dq))
        dq_rest_smem.store(fragment_order(dq_rest))
        fence_async_shared()
        buffer_line = line // 64 * 96
        tma_reduce_add(dq_desc, [buffer_line, 0], dq_smem)
        tma_reduce_add(dq_rest_desc, [buffer_line + 64, 0], dq_rest_smem)
        dk, dk_rest = warpgroup_mma_wait(0, deps=[dk, dk_rest])
        dk = warpgroup_mma_init(dk)
        dk_rest = warpgroup_mma_init(dk_rest)
        row = next_row
        line = next_line
    dk, dk_rest, dv = warpgroup_mma_wait(0, deps=[dk, dk_rest, dv])
    v_smem.store(dv.to(dtype).reshape([1, 1, KEYS, D_V]))
    k_smem.store((dk * scale).to(dtype).reshape([1, 1, KEYS, 128]))
    k_rest_smem.store((dk_rest * scale).to(dtype).reshape([1, 1, KEYS, 64]))
    fence_async_shared()
    is_inside = True
    if PACKED:
        is_inside = key >= 0  # TMA stores nothing that begins before row 0
        if key < 0:
            dv_ptr += (batch_k.to(gl.int64) * dv_l + kv_head.to(gl.int64) * dv_h) * 8
            dk_ptr += (batch_k.to(gl.int64) * dk_l + kv_head.to(gl.int64) * dk_h) * 8
            _store_rows(dv_ptr, dv_l, v, key, keys, head_dim_v_8)
            _store_rows(dk_ptr, dk_l, k, key, keys, head_dim_8)
            _store_rows(dk_ptr + 128, dk_l, k_rest, key, keys, head_dim_8 - 16)
    if is_inside:
        tma_store(dv_desc, [batch_k, kv_head, key, 0], v_smem)
        tma_store(dk_desc, [batch_k, kv_head, key, 0], k_smem)
        tma_store(dk_rest_desc, [batch_k, kv_head, key, 128], k_rest_smem)
    tma.store_wait(0)
