"""The rings of K and V in the Hopper attention forward: memory, barriers, loads, Q K^T from them.

`kernel_gluon_sm90_fwd.py` explains the roles and the barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from tileloom.device.barriers import arrive_each_thread
from tileloom.device.compat import tma_load
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of, turn_begin, turn_end

SLOT = gl.constexpr(8)


@gluon.jit
def allocate_rings(k_desc, v_desc, STAGES: gl.constexpr, QK_TILES: gl.constexpr):
    """The rings of K and of V: one and the same, if their rows are as wide."""
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    D_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    if QK_TILES == 1 and D == D_V:
        ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
        return ring, ring
    else:
        tiles: gl.constexpr = STAGES * QK_TILES
        k_ring = gl.allocate_shared_memory(dtype, [tiles, 1, 1, BLOCK_N, D], k_desc.layout)
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D_V], v_desc.layout)
        return k_ring, v_ring


@gluon.jit
def allocate_barriers(
    Q_BUFFERS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The mbarriers of Q, of the rings and of the mail: full and empty each, as the kernel says."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    THREADS: gl.constexpr = 128 * CONSUMERS
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for b in gl.static_range(Q_BUFFERS * CONSUMERS):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=128)
    for b in gl.static_range(STAGES):
        mbarrier.init(k_full.index(b), count=1)
        mbarrier.init(v_full.index(b), count=1)
        mbarrier.init(k_empty.index(b), count=THREADS)
        mbarrier.init(v_empty.index(b), count=THREADS)
    for b in gl.static_range(2):
        mbarrier.init(mail_full.index(b), count=1)
        mbarrier.init(mail_empty.index(b), count=THREADS)
    return q_full, q_empty, (k_full, v_full), (k_empty, v_empty), mail_full, mail_empty


@gluon.constexpr_function
def _slot_ptx(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def release(ring_empty, slot, IS_V: gl.constexpr, CONSUMERS: gl.constexpr):
    """Hand a slot back; the consumers' side.

    With two stages there are named barriers enough for the four slots. One instruction a warp
    arrives there; at an mbarrier each thread does, in shared memory, where the tensor cores read
    K and V (H200, head dim 128, 16k, full: 690 TFLOP/s there, 714 here).
    """
    if ring_empty[0].type.shape[0] == 2:
        text: gl.constexpr = _slot_ptx("arrive", 128 * CONSUMERS + 32)
        gl.inline_asm_elementwise(text, "=r,r", [SLOT + slot], gl.int32, False, 1)
    else:
        arrive_each_thread(ring_empty[IS_V].index(slot // 2))


@gluon.jit
def await_slot(ring_empty, item, slot, phase, IS_V: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait until all consumers have handed a slot back; the producer's side."""
    STAGES: gl.constexpr = ring_empty[0].type.shape[0]
    if STAGES == 2:
        if item >= 2 * STAGES:
            text: gl.constexpr = _slot_ptx("sync", 128 * CONSUMERS + 32)
            gl.inline_asm_elementwise(text, "=r,r", [SLOT + slot], gl.int32, False, 1)
    else:
        mbarrier.wait(ring_empty[IS_V].index(slot // 2), phase ^ 1)


@gluon.jit
def skip_blocks(
    ring_full, ring_empty, item, blocks, WG: gl.constexpr, CONSUMERS: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Hand back K and V of a tile's first blocks, and the turns, without a look at them.

    A slot is waited for first: handed back before it is full, it could be handed back twice.
    """
    SLOTS: gl.constexpr = 2 * ring_full[0].type.shape[0]
    for j in range(blocks):
        turn_begin(WG, TURNS)
        turn_end(WG, CONSUMERS, TURNS)
        for v in gl.static_range(2):
            slot, phase = slot_of(item + 2 * j + v, SLOTS)
            mbarrier.wait(ring_full[v].index(slot // 2), phase)
            release(ring_empty, slot, v, CONSUMERS)


@gluon.jit
def place_of(rings, slot, SLOTS: gl.constexpr):
    """Where a slot is in its ring: K has the even slots, V the odd ones."""
    if rings[1].type.shape[0] == SLOTS:
        return slot
    else:
        return slot // 2


@gluon.jit
def keys_of(rings, slot, tile, SLOTS: gl.constexpr):
    """A tile of K in a slot, `[keys, columns]`."""
    TILES: gl.constexpr = rings[0].type.shape[0] // rings[1].type.shape[0]
    BLOCK: gl.constexpr = [rings[0].type.shape[3], rings[0].type.shape[4]]
    return rings[0].index(place_of(rings, slot, SLOTS) * TILES + tile).reshape(BLOCK)


@gluon.jit
def values_of(rings, slot, SLOTS: gl.constexpr):
    """V in a slot, `[keys, columns]`."""
    BLOCK: gl.constexpr = [rings[1].type.shape[3], rings[1].type.shape[4]]
    return rings[1].index(place_of(rings, slot, SLOTS)).reshape(BLOCK)


@gluon.jit
def load_rows(desc, at, full, smem, first, TILES: gl.constexpr):
    """Load rows of Q, K or V by TMA, one tile of columns after the other."""
    batch, head, row = at
    for tile in gl.static_range(TILES):
        column = tile * desc.block_type.shape[3]
        tma_load(desc, [batch, head, row, column], full, smem.index(first + tile))


@gluon.jit
def held_columns(q_smem, buffer, HELD: gl.constexpr, S_LAYOUT: gl.constexpr):
    """The first HELD columns of a warpgroup's rows of Q in registers, or nothing."""
    if HELD > 0:
        rows = q_smem.index(buffer).reshape([64, q_smem.type.shape[4]])
        return rows.slice(0, HELD, 1).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        return ()


@gluon.jit
def issue_scores(q, rings, slot, SLOTS: gl.constexpr, zero, HELD: gl.constexpr):
    """Issue S = Q K^T for a warpgroup's rows and the keys of a slot."""
    q_smem, buffer, held = q
    TILES: gl.constexpr = rings[0].type.shape[0] // rings[1].type.shape[0]
    D: gl.constexpr = q_smem.type.shape[4]
    s = zero
    if HELD > 0:
        keys = keys_of(rings, slot, 0, SLOTS)
        rows = q_smem.index(buffer).reshape([64, D])
        part = keys.slice(0, HELD, 1).permute((1, 0))
        s = warpgroup_mma(held, part, s, use_acc=False, is_async=True)
        HALF: gl.constexpr = D // 2
        if HELD < HALF:
            part = keys.slice(HELD, HELD, 1).permute((1, 0))
            s = warpgroup_mma(rows.slice(HELD, HELD, 1), part, s, is_async=True)
        if HELD < D:
            part = keys.slice(HALF, HALF, 1).permute((1, 0))
            s = warpgroup_mma(rows.slice(HALF, HALF, 1), part, s, is_async=True)
    else:
        for tile in gl.static_range(TILES):
            rows = q_smem.index(buffer * TILES + tile).reshape([64, D])
            part = keys_of(rings, slot, tile, SLOTS).permute((1, 0))
            s = warpgroup_mma(rows, part, s, use_acc=tile > 0, is_async=True)
    return s
