"""Attention forward for Hopper (sm_90a) in Gluon.

    S = Q K^T;  m = max(m, rowmax(S) * c);  P = exp2(S * c - m);  l = l * alpha + rowsum(P)
    O = O * alpha + P V,  alpha = exp2(m_old - m),  c = scale * log2(e);   LSE = (m + log2 l) * ln 2

Picture. Persistent blocks, one an SM, take tiles of 64 * CONSUMERS query rows of one head. One
producer warp loads by TMA; each consumer warpgroup owns 64 rows, holds S, P and O in registers, and
runs the softmax of key block j while P V of block j - 1 is on the tensor cores. Tiles of equal
length are dealt round robin; where a diagonal or lengths make them unequal, the producer draws the
next tile from a counter in global memory and mails its number to the consumers.

    keys:            start .................................. end
    with a band:   [ n-1 ][ n-2 ] ...            [ 1 ][ 0 ]       <- from the diagonal leftwards
    without:       [  0  ][  1  ] ...        [ n-2 ][ n-1 ]       <- from the ragged end rightwards

Key blocks are laid from the right end of what the tile may see, so that no block reaches past it:
the keys behind a length or a diagonal are never loaded. The leftmost block may begin before key 0;
TMA fills those rows with zeros. Only a left window bound can leave hidden keys in a tile, in the
leftmost block; those rows of V are cleared in shared memory (`clear_hidden`).

Packed sequences: tiles are laid from the right end of each sequence as well; the first row may be
negative, where TMA loads zeros (`pieces_packed.py`) and O leaves from registers. The producer finds
the tiles that have rows, and mails the first one too.

Bytes moved: Q and O once, K and V once for each tile (from L2 for all but the first tile).

Shared memory: Q [CONSUMERS, 64, D], twice with STORE_TMA, and a ring of 2 * STAGES blocks
[BLOCK_N, D] that holds K0, V0, K1, V1, ... With STORE_TMA, O leaves through Q's own rows while the
next tile's Q arrives in the other buffer; without (D = 256: no room for two), it leaves straight
from registers, and Q is free after the last Q K^T.

Who waits for whom (mbarriers, by phase; counts in brackets):
    q_full[b, w]  (1)                 producer's TMA -> consumer w: its 64 rows of Q are there
    q_empty[b, w] (128)               consumer w -> producer: these rows of Q may be overwritten
    ring_full[s]  (1)                 producer's TMA -> consumers: slot s is filled
    ring_empty[s] (128 * CONSUMERS)   every consumer thread -> producer: slot s may be filled again
    mail_full[i]  (1)                 producer -> consumers: the number of the next tile is there
    mail_empty[i] (128 * CONSUMERS)   every consumer thread -> producer: it has been read
Named barriers 8 + w (256): the turns. Warpgroup w issues its wgmmas only after warpgroup w - 1 has
issued its own, so that one computes its softmax while another uses the tensor cores.
Named barrier 12 (128 * CONSUMERS): `clear_hidden` is done in all consumers.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.device.barriers import arrive_each_thread, named_barrier_arrive
from tileloom.device.compat import tma_load
from tileloom.ops.attention.config import GluonSm90Config
from tileloom.ops.attention.pieces_gluon_sm90 import (
    TURN,
    clear_hidden,
    column_of,
    live_tile,
    mask,
    range_of,
    row_sum,
    rows_of_tile,
    slot_of,
    softmax,
    step,
    store_registers,
    store_shared,
    turn_begin,
    turn_end,
)
from tileloom.ops.attention.problem import AttentionProblem

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def next_tile(tile, count, mail, mail_full, mail_empty, DYNAMIC: gl.constexpr):
    """The tile that follows, as a consumer learns it: by mail from the producer, or by counting."""
    if DYNAMIC:
        slot = count & 1
        mbarrier.wait(mail_full.index(slot), (count >> 1) & 1)
        tile = gl.max(mail.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        arrive_each_thread(mail_empty.index(slot))
        return tile
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def mail_tile(tile, count, mail, mail_full, mail_empty):
    """Mail the next tile to the consumers; the producer's side."""
    slot = count & 1
    mbarrier.wait(mail_empty.index(slot), ((count >> 1) & 1) ^ 1)
    mail.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(mail_full.index(slot), count=1)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, counter, q_smem, ring, mail, q_full, q_empty, ring_full, ring_empty,
    mail_full, mail_empty, lengths_ptr, heads_q, group, len_q, len_k, tiles, heads, section,
    left_top, right_top, left_bottom, right_bottom, packed, CONSUMERS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    DYNAMIC: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = ring.type.shape[0]
    BLOCK_N: gl.constexpr = ring.type.shape[3]
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    Q_BUFFERS: gl.constexpr = q_smem.type.shape[0] // CONSUMERS
    tile = live_tile(
        gl.program_id(0), counter, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M,
        HAS_RIGHT, PACKED,
    )  # fmt: skip
    if PACKED:
        mail_tile(tile, 0, mail, mail_full, mail_empty)
    count = 0  # tiles done
    item = 0  # blocks loaded into the ring
    while tile < tiles * heads:
        batch, head, row, batch_q, batch_k, rows, keys, _ = rows_of_tile(
            tile, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M, HAS_RIGHT, PACKED
        )
        kv_head = head // group
        start, end, _, _ = range_of(
            lengths_ptr, batch, row, rows, keys, left_top, right_top, left_bottom, right_bottom,
            BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        following = tile + gl.num_programs(0)
        blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
        for j in range(blocks):
            k_slot, k_phase = slot_of(item, SLOTS)
            v_slot, v_phase = slot_of(item + 1, SLOTS)
            col = column_of(j, blocks, end, BLOCK_N, HAS_LEFT or HAS_RIGHT)
            mbarrier.wait(ring_empty.index(k_slot), k_phase ^ 1)
            mbarrier.expect(ring_full.index(k_slot), k_desc.block_type.nbytes)
            tma_load(
                k_desc, [batch_k, kv_head, col, 0], ring_full.index(k_slot), ring.index(k_slot)
            )
            if j == 0:
                for w in gl.static_range(CONSUMERS):
                    buffer = (count % Q_BUFFERS) * CONSUMERS + w
                    mbarrier.wait(q_empty.index(buffer), ((count // Q_BUFFERS) & 1) ^ 1)
                    mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
                    at = [batch_q, head, row + 64 * w, 0]
                    tma_load(q_desc, at, q_full.index(buffer), q_smem.index(buffer))
            mbarrier.wait(ring_empty.index(v_slot), v_phase ^ 1)
            mbarrier.expect(ring_full.index(v_slot), v_desc.block_type.nbytes)
            tma_load(
                v_desc, [batch_k, kv_head, col, 0], ring_full.index(v_slot), ring.index(v_slot)
            )
            if DYNAMIC:
                if j == 0:  # behind the first loads, which hide the latency of the atomic
                    following = live_tile(
                        gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0), counter,
                        tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M, HAS_RIGHT,
                        PACKED,
                    )  # fmt: skip
                    mail_tile(following, count + PACKED, mail, mail_full, mail_empty)
            item += 2
        count += 1
        tile = following


@gluon.jit
def _consumer(
    WG: gl.constexpr, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty, ring_full,
    ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q, len_q, len_k, head_dim_8,
    tiles, heads, section, left_top, right_top, left_bottom, right_bottom, o_batch_stride,
    o_head_stride, o_row_stride, packed, CONSUMERS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, DYNAMIC: gl.constexpr, EVEN: gl.constexpr,
    STORE_TMA: gl.constexpr, PIN: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = ring.type.shape[0]
    BLOCK_N: gl.constexpr = ring.type.shape[3]
    D: gl.constexpr = ring.type.shape[4]
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    Q_BUFFERS: gl.constexpr = q_smem.type.shape[0] // CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    EDGE: gl.constexpr = not EVEN
    BAND: gl.constexpr = HAS_RIGHT or HAS_LEFT
    LEFT_LOOP: gl.constexpr = HAS_LEFT or (HAS_RIGHT and EDGE)
    if WG == CONSUMERS - 1:
        named_barrier_arrive(TURN, 256)
    tile = gl.program_id(0)
    if PACKED:
        tile = next_tile(tile, 0, mail, mail_full, mail_empty, DYNAMIC)
    count = 0
    base = 0  # item of this tile's first K
    while tile < tiles * heads:
        batch, head, tile_row, batch_q, _, rows, keys, line = rows_of_tile(
            tile, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M, HAS_RIGHT, PACKED
        )
        start, end, lo, hi = range_of(
            lengths_ptr, batch, tile_row, rows, keys, left_top, right_top, left_bottom,
            right_bottom, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        row = tile_row + 64 * WG
        blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
        # Masked: block 0, 1 .. clear - 1 (the right bound), edge .. blocks - 1 (the left bound).
        clear = 1
        if HAS_RIGHT:
            clear = gl.minimum(gl.maximum(gl.cdiv(end - 1 - row - hi, BLOCK_N), 1), blocks)
        edge = blocks
        if LEFT_LOOP:
            first = 0
            if HAS_LEFT:
                first = gl.maximum(row + 63 + lo, 0)
            edge = gl.minimum(gl.maximum((end - first) // BLOCK_N, clear), blocks)

        buffer = (count % Q_BUFFERS) * CONSUMERS + WG
        q = q_smem.index(buffer).reshape([64, D])
        slot, phase = slot_of(base, SLOTS)
        mbarrier.wait(q_full.index(buffer), (count // Q_BUFFERS) & 1)
        mbarrier.wait(ring_full.index(slot), phase)
        turn_begin(WG)
        k = ring.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
        zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        turn_end(WG, CONSUMERS)
        if STORE_TMA:
            if count > 0:  # the last tile's O has left its Q buffer, while Q K^T runs
                tma.store_wait(0)
                arrive_each_thread(q_empty.index(((count - 1) % Q_BUFFERS) * CONSUMERS + WG))
        s = warpgroup_mma_wait(0, deps=[s])
        arrive_each_thread(ring_empty.index(slot))
        if BAND or EDGE:
            col = column_of(0, blocks, end, BLOCK_N, BAND)
            s = mask(s, row, col, lo, hi, HAS_RIGHT, HAS_LEFT, EDGE)
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        total = row_sum(zero)
        p, _, m, total = softmax(s, m, total, scale, True)
        p = gl.convert_layout(p.to(ring.dtype), P_LAYOUT, assert_trivial=True)
        acc = gl.zeros([64, D], gl.float32, O_LAYOUT)

        if HAS_RIGHT:
            for j in range(1, clear):
                col = column_of(j, blocks, end, BLOCK_N, BAND)
                p, acc, m, total = step(
                    q, ring, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                    lo, hi, scale, WG, CONSUMERS, True, HAS_LEFT, EDGE, PIN,
                )  # fmt: skip
        for j in range(clear, edge):
            col = column_of(j, blocks, end, BLOCK_N, BAND)
            p, acc, m, total = step(
                q, ring, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                lo, hi, scale, WG, CONSUMERS, False, False, False, PIN,
            )  # fmt: skip
        if LEFT_LOOP:
            for j in range(edge, blocks):
                col = column_of(j, blocks, end, BLOCK_N, BAND)
                p, acc, m, total = step(
                    q, ring, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                    lo, hi, scale, WG, CONSUMERS, False, HAS_LEFT, EDGE, PIN,
                )  # fmt: skip
        base += 2 * blocks
        if not STORE_TMA:
            arrive_each_thread(q_empty.index(buffer))

        slot, phase = slot_of(base - 1, SLOTS)
        mbarrier.wait(ring_full.index(slot), phase)
        v = ring.index(slot).reshape([BLOCK_N, D])
        if HAS_LEFT:
            hidden = start - (end - blocks * BLOCK_N)
            if (start > 0) & (hidden > 0):
                clear_hidden(v, hidden, WG, CONSUMERS)
        turn_begin(WG)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        turn_end(WG, CONSUMERS)
        sums = gl.convert_layout(gl.sum(total, 1), ROWS)
        is_empty = sums == 0.0
        lse = gl.where(is_empty, float("-inf"), (m + gl.log2(sums)) * LN2)
        i = row + gl.arange(0, 64, ROWS)
        if PACKED:
            gl.store(lse_ptr + line + i.to(gl.int64), lse, mask=(i >= 0) & (i < rows))
        else:
            lse_row = lse_ptr + (batch.to(gl.int64) * heads_q + head) * len_q
            gl.store(lse_row + i.to(gl.int64), lse, mask=i < len_q)
        inverse = 1.0 / gl.where(is_empty, 1.0, sums)
        acc = warpgroup_mma_wait(0, deps=[acc])
        arrive_each_thread(ring_empty.index(slot))
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
        o = acc.to(ring.dtype)
        at = (batch_q.to(gl.int64) * o_batch_stride + head.to(gl.int64) * o_head_stride) * 8
        if STORE_TMA:
            if PACKED:
                if row >= 0:  # TMA stores nothing that begins before row 0
                    store_shared(o_desc, q_smem.index(buffer), o, batch_q, head, row)
                else:
                    store_registers(o_ptr + at, o_row_stride, o, row, rows, head_dim_8)
            else:
                store_shared(o_desc, q_smem.index(buffer), o, batch_q, head, row)
        else:
            store_registers(o_ptr + at, o_row_stride, o, row, rows, head_dim_8)
        tile = next_tile(tile, count + PACKED, mail, mail_full, mail_empty, DYNAMIC)
        count += 1
    if WG == 0:
        turn_begin(WG)  # nobody is left waiting for the last turn that was passed on
    if STORE_TMA:
        tma.store_wait(0)


INT32_ARGUMENTS = (
    "heads_q", "group", "len_q", "len_k", "head_dim_8", "tiles", "heads", "section",
    "left_top", "right_top", "left_bottom", "right_bottom",
    "o_batch_stride", "o_head_stride", "o_row_stride", "sequences", "total_q", "total_k",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", *INT32_ARGUMENTS])
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, lengths_ptr, counter, scale, heads_q, group,
    len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top, left_bottom,
    right_bottom, o_batch_stride, o_head_stride, o_row_stride, cu_q, cu_k, sequences, total_q,
    total_k, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, EVEN: gl.constexpr, STORE_TMA: gl.constexpr,
    PIN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    PACKED: gl.constexpr = cu_q is not None
    DYNAMIC: gl.constexpr = HAS_RIGHT or HAS_LENGTHS or PACKED
    Q_BUFFERS: gl.constexpr = 2 if STORE_TMA else 1
    dtype: gl.constexpr = q_desc.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    THREADS: gl.constexpr = 128 * CONSUMERS
    q_smem = gl.allocate_shared_memory(dtype, [Q_BUFFERS * CONSUMERS, 1, 1, 64, D], q_desc.layout)
    ring = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], bars)
    ring_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], bars)
    ring_empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], bars)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for b in gl.static_range(Q_BUFFERS * CONSUMERS):
        mbarrier.init(q_full.index(b), count=1)
        mbarrier.init(q_empty.index(b), count=128)
    for b in gl.static_range(2 * STAGES):
        mbarrier.init(ring_full.index(b), count=1)
        mbarrier.init(ring_empty.index(b), count=THREADS)
    for b in gl.static_range(2):
        mbarrier.init(mail_full.index(b), count=1)
        mbarrier.init(mail_empty.index(b), count=THREADS)
    fence_async_shared()
    if not STORE_TMA:
        o_desc = q_desc  # never used; a partition takes no None
    if not HAS_LENGTHS:
        lengths_ptr = lse_ptr  # never used
    if not DYNAMIC:
        counter = lse_ptr  # never used
    packed = ()
    if PACKED:
        packed = (cu_q, cu_k, sequences, total_q, total_k)
    # The tuples stand in place: held in a variable, their constexprs would become run-time values.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q,
                         len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top,
                         left_bottom, right_bottom, o_batch_stride, o_head_stride, o_row_stride,
                         packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN,
                         STORE_TMA, PIN, PACKED)),
            (_consumer, (1, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q,
                         len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top,
                         left_bottom, right_bottom, o_batch_stride, o_head_stride, o_row_stride,
                         packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN,
                         STORE_TMA, PIN, PACKED)),
            (_producer, (q_desc, k_desc, v_desc, counter, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, heads_q, group,
                         len_q, len_k, tiles, heads, section, left_top, right_top, left_bottom,
                         right_bottom, packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
                         DYNAMIC, PACKED)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (0, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q,
                         len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top,
                         left_bottom, right_bottom, o_batch_stride, o_head_stride, o_row_stride,
                         packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN,
                         STORE_TMA, PIN, PACKED)),
            (_consumer, (1, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q,
                         len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top,
                         left_bottom, right_bottom, o_batch_stride, o_head_stride, o_row_stride,
                         packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN,
                         STORE_TMA, PIN, PACKED)),
            (_consumer, (2, o_desc, o_ptr, lse_ptr, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, scale, heads_q,
                         len_q, len_k, head_dim_8, tiles, heads, section, left_top, right_top,
                         left_bottom, right_bottom, o_batch_stride, o_head_stride, o_row_stride,
                         packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN,
                         STORE_TMA, PIN, PACKED)),
            (_producer, (q_desc, k_desc, v_desc, counter, q_smem, ring, mail, q_full, q_empty,
                         ring_full, ring_empty, mail_full, mail_empty, lengths_ptr, heads_q, group,
                         len_q, len_k, tiles, heads, section, left_top, right_top, left_bottom,
                         right_bottom, packed, CONSUMERS, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
                         DYNAMIC, PACKED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip


def layout_arguments(head_dim: int) -> dict[str, int]:
    """Shared-memory layout of a tile `[1, 1, rows, head_dim]`: the widest swizzle that fits."""
    swizzle = min(128, 2 * head_dim)
    return {"swizzle_byte_width": swizzle, "element_bitwidth": 16, "rank": 4}


@functools.cache
def tile_layout(head_dim: int) -> gl.NVMMASharedLayout:
    """The layout of `layout_arguments`, made once."""
    return gl.NVMMASharedLayout(**layout_arguments(head_dim))


def _descriptor(
    x: torch.Tensor, rows: int, head_dim: int, is_packed: bool = False
) -> TensorDescriptor:
    """A TMA descriptor over the whole tensor `[B, H, L, D]`, for boxes `[1, 1, rows, head_dim]`.

    Of packed sequences, `[1, H, T, D]`, the first dimension is a sequence's first row.
    """
    # The stride of a dimension of size 1 is never used, but the driver checks it.
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride())]
    box = [1, 1, rows, head_dim]
    layout = tile_layout(head_dim)
    if not is_packed:
        return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)
    shape = [x.shape[2], *x.shape[1:]]
    return TensorDescriptor(x, shape, [strides[2], *strides[1:], 1], box, layout)


def is_even(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether no tile's key range begins inside a block, known on the host."""
    if problem.packed or problem.has_key_lengths or problem.band.has_left:
        return False
    if not problem.band.has_right:
        return problem.len_k % config.block_n == 0
    _, right_top, _, right_bottom = problem.band.clamped(problem.len_q, problem.len_k)
    hi = min(right_top, right_bottom + problem.len_k - problem.len_q)
    sizes = (problem.len_q, problem.len_k, config.block_m, hi)
    return hi >= 0 and all(n % config.block_n == 0 for n in sizes)


def is_dynamic(problem: AttentionProblem) -> bool:
    """Whether tiles differ in length, so that they are drawn from a counter."""
    return problem.band.has_right or problem.has_key_lengths or problem.packed is not None


def constants(problem: AttentionProblem, config: GluonSm90Config) -> dict[str, object]:
    """The kernel's compile-time parameters for a problem."""
    return {
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "HAS_LENGTHS": problem.has_key_lengths,
        "HAS_LEFT": problem.band.has_left,
        "HAS_RIGHT": problem.band.has_right,
        "EVEN": is_even(problem, config),
        "STORE_TMA": config.store == "tma",
        "PIN": config.pin,
        "REGISTERS": config.registers,
    }
