"""The pieces of the Hopper attention forward: tiles, ranges, masks, softmax, mail, the store.

`kernel_gluon_sm90_fwd.py` puts them together and explains the roles and the barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
)

from tileloom.device.barriers import named_barrier_arrive, named_barrier_sync
from tileloom.device.compat import tma_store
from tileloom.device.mail import receive
from tileloom.ops.attention.pieces_packed import rows_of, sequence_of

CLEARED = gl.constexpr(12)
TURN = gl.constexpr(13)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def shares_of(len_q, tiles):
    """How rows, 64 to a warpgroup, are dealt out to the tiles of a head that they do not fill.

    Returns how many warpgroups a short tile has, and how many short tiles there are: the first
    ones. The others have one warpgroup more.
    """
    groups = gl.cdiv(len_q, 64)
    least = groups // tiles
    return least, (least + 1) * tiles - groups


@gluon.jit
def tile_of(
    tile, tiles, heads, section, heads_q, len_q, BLOCK_M: gl.constexpr, ORDER: gl.constexpr,
    SPREAD: gl.constexpr,
):  # fmt: skip
    """Batch, head and first row of a tile.

    ORDER 0: the tiles of a head follow each other and share its K and V in L2. 1, with a diagonal:
    the longest tiles come first, inside sections of heads whose K and V fit in L2, so that the
    short ones fill the end. 2: the same, and a head's batches follow each other, which share its
    bias or mask in L2.

    SPREAD: tiles have shares of the rows (`shares_of`); in ORDER 0 the short ones of all heads come
    last.
    """
    if SPREAD:
        least, short = shares_of(len_q, tiles)
    if ORDER > 0:
        first = tile // (section * tiles) * section
        within = tile - first * tiles
        size = gl.minimum(section, heads - first)
        back = within // size
        index = first + within - back * size
        place = tiles - 1 - back
    elif SPREAD:
        whole = tiles - short
        is_whole = tile < heads * whole
        tile -= gl.where(is_whole, 0, heads * whole)
        a_head = gl.where(is_whole, whole, short)
        index = tile // a_head
        place = tile - index * a_head + gl.where(is_whole, short, 0)
    else:
        index = tile // tiles
        place = tile - index * tiles
    if SPREAD:
        row = 64 * ((least + 1) * place - gl.minimum(place, short))
    else:
        row = place * BLOCK_M
    if ORDER == 2:
        batches = heads // heads_q
        head = index // batches
        return index - head * batches, head, row
    else:
        batch = index // heads_q
        return batch, index - batch * heads_q, row


@gluon.jit
def end_of_rows(row, len_q, tiles, BLOCK_M: gl.constexpr, SPREAD: gl.constexpr):
    """The first row behind a tile."""
    width = BLOCK_M
    if SPREAD:
        least, short = shares_of(len_q, tiles)
        width = 64 * gl.where(row < 64 * least * short, least, least + 1)
    return gl.minimum(row + width, len_q)


@gluon.jit
def rows_of_tile(
    place, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M: gl.constexpr,
    ORDER: gl.constexpr, PACKED: gl.constexpr, SPREAD: gl.constexpr,
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
        batch, head, row = tile_of(
            tile, tiles, heads, section, heads_q, len_q, BLOCK_M, ORDER, SPREAD
        )
        return batch, head, row, batch, batch, len_q, len_k, 0


@gluon.jit
def live_tile(
    tile, counter, tiles, heads, section, heads_q, len_q, len_k, packed, BLOCK_M: gl.constexpr,
    ORDER: gl.constexpr, PACKED: gl.constexpr, SPREAD: gl.constexpr,
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
                    ORDER, PACKED, SPREAD,
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
    lengths_ptr, batch, row, len_q, len_k, tiles, left_top, right_top, left_bottom, right_bottom,
    BLOCK_M: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """Keys `start .. end - 1` that some row of the tile sees; the band i + lo <= j <= i + hi.

    Last comes the first row behind the tile.
    """
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
        start = gl.maximum(gl.maximum(row, 0) + lo, 0)  # a packed tile may begin before row 0
    if HAS_RIGHT:
        hi = gl.minimum(right_top, right_bottom + shift)
    last = end_of_rows(row, len_q, tiles, BLOCK_M, SPREAD)
    if HAS_RIGHT:
        end = gl.minimum(end, last + hi)
    is_empty = end <= start
    if HAS_LEFT and HAS_RIGHT:
        is_empty = is_empty | (hi < lo)  # bounds that contradict each other
    if is_empty:  # nothing is visible: one block of zeros, all of it masked
        end = 0
        start = 0
    return start, end, lo, hi, last


@gluon.jit
def column_of(j, blocks, end, BLOCK_N: gl.constexpr, BAND: gl.constexpr):
    """First key of block j. The blocks end at `end`; those that need a mask come first."""
    if BAND:
        return end - (j + 1) * BLOCK_N
    else:
        return end - (blocks - j) * BLOCK_N


@gluon.jit
def unseen_blocks(
    row, last, end, hi, blocks, BLOCK_N: gl.constexpr, BEHIND: gl.constexpr, SPREAD: gl.constexpr
):
    """How many of a tile's first blocks the 64 rows of a warpgroup see nothing of; never all.

    BEHIND: a right bound may hide whole blocks. SPREAD: a warpgroup without rows sees none.
    """
    unseen = 0
    if BEHIND:
        unseen = gl.minimum(gl.maximum(end - row - 64 - hi, 0) // BLOCK_N, blocks - 1)
    if SPREAD:
        unseen = gl.where(row < last, unseen, blocks - 1)
    return unseen


@gluon.jit
def cut_blocks(
    begin, blocks, row, end, lo, hi, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr,
    RIGHT_LOOP: gl.constexpr, LEFT_LOOP: gl.constexpr,
):  # fmt: skip
    """Which blocks a warpgroup masks: `begin`, those before `clear` and those from `edge` on.

    A right bound cuts the former; a left one, or the edge of the keys, the latter.
    """
    clear = begin + 1
    if RIGHT_LOOP:
        clear = gl.minimum(gl.maximum(gl.cdiv(end - 1 - row - hi, BLOCK_N), clear), blocks)
    edge = blocks
    if LEFT_LOOP:
        first = 0
        if HAS_LEFT:
            first = gl.maximum(row + 63 + lo, 0)
        edge = gl.minimum(gl.maximum((end - first) // BLOCK_N, clear), blocks)
    return clear, edge


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


@gluon.constexpr_function
def _rescale_ptx(values):
    """Multiply registers by alpha, unless all alphas of the warp are 1.

    A thread has two rows of an accumulator, two neighbours of the first, two of the second, and so
    on: all alphas of it are in registers 0 and 2.
    """
    first, second = 2 * values, 2 * values + 2
    text = f"{{ .reg .pred p, q; setp.neu.f32 p, ${first}, 0f3F800000; "
    text += f"setp.neu.or.f32 p, ${second}, 0f3F800000, p; "
    text += "vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni DONE; "
    text += "".join(f"mul.f32 ${i}, ${i}, ${first + (i & 2)}; " for i in range(values))
    return text + "DONE: }"


@gluon.constexpr_function
def _rescale_constraints(values):
    return ",".join(["=f"] * values + [str(i) for i in range(values)] + ["f"] * values)


@gluon.jit
def rescale(acc, alpha, LAZY: gl.constexpr):
    """Multiply the rows of O by alpha. LAZY: a warp with nothing to multiply goes on at once."""
    wide = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)
    if LAZY:
        VALUES: gl.constexpr = acc.shape[1] // 2
        text: gl.constexpr = _rescale_ptx(VALUES)
        constraints: gl.constexpr = _rescale_constraints(VALUES)
        _, wide = gl.broadcast(acc, wide)
        return gl.inline_asm_elementwise(text, constraints, [acc, wide], gl.float32, False, VALUES)
    else:
        return acc * wide


@gluon.jit
def greater(m_new, m, LAZY: gl.constexpr):
    """What is taken from the scores from now on. LAZY: the old maximum, unless it grew by 8.

    P is at most 2^8 then, or e^8, which float16 holds; the sums are divided by at the end anyway.
    """
    if LAZY:
        return gl.where(m_new - m > 8.0, m_new, m)
    else:
        return m_new


@gluon.jit
def softmax(s, m, total, scale, GUARD: gl.constexpr, LAZY: gl.constexpr):
    """One step of the online softmax. GUARD: a row may have seen no key yet (m = -inf).

    LAZY is that of `greater`.
    """
    M: gl.constexpr = s.shape[0]
    part = gl.max(gl.reshape(s, [M, s.shape[1] // 8, 8]), 1)
    row_max = gl.convert_layout(gl.max(part, 1), m.type.layout)
    m_new = greater(gl.maximum(m, row_max * scale), m, LAZY)
    base = m_new
    if GUARD:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    wide = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout)), 1)
    return p, alpha, m_new, total * wide + row_sum(p)


@gluon.jit
def next_tile(tile, count, mail, mail_full, mail_empty, MAILED: gl.constexpr):
    """The tile that follows, as a consumer learns it: by mail, or by counting."""
    if MAILED:
        return receive(mail, mail_full, mail_empty, count)
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def turn_begin(WG: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        named_barrier_sync(TURN + WG, 256)


@gluon.jit
def turn_end(WG: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        named_barrier_arrive(TURN + (WG + 1) % CONSUMERS, 256)


@gluon.jit
def slot_of(item, SLOTS: gl.constexpr):
    return item % SLOTS, (item // SLOTS) & 1


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


@gluon.jit
def store_lse(
    m, total, lse_ptr, line, batch, head, heads_q, len_q, row, last, NATURAL: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp of a warpgroup's rows before `last`; returns what O is multiplied by.

    NATURAL: m is in natural units. A row that saw no key has -inf, and its O is multiplied by 1.
    """
    ROWS: gl.constexpr = m.type.layout
    sums = gl.convert_layout(gl.sum(total, 1), ROWS)
    is_empty = sums == 0.0
    if NATURAL:
        lse = gl.where(is_empty, float("-inf"), m + gl.log2(sums) * LN2)
    else:
        lse = gl.where(is_empty, float("-inf"), (m + gl.log2(sums)) * LN2)
    i = row + gl.arange(0, m.shape[0], ROWS)
    if PACKED:
        gl.store(lse_ptr + line + i.to(gl.int64), lse, mask=(i >= 0) & (i < last))
    else:
        lse_row = lse_ptr + (batch.to(gl.int64) * heads_q + head) * len_q
        gl.store(lse_row + i.to(gl.int64), lse, mask=i < last)
    return 1.0 / gl.where(is_empty, 1.0, sums)


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
