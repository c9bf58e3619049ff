"""The pieces of the Hopper attention forward: tiles, ranges, masks, softmax, mail, the store.

`kernel_gluon_sm90_fwd.py` puts them together and explains the roles and the barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from tileloom.device.barriers import arrive_each_thread, named_barrier_arrive, named_barrier_sync
from tileloom.device.compat import tma_load, tma_store
from tileloom.ops.attention.pieces_packed import rows_of, sequence_of

TURN = gl.constexpr(8)
CLEARED = gl.constexpr(12)


@gluon.jit
def tile_of(tile, tiles, heads, section, heads_q, BLOCK_M: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Batch, head and first row of a tile.

    With a diagonal the longest tiles come first, inside sections of heads whose K and V fit in L2,
    so that the short ones fill the end. Without one the tiles of a head follow each other and
    share its K and V in L2.
    """
    if HAS_RIGHT:
        first = tile // (section * tiles) * section
        within = tile - first * tiles
        size = gl.minimum(section, heads - first)
        back = within // size
        index = first + within - back * size
        row = (tiles - 1 - back) * BLOCK_M
    else:
        index = tile // tiles
        row = (tile - index * tiles) * BLOCK_M
    batch = index // heads_q
    return batch, index - batch * heads_q, row


@gluon.jit
def rows_of_tile(
    place, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """What `tile_of` gives, and of packed sequences (`pieces_packed.py`) their places and lengths.

    `place` has the tile and its sequence, which is searched for where it is None.

    Returns batch (the sequence), head and first row, which may be negative; the batch's index in
    descriptors of queries and of keys; its lengths, that of queries -1 for a tile without rows; and
    of packed sequences the place of row 0 in LSE.
    """
    tile, sequence = place
    if PACKED:
        cu_q, cu_k, sequences, total_q, total_k = packed
        # Sequence by sequence, the heads of a section side by side: the last tiles are short ones.
        first = tile // (section * tiles) * section
        within = tile - first * tiles
        size = gl.minimum(section, heads - first)
        number = within // size
        head = first + within - number * size
        if sequence is None:
            sequence, start = sequence_of(number, cu_q, sequences, BLOCK_M)
        else:
            start = gl.load(cu_q + sequence) // BLOCK_M + sequence.to(gl.int32)
        first_q, rows = rows_of(cu_q, sequence, total_q, len_q)
        first_k, keys = rows_of(cu_k, sequence, total_k, len_k)
        row = rows - (gl.maximum(number - start, 0) + 1) * BLOCK_M
        rows = gl.where(row + BLOCK_M > 0, rows, -1)
        line = head.to(gl.int64) * total_q + first_q
        return sequence.to(gl.int32), head, row, first_q, first_k, rows, keys, line
    else:
        batch, head, row = tile_of(tile, tiles, heads, section, heads_q, BLOCK_M, HAS_RIGHT)
        return batch, head, row, batch, batch, len_q, len_k, 0


@gluon.jit
def live_tile(
    tile, counter, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The first tile with rows, of this one and those that are drawn after it, or none.

    Of packed sequences a letter: the tile in the upper 32 bits, the sequence in the lower.
    """
    if PACKED:
        sequence = gl.to_tensor(0)
        is_dead = gl.to_tensor(1)
        while is_dead != 0:
            is_dead = gl.to_tensor(0)
            if tile < tiles * heads:
                sequence, _, _, _, _, rows, _, _ = rows_of_tile(
                    (tile, None), tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M,
                    HAS_RIGHT, PACKED,
                )  # fmt: skip
                if rows < 0:
                    is_dead = gl.to_tensor(1)
                    tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        return (tile.to(gl.int64) << 32) | sequence.to(gl.int64)
    else:
        return tile


@gluon.jit
def opened(letter, PACKED: gl.constexpr):
    """Tile and sequence of what `live_tile` gives."""
    if PACKED:
        return (letter >> 32).to(gl.int32), letter & 0xFFFFFFFF
    else:
        return letter, 0


@gluon.jit
def first_letter(tile, PACKED: gl.constexpr):
    """The least of what `live_tile` may give for a tile."""
    if PACKED:
        return tile.to(gl.int64) << 32
    else:
        return tile


@gluon.jit
def range_of(
    lengths_ptr, batch, row, len_q, len_k, left_top, right_top, left_bottom, right_bottom,
    BLOCK_M: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Keys `start .. end - 1` that some row of the tile sees; the band i + lo <= j <= i + hi."""
    end = len_k
    if HAS_LENGTHS:
        end = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch.to(gl.int64)), 0), len_k).to(
            gl.int32
        )
    shift = end - len_q
    start = 0
    lo = 0
    hi = 0
    if HAS_LEFT:
        lo = gl.maximum(-left_top, shift - left_bottom)
        start = gl.maximum(row + lo, 0)
    if HAS_RIGHT:
        hi = gl.minimum(right_top, right_bottom + shift)
        end = gl.minimum(end, gl.minimum(row + BLOCK_M, len_q) + hi)
    is_empty = end <= start
    if HAS_LEFT and HAS_RIGHT:
        is_empty = is_empty | (hi < lo)  # bounds that contradict each other
    if is_empty:  # nothing is visible: one block of zeros, all of it masked
        end = 0
        start = 0
    return start, end, lo, hi


@gluon.jit
def column_of(j, blocks, end, BLOCK_N: gl.constexpr, BAND: gl.constexpr):
    """First key of block j. The blocks end at `end`; those that need a mask come first."""
    if BAND:
        return end - (j + 1) * BLOCK_N
    else:
        return end - (blocks - j) * BLOCK_N


@gluon.jit
def mask(s, row, col, lo, hi, HAS_RIGHT: gl.constexpr, HAS_LEFT: gl.constexpr, EDGE: gl.constexpr):
    """Hide keys outside the band, and keys before 0 where the leftmost block may begin there.

    Column 8 a + b is compared as `8 a <= limit - b`: in the wgmma layout `a` counts registers, so
    it is a constant of the instruction. Column numbers would fill 32 registers of every thread.
    """
    x = gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])
    L: gl.constexpr = x.type.layout
    i = gl.arange(0, x.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L)))
    a = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, L)))
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    i = gl.expand_dims(gl.expand_dims(row + i, 1), 2)
    a = gl.expand_dims(gl.expand_dims(a * 8, 0), 2)
    b = gl.expand_dims(gl.expand_dims(col + b, 0), 1)
    if HAS_RIGHT:
        x = gl.where(a <= i + hi - b, x, float("-inf"))
    if HAS_LEFT:
        x = gl.where(a >= gl.maximum(i + lo, 0) - b, x, float("-inf"))
    elif EDGE:
        x = gl.where(a >= 0 - b, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def row_sum(p):
    """Sum each row over the registers of a thread only: [M, 8], four partial sums a thread."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def softmax(s, m, total, scale, GUARD: gl.constexpr):
    """One step of the online softmax. GUARD: a row may have seen no key yet (m = -inf)."""
    M: gl.constexpr = s.shape[0]
    part = gl.max(gl.reshape(s, [M, s.shape[1] // 8, 8]), 1)
    row_max = gl.convert_layout(gl.max(part, 1), m.type.layout)
    m_new = gl.maximum(m, row_max * scale)
    base = m_new
    if GUARD:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    wide = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout)), 1)
    return p, alpha, m_new, total * wide + row_sum(p)


@gluon.jit
def next_tile(tile, count, mail, mail_full, mail_empty, MAILED: gl.constexpr):
    """The tile that follows, as a consumer learns it: by mail from the producer, or by counting."""
    if MAILED:
        slot = count & 1
        mbarrier.wait(mail_full.index(slot), (count >> 1) & 1)
        tile = gl.max(mail.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        arrive_each_thread(mail_empty.index(slot))
        return tile
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def mail_tile(tile, count, mail, mail_full, mail_empty):
    """Mail the number of the next tile to the consumers; the producer's side."""
    slot = count & 1
    mbarrier.wait(mail_empty.index(slot), ((count >> 1) & 1) ^ 1)
    mail.index(slot).store(gl.full([1], tile, mail.dtype, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(mail_full.index(slot), count=1)


@gluon.jit
def turn_begin(WG: gl.constexpr):
    named_barrier_sync(TURN + WG, 256)


@gluon.jit
def turn_end(WG: gl.constexpr, CONSUMERS: gl.constexpr):
    named_barrier_arrive(TURN + (WG + 1) % CONSUMERS, 256)


@gluon.jit
def slot_of(item, SLOTS: gl.constexpr):
    return item % SLOTS, (item // SLOTS) & 1


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
def issue_scores(q, rings, slot, SLOTS: gl.constexpr, zero):
    """Issue S = Q K^T for a warpgroup's rows and the keys of a slot."""
    q_smem, buffer = q
    TILES: gl.constexpr = rings[0].type.shape[0] // rings[1].type.shape[0]
    D: gl.constexpr = q_smem.type.shape[4]
    s = zero
    for tile in gl.static_range(TILES):
        rows = q_smem.index(buffer * TILES + tile).reshape([64, D])
        keys = keys_of(rings, slot, tile, SLOTS).permute((1, 0))
        s = warpgroup_mma(rows, keys, s, use_acc=tile > 0, is_async=True)
    return s


@gluon.jit
def clear_hidden(v, hidden, WG: gl.constexpr, CONSUMERS: gl.constexpr):
    """Set the first `hidden` rows of a V block to zero, so that 0 * NaN cannot reach O.

    The warpgroups share the work, 16 rows at a time, and meet before any of them reads V.
    """
    BLOCK_N: gl.constexpr = v.type.shape[0]
    D: gl.constexpr = v.type.shape[1]
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    for chunk in gl.static_range(BLOCK_N // 16):
        if chunk % CONSUMERS == WG:
            part = v.slice(chunk * 16, 16, 0)
            x = part.load(LAYOUT)
            i = chunk * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
            part.store(gl.where(gl.expand_dims(i >= hidden, 1), x, 0.0))
    fence_async_shared()
    named_barrier_sync(CLEARED, 128 * CONSUMERS)


@gluon.constexpr_function
def out_layout(D):
    """Eight neighbouring columns a thread (16 bytes), on the rows its warp has in wgmma."""
    regs = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, c] for c in (32, 64, 128) if c < D]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0], [32, 0]], [], [64, D])


@gluon.jit
def store_registers(o_ptr, o_row_stride, o, row, len_q, head_dim_8):
    """Write O from registers in 16-byte pieces; stride and head dim come in units of 8 elements.

    Rows before 0 and from `len_q` on are left out.
    """
    D: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = out_layout(D)
    o = gl.convert_layout(o, LAYOUT)
    i = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    rows = gl.expand_dims(i.to(gl.int64) * o_row_stride * 8, 1)
    shown = gl.expand_dims((i >= 0) & (i < len_q), 1) & gl.expand_dims(j < head_dim_8 * 8, 0)
    gl.store(o_ptr + (rows + gl.expand_dims(j, 0)), o, mask=shown)


@gluon.jit
def store_out(
    o_desc, smem, o_ptr, o_row_stride, o, batch, head, row, len_q, head_dim_8, spoilt,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Write O by TMA, unless it is spoilt; from registers if it begins before a packed sequence."""
    if PACKED:
        if row < 0:  # TMA stores nothing that begins before row 0
            store_registers(o_ptr, o_row_stride, o, row, len_q, head_dim_8)
        else:
            if spoilt == 0:
                store_shared(o_desc, smem, o, batch, head, row)
    else:
        if spoilt == 0:
            store_shared(o_desc, smem, o, batch, head, row)


@gluon.jit
def store_shared(o_desc, smem, o, batch, head, row):
    """Write O by TMA through a warpgroup's rows of Q, which nobody reads any more."""
    smem.store(gl.reshape(o, [1, 1, o.shape[0], o.shape[1]]))
    fence_async_shared()
    tma_store(o_desc, [batch, head, row, 0], smem)
