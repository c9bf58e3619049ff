"""Attention forward for Hopper (sm_90a) in Gluon.

    S = Q K^T;  m = max(m, rowmax(S) * c);  P = exp2(S * c - m);  l = l * alpha + rowsum(P)
    O = O * alpha + P V,  alpha = exp2(m_old - m),  c = scale * log2(e);   LSE = (m + log2 l) * ln 2

With LAZY, m stays until it would grow by 8: O is hardly ever multiplied.

Picture. Persistent blocks, one an SM, take tiles of 64 * CONSUMERS query rows of one head. One
producer warp loads by TMA; each consumer warpgroup owns 64 rows, holds S, P and O in registers, and
runs the softmax of key block j while P V of block j - 1 is on the tensor cores. Tiles of equal
length are dealt round robin; where they are unequal, the producer draws the next one from a
counter in global memory, LATE or early in a tile, and mails its number to the consumers.

    keys:            start .................................. end
    with a band:   [ n-1 ][ n-2 ] ...            [ 1 ][ 0 ]       <- from the diagonal leftwards
    without:       [  0  ][  1  ] ...        [ n-2 ][ n-1 ]       <- from the ragged end rightwards

Key blocks are laid from the right end of what the tile may see, so that no block reaches past it:
the keys behind a length or a diagonal are never loaded. The leftmost block may begin before key 0;
TMA fills those rows with zeros. Only a left window bound can leave hidden keys in a tile, in the
leftmost block; those rows of V are cleared in shared memory (`clear_hidden`). LATE: a warpgroup
hands back unseen the blocks behind the diagonal of its own rows (`skip_blocks`). ONCE: it meets the
diagonal in the first block that it sees and in no other, and there is no loop for more.

SPREAD: where rows do not fill the tiles of three warpgroups, they are dealt out evenly
(`shares_of`): a short tile has one warpgroup without rows, which hands back all blocks but one.

Packed sequences (`pieces_packed.py`): tiles are laid from each sequence's right end as well. Before
row 0 TMA loads zeros, and O leaves from registers. All tiles are mailed, with their sequences.

Bias and bool mask (`pieces_scores_sm90.py`): one of the two rides through shared memory beside K
and V, or each thread loads what it needs. Such tiles may go round twice, so that all of them are
mailed. Dropout (`pieces_dropout_sm90.py`): P is dropped before P V, its sums before that.

Bytes moved: Q and O once, K and V once for each tile (from L2 for all but the first tile); a bias
or mask once for each head that reads it.

Shared memory: Q [CONSUMERS, 64, D], twice with STORE_TMA, and a ring of 2 * STAGES blocks
[BLOCK_N, D] that holds K0, V0, K1, V1, ... With STORE_TMA, O leaves through Q's own rows while the
next tile's Q arrives in the other buffer; without (D = 256: no room for two), it leaves straight
from registers, and Q is free after the last Q K^T. Where V is not as wide, K and V have rings of
their own, with slots as in one, and rows of Q and K may take QK_TILES tiles: 3 of 64 for D = 192.

Who waits for whom (mbarriers, by phase; counts in brackets):
    q_full[b, w]  (1)                 producer's TMA -> consumer w: its 64 rows of Q are there
    q_empty[b, w] (128)               consumer w -> producer: these rows of Q may be overwritten
    ring_full[v][s] (1)               producer's TMA -> consumers: K (v = 0) or V (1) is in slot s
    ring_empty[v][s] (128 * CONSUMERS) every consumer thread -> producer: it may be filled again
    mail_full[i]  (1)                 producer -> consumers: the number of the next tile is there
    mail_empty[i] (128 * CONSUMERS)   every consumer thread -> producer: it has been read
    ride_full[s, w]  (1)              producer's TMA -> consumer w: its rows of the bias or mask
    ride_empty[s, w] (128)            consumer w -> producer: it has read them
    judged[i]     (128 * CONSUMERS)   every consumer thread -> producer: a tile's O has NaN or not
K and V have mbarriers apart, or Triton would put a barrier of the partition between two waits or
arrivals. With two stages, named barriers 8 + 2 s + v (128 * CONSUMERS + 32) stand for ring_empty.
Named barrier 12 (128 * CONSUMERS): `clear_hidden` or `clear_unseen` is done in all consumers.
Named barriers 13 + w (256): the turns (TURNS). Warpgroup w issues its wgmmas only after warpgroup
w - 1 has issued its own, so that one computes its softmax while another uses the tensor cores.
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
    warpgroup_mma_wait,
)

from tileloom.device.barriers import arrive_each_thread, named_barrier_arrive
from tileloom.device.mail import send
from tileloom.ops.attention.pieces_dropout_sm90 import drop, kept_bits, numbers_of_rows
from tileloom.ops.attention.pieces_gluon_sm90 import (
    TURN,
    clear_hidden,
    column_of,
    cut_blocks,
    first_letter,
    live_tile,
    next_tile,
    opened,
    range_of,
    row_sum,
    rows_of_tile,
    slot_of,
    store_lse,
    store_out,
    store_registers,
    turn_begin,
    turn_end,
    unseen_blocks,
)
from tileloom.ops.attention.pieces_philox import philox_state
from tileloom.ops.attention.pieces_rings_sm90 import (
    allocate_barriers,
    allocate_rings,
    await_slot,
    held_columns,
    issue_scores,
    load_rows,
    place_of,
    release,
    skip_blocks,
    values_of,
)
from tileloom.ops.attention.pieces_scores_sm90 import (
    clear_if_careful,
    following_of,
    given_of,
    judge,
    load_ride,
    scores_of,
)
from tileloom.ops.attention.pieces_step_sm90 import block_softmax, from_pairs, packed_pairs, step


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, counter, smem, work, packed, scores, CONSUMERS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    DYNAMIC: gl.constexpr, PACKED: gl.constexpr, ORDER: gl.constexpr, BIAS_MODE: gl.constexpr,
    MASK_MODE: gl.constexpr, SPREAD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    q_smem, rings, mail, q_full, q_empty, ring_full, ring_empty, mail_full, mail_empty = smem
    (
        lengths_ptr, heads_q, group, len_q, len_k, tiles, heads, section, left_top, right_top,
        left_bottom, right_bottom,
    ) = work  # fmt: skip
    SLOTS: gl.constexpr = 2 * ring_full[0].type.shape[0]
    BLOCK_N: gl.constexpr = rings[0].type.shape[3]
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    Q_BUFFERS: gl.constexpr = q_full.type.shape[0] // CONSUMERS
    TILES: gl.constexpr = q_smem.type.shape[0] // q_full.type.shape[0]
    HIDES: gl.constexpr = BIAS_MODE + MASK_MODE > 0
    RIDES: gl.constexpr = BIAS_MODE == 3 or MASK_MODE == 3
    letter = live_tile(
        gl.program_id(0), counter, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M,
        ORDER, PACKED, SPREAD,
    )  # fmt: skip
    none = first_letter(tiles * heads, PACKED)
    if PACKED:
        send(mail, mail_full, mail_empty, 0, letter)
    count = 0  # tiles done
    item = 0  # blocks loaded into the ring
    if HIDES:
        ride_desc, ride_b, ride_h, ride, ride_full, ride_empty, verdict, judged = scores[:8]
        suspect = none  # the tile before, while its verdict is to come
        fresh = letter  # the next tile that nobody had
    while letter < none:
        # -1 - letter: the tile goes round for the second time.
        place = gl.maximum(letter, -1 - letter) if HIDES else letter
        batch, head, row, batch_q, batch_k, rows, keys, _ = rows_of_tile(
            opened(place, PACKED), tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M,
            ORDER, PACKED, SPREAD,
        )  # fmt: skip
        kv_head = head // group
        start, end, _, _, _ = range_of(
            lengths_ptr, batch, row, rows, keys, tiles, left_top, right_top, left_bottom,
            right_bottom, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, SPREAD,
        )  # fmt: skip
        if not HIDES:
            fresh = letter + gl.num_programs(0)
        elif letter >= 0:
            fresh = letter + gl.num_programs(0)
        blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
        # Behind the first loads, which hide the latency of the atomic, or behind the last: a tile
        # that is drawn early waits for this one to end, while another program may have none.
        drawn = blocks - 1 if LATE else 0
        for j in range(blocks):
            k_slot, k_phase = slot_of(item, SLOTS)
            v_slot, v_phase = slot_of(item + 1, SLOTS)
            col = column_of(j, blocks, end, BLOCK_N, HAS_LEFT or HAS_RIGHT)
            await_slot(ring_empty, item, k_slot, k_phase, 0, CONSUMERS)
            mbarrier.expect(ring_full[0].index(k_slot // 2), TILES * k_desc.block_type.nbytes)
            at, place_k = (batch_k, kv_head, col), place_of(rings, k_slot, SLOTS) * TILES
            load_rows(k_desc, at, ring_full[0].index(k_slot // 2), rings[0], place_k, TILES)
            if j == 0:
                for w in gl.static_range(CONSUMERS):
                    buffer = (count % Q_BUFFERS) * CONSUMERS + w
                    mbarrier.wait(q_empty.index(buffer), ((count // Q_BUFFERS) & 1) ^ 1)
                    mbarrier.expect(q_full.index(buffer), TILES * q_desc.block_type.nbytes)
                    at_q = (batch_q, head, row + 64 * w)
                    load_rows(q_desc, at_q, q_full.index(buffer), q_smem, buffer * TILES, TILES)
            if RIDES:
                load_ride(
                    ride_desc, batch * ride_b, head * ride_h, row, col, item // 2, ride,
                    ride_full, ride_empty, CONSUMERS,
                )  # fmt: skip
            await_slot(ring_empty, item + 1, v_slot, v_phase, 1, CONSUMERS)
            mbarrier.expect(ring_full[1].index(v_slot // 2), v_desc.block_type.nbytes)
            place_v = place_of(rings, v_slot, SLOTS)
            load_rows(v_desc, at, ring_full[1].index(v_slot // 2), rings[1], place_v, 1)
            if DYNAMIC:
                if (j == drawn) & (place == letter):
                    fresh = live_tile(
                        gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0), counter,
                        tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M, ORDER,
                        PACKED, SPREAD,
                    )  # fmt: skip
                    if not HIDES:
                        send(mail, mail_full, mail_empty, count + PACKED, fresh)
            item += 2
        if HIDES:
            letter, suspect = following_of(
                letter, suspect, fresh, none, count, verdict, judged, CONSUMERS
            )
            send(mail, mail_full, mail_empty, count + PACKED, letter)
        else:
            letter = fresh
        count += 1


@gluon.jit
def _consumer(
    WG: gl.constexpr, smem, work, packed, scores, dropout, target, scale, CONSUMERS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    DYNAMIC: gl.constexpr, EVEN: gl.constexpr, STORE_TMA: gl.constexpr, PIN: gl.constexpr,
    TURNS: gl.constexpr, HELD: gl.constexpr, LAZY: gl.constexpr, APART: gl.constexpr,
    ALIGNED: gl.constexpr, ONCE: gl.constexpr, PACKED: gl.constexpr, ORDER: gl.constexpr,
    BIAS_MODE: gl.constexpr, BIAS_VECTOR: gl.constexpr, MASK_MODE: gl.constexpr,
    MASK_VECTOR: gl.constexpr, DROPOUT: gl.constexpr, SPREAD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    q_smem, rings, mail, q_full, q_empty, ring_full, ring_empty, mail_full, mail_empty = smem
    (
        lengths_ptr, heads_q, _group, len_q, len_k, tiles, heads, section, left_top, right_top,
        left_bottom, right_bottom,
    ) = work  # fmt: skip
    o_desc, o_ptr, o_batch_stride, o_head_stride, o_row_stride, lse_ptr, head_dim_8 = target
    SLOTS: gl.constexpr = 2 * ring_full[0].type.shape[0]
    BLOCK_N: gl.constexpr = rings[0].type.shape[3]
    D: gl.constexpr = rings[1].type.shape[4]
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    Q_BUFFERS: gl.constexpr = q_full.type.shape[0] // CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    EDGE: gl.constexpr = not EVEN
    BAND: gl.constexpr = HAS_RIGHT or HAS_LEFT
    CUT_LEFT: gl.constexpr = HAS_LEFT and not APART
    CUT_EDGE: gl.constexpr = EDGE and not ALIGNED
    RIGHT_LOOP: gl.constexpr = HAS_RIGHT and not ONCE
    LEFT_LOOP: gl.constexpr = HAS_LEFT or (HAS_RIGHT and EDGE)
    HIDES: gl.constexpr = BIAS_MODE + MASK_MODE > 0
    BEHIND: gl.constexpr = LATE and 64 * (CONSUMERS - 1 - WG) >= BLOCK_N
    if TURNS and WG == CONSUMERS - 1:
        named_barrier_arrive(TURN, 256)
    letter = gl.program_id(0)
    none = first_letter(tiles * heads, PACKED)
    if PACKED:
        letter = next_tile(letter, 0, mail, mail_full, mail_empty, DYNAMIC)
    count = 0
    base = 0  # item of this tile's first K
    while letter < none:
        place = gl.maximum(letter, -1 - letter) if HIDES else letter
        batch, head, tile_row, batch_q, _, rows, keys, line = rows_of_tile(
            opened(place, PACKED), tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M,
            ORDER, PACKED, SPREAD,
        )  # fmt: skip
        start, end, lo, hi, last = range_of(
            lengths_ptr, batch, tile_row, rows, keys, tiles, left_top, right_top, left_bottom,
            right_bottom, BLOCK_M, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, SPREAD,
        )  # fmt: skip
        row = tile_row + 64 * WG
        blocks = gl.maximum(gl.cdiv(end - start, BLOCK_N), 1)
        begin = 0
        if BEHIND or SPREAD:
            begin = unseen_blocks(row, last, end, hi, blocks, BLOCK_N, BEHIND, SPREAD)
            skip_blocks(ring_full, ring_empty, base, begin, WG, CONSUMERS, TURNS)
        clear, edge = cut_blocks(
            begin, blocks, row, end, lo, hi, BLOCK_N, HAS_LEFT, RIGHT_LOOP, LEFT_LOOP
        )

        buffer = (count % Q_BUFFERS) * CONSUMERS + WG
        slot, phase = slot_of(base + 2 * begin, SLOTS)
        mbarrier.wait(q_full.index(buffer), (count // Q_BUFFERS) & 1)
        q = (q_smem, buffer, held_columns(q_smem, buffer, HELD, S_LAYOUT))
        mbarrier.wait(ring_full[0].index(slot // 2), phase)
        given = ()
        if HIDES:
            given = given_of(
                scores, letter < 0, batch, head, tile_row, WG, rows,
                gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT), BIAS_MODE, BIAS_VECTOR, MASK_MODE,
                MASK_VECTOR, PACKED,
            )  # fmt: skip
            clear_if_careful(
                rings, ring_full, base, column_of(0, blocks, end, BLOCK_N, BAND), lo, hi, given, WG,
                CONSUMERS, HAS_LEFT, HAS_RIGHT, BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR,
            )  # fmt: skip
        turn_begin(WG, TURNS)
        zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        s = issue_scores(q, rings, slot, SLOTS, zero, HELD)
        turn_end(WG, CONSUMERS, TURNS)
        dropped = ()
        if DROPOUT:
            seed, offset, threshold, _keep_scale = dropout
            numbers = numbers_of_rows(offset, batch, head, heads_q, row, len_q, len_k, end)
            dropped = (numbers, seed, threshold)
            col = column_of(begin, blocks, end, BLOCK_N, BAND)
            # While Q K^T of the first block runs; a step does it before its products.
            bits = kept_bits(numbers, col, seed, threshold, BLOCK_N)
        if STORE_TMA:
            if count > 0:  # the last tile's O has left its Q buffer, while Q K^T runs
                tma.store_wait(0)
                arrive_each_thread(q_empty.index(((count - 1) % Q_BUFFERS) * CONSUMERS + WG))
        s = warpgroup_mma_wait(0, deps=[s])
        release(ring_empty, slot, 0, CONSUMERS)
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        p, _, m, total = block_softmax(
            s, m, row_sum(zero), scale, row, column_of(begin, blocks, end, BLOCK_N, BAND), lo, hi,
            base + 2 * begin, given, WG, CONSUMERS, HAS_RIGHT, CUT_LEFT, CUT_EDGE, True, EVEN,
            BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR, False,
        )  # fmt: skip
        if DROPOUT:
            p = drop(p, bits)
        p = packed_pairs(p, q_smem.dtype)
        acc = gl.zeros([64, D], gl.float32, O_LAYOUT)
        if RIGHT_LOOP:
            for j in range(begin + 1, clear):
                col = column_of(j, blocks, end, BLOCK_N, BAND)
                p, acc, m, total = step(
                    q, rings, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                    lo, hi, scale, given, dropped, WG, CONSUMERS, True, CUT_LEFT, CUT_EDGE, PIN,
                    TURNS, HELD, LAZY, HAS_LEFT, HAS_RIGHT, EVEN, BIAS_MODE, BIAS_VECTOR, MASK_MODE,
                    MASK_VECTOR, DROPOUT,
                )  # fmt: skip
        for j in range(clear, edge):
            col = column_of(j, blocks, end, BLOCK_N, BAND)
            p, acc, m, total = step(
                q, rings, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                lo, hi, scale, given, dropped, WG, CONSUMERS, False, False, False, PIN, TURNS, HELD,
                LAZY, HAS_LEFT, HAS_RIGHT, EVEN, BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR,
                DROPOUT,
            )  # fmt: skip
        if LEFT_LOOP:
            for j in range(edge, blocks):
                col = column_of(j, blocks, end, BLOCK_N, BAND)
                p, acc, m, total = step(
                    q, rings, ring_full, ring_empty, p, acc, m, total, base + 2 * j, row, col,
                    lo, hi, scale, given, dropped, WG, CONSUMERS, False, HAS_LEFT, EDGE, PIN, TURNS,
                    HELD, LAZY, HAS_LEFT, HAS_RIGHT, EVEN, BIAS_MODE, BIAS_VECTOR, MASK_MODE,
                    MASK_VECTOR, DROPOUT,
                )  # fmt: skip
        base += 2 * blocks
        if HELD > 0:  # Q was read into registers
            fence_async_shared()
        if not STORE_TMA:
            arrive_each_thread(q_empty.index(buffer))
        slot, phase = slot_of(base - 1, SLOTS)
        mbarrier.wait(ring_full[1].index(slot // 2), phase)
        v = values_of(rings, slot, SLOTS)
        if HAS_LEFT:
            hidden = start - (end - blocks * BLOCK_N)
            if (start > 0) & (hidden > 0):
                clear_hidden(v, hidden, WG, CONSUMERS)
        turn_begin(WG, TURNS)
        acc = warpgroup_mma(from_pairs(p, q_smem.dtype, P_LAYOUT), v, acc, is_async=True)
        turn_end(WG, CONSUMERS, TURNS)
        inverse = store_lse(
            m, total, lse_ptr, line, batch, head, heads_q, len_q, row, last if SPREAD else rows,
            BIAS_MODE > 0, PACKED,
        )  # fmt: skip
        if DROPOUT:
            inverse = inverse * dropout[3]
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(ring_empty, slot, 1, CONSUMERS)
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
        o = acc.to(q_smem.dtype)
        at = (batch_q.to(gl.int64) * o_batch_stride + head.to(gl.int64) * o_head_stride) * 8
        spoilt: gl.constexpr = 0
        if HIDES:
            spoilt = judge(acc, count, scores[6], scores[7], WG, CONSUMERS, letter < 0)
        elif SPREAD:
            spoilt = gl.where(row < last, 0, 1)
        if STORE_TMA:
            store_out(
                o_desc, q_smem.index(buffer), o_ptr + at, o_row_stride, o, batch_q, head, row, rows,
                head_dim_8, spoilt, PACKED,
            )  # fmt: skip
        else:
            store_registers(o_ptr + at, o_row_stride, o, row, rows, head_dim_8)
        letter = next_tile(letter, count + PACKED, mail, mail_full, mail_empty, DYNAMIC or HIDES)
        count += 1
    if TURNS and WG == 0:
        turn_begin(WG, TURNS)  # nobody is left waiting for the last turn that was passed on
    if STORE_TMA:
        tma.store_wait(0)


INT32_ARGUMENTS = (
    "heads_q", "group", "len_q", "len_k", "head_dim_8", "tiles", "heads", "section",
    "left_top", "right_top", "left_bottom", "right_bottom",
    "o_batch_stride", "o_head_stride", "o_row_stride", "ride_b", "ride_h",
    "sequences", "total_q", "total_k",
)  # fmt: skip
INT64_ARGUMENTS = (
    "bias_b", "bias_h", "bias_q", "bias_k", "mask_b", "mask_h", "mask_q", "mask_k",
    "seed", "offset", "threshold",
)  # fmt: skip


@gluon.jit(do_not_specialize=["scale", "keep_scale", *INT32_ARGUMENTS, *INT64_ARGUMENTS])
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, ride_desc, o_ptr, lse_ptr, lengths_ptr, counter, bias_ptr,
    mask_ptr, seed_at, offset_at, cu_q, cu_k, scale, heads_q, group, len_q, len_k, head_dim_8,
    tiles, heads, section, left_top, right_top, left_bottom, right_bottom, o_batch_stride,
    o_head_stride, o_row_stride, ride_b, ride_h, sequences, total_q, total_k, bias_b: tl.int64,
    bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, mask_b: tl.int64, mask_h: tl.int64,
    mask_q: tl.int64, mask_k: tl.int64, seed: tl.int64, offset: tl.int64, threshold: tl.int64,
    keep_scale,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, RIDE_STAGES: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    EVEN: gl.constexpr, STORE_TMA: gl.constexpr, PIN: gl.constexpr, TURNS: gl.constexpr,
    HELD: gl.constexpr, LAZY: gl.constexpr, APART: gl.constexpr, ALIGNED: gl.constexpr,
    ONCE: gl.constexpr, REGISTERS: gl.constexpr, BIAS_MODE: gl.constexpr, BIAS_VECTOR: gl.constexpr,
    MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr, DROPOUT: gl.constexpr,
    QK_TILES: gl.constexpr, ORDER: gl.constexpr, SPREAD: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    PACKED: gl.constexpr = cu_q is not None
    DYNAMIC: gl.constexpr = HAS_RIGHT or HAS_LENGTHS or PACKED or SPREAD
    gl.static_assert(not PACKED or (BIAS_MODE < 3 and MASK_MODE < 3))
    Q_BUFFERS: gl.constexpr = 2 if STORE_TMA else 1
    dtype: gl.constexpr = q_desc.dtype
    Q_TILES: gl.constexpr = Q_BUFFERS * CONSUMERS * QK_TILES
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES, 1, 1, 64, D], q_desc.layout)
    rings = allocate_rings(k_desc, v_desc, STAGES, QK_TILES)
    MAIL: gl.constexpr = gl.int64 if PACKED else gl.int32
    mail = gl.allocate_shared_memory(MAIL, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty, ring_full, ring_empty, mail_full, mail_empty = allocate_barriers(
        Q_BUFFERS, CONSUMERS, STAGES
    )
    if not STORE_TMA:
        o_desc = q_desc  # never used; a partition takes no None
    if not HAS_LENGTHS:
        lengths_ptr = lse_ptr  # never used
    if not DYNAMIC:
        counter = lse_ptr  # never used
    packed = ()
    if PACKED:
        packed = (cu_q, cu_k, sequences, total_q, total_k)
    dropout = ()
    if DROPOUT:
        seed, offset = philox_state(seed_at, offset_at, seed, offset)
        dropout = (seed, offset, threshold, keep_scale)
    scores = ()
    if BIAS_MODE + MASK_MODE > 0:
        scores = scores_of(
            ride_desc, ride_b, ride_h, q_desc, bias_ptr, bias_b, bias_h, bias_q, bias_k, mask_ptr,
            mask_b, mask_h, mask_q, mask_k, lse_ptr, rings[0], BLOCK_N, CONSUMERS, RIDE_STAGES,
            BIAS_MODE, MASK_MODE,
        )  # fmt: skip
    fence_async_shared()
    smem = (q_smem, rings, mail, q_full, q_empty, ring_full, ring_empty, mail_full, mail_empty)
    target = (o_desc, o_ptr, o_batch_stride, o_head_stride, o_row_stride, lse_ptr, head_dim_8)
    work = (
        lengths_ptr, heads_q, group, len_q, len_k, tiles, heads, section, left_top, right_top,
        left_bottom, right_bottom,
    )  # fmt: skip
    # Constexprs stand in place: held in a variable, they would become run-time values.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, smem, work, packed, scores, dropout, target, scale, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN, STORE_TMA, PIN, TURNS,
                         HELD, LAZY, APART, ALIGNED, ONCE, PACKED, ORDER, BIAS_MODE, BIAS_VECTOR,
                         MASK_MODE, MASK_VECTOR, DROPOUT, SPREAD, LATE)),
            (_consumer, (1, smem, work, packed, scores, dropout, target, scale, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN, STORE_TMA, PIN, TURNS,
                         HELD, LAZY, APART, ALIGNED, ONCE, PACKED, ORDER, BIAS_MODE, BIAS_VECTOR,
                         MASK_MODE, MASK_VECTOR, DROPOUT, SPREAD, LATE)),
            (_producer, (q_desc, k_desc, v_desc, counter, smem, work, packed, scores, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, PACKED, ORDER, BIAS_MODE,
                         MASK_MODE, SPREAD, LATE)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (0, smem, work, packed, scores, dropout, target, scale, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN, STORE_TMA, PIN, TURNS,
                         HELD, LAZY, APART, ALIGNED, ONCE, PACKED, ORDER, BIAS_MODE, BIAS_VECTOR,
                         MASK_MODE, MASK_VECTOR, DROPOUT, SPREAD, LATE)),
            (_consumer, (1, smem, work, packed, scores, dropout, target, scale, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN, STORE_TMA, PIN, TURNS,
                         HELD, LAZY, APART, ALIGNED, ONCE, PACKED, ORDER, BIAS_MODE, BIAS_VECTOR,
                         MASK_MODE, MASK_VECTOR, DROPOUT, SPREAD, LATE)),
            (_consumer, (2, smem, work, packed, scores, dropout, target, scale, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, EVEN, STORE_TMA, PIN, TURNS,
                         HELD, LAZY, APART, ALIGNED, ONCE, PACKED, ORDER, BIAS_MODE, BIAS_VECTOR,
                         MASK_MODE, MASK_VECTOR, DROPOUT, SPREAD, LATE)),
            (_producer, (q_desc, k_desc, v_desc, counter, smem, work, packed, scores, CONSUMERS,
                         HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, DYNAMIC, PACKED, ORDER, BIAS_MODE,
                         MASK_MODE, SPREAD, LATE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 32])  # fmt: skip
