"""Dropout in the Hopper attention forward: which scores of a block are kept, as bits of a word.

In each of its rows, a thread of a wgmma accumulator has the keys 8 a + 2 q + e: `a` and `e` count
registers, the two bits of `q` are lane bits. Philox decides on four neighbouring keys at once, `e`
and the low bit of `q`; so that no two lanes make the same call, a lane takes the quads whose `a` is
even or odd as its own low lane bit is. One word a row has all that it learns; one shuffle a row
brings what the lane beside it has learnt of its keys.

Nothing of this depends on the scores: it runs while the tensor cores work on them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.ops.attention.pieces_philox import crosses_quads, first_index, quad_words
from tileloom.ops.attention.pieces_philox_sm90 import high_word, words_in_rows

# `where`, but LLVM would round to half precision first, and then choose and pack 16 bits at a time.
_KEEP = gl.constexpr("{ .reg .pred k; setp.ne.s32 k, $2, 0; selp.f32 $0, $1, 0f00000000, k; }")


@gluon.constexpr_function
def _quad_layout(N):
    """`[64, N]`: rows, and 4 or 8 quads, whose bits are those of the keys 4, 8 and 16."""
    regs = [[8, 0]] if N == 4 else [[8, 0], [0, 4]]
    lanes = [[0, 2], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0], [32, 0]], [], [64, N])


@gluon.constexpr_function
def _pair_layout():
    """`[64, 2, 2, 2]`: rows, and key bits 8, 4 and 2 where the accumulator has them."""
    lanes = [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    regs, warps = [[8, 0, 0, 0], [0, 1, 0, 0]], [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [64, 2, 2, 2])


@gluon.jit
def numbers_of_rows(offset, batch, head, heads, row, len_q, len_k, end):
    """What `kept_bits` wants of a warpgroup's 64 rows from `row` on, of blocks that end at `end`.

    The index of key 0 of each row, int64 `[64]`; the high word of their counters; and whether these
    differ, or four keys of a block may take numbers of two Philox calls.
    """
    batch, head = batch.to(gl.int64), head.to(gl.int64)
    i = row + gl.arange(0, 64, gl.SliceLayout(1, _quad_layout(8)))
    first = first_index(offset, batch, head, heads, i, len_q, len_k)
    corner = first_index(offset, batch, head, heads, row, len_q, len_k)
    high, turns = high_word(corner, 64 * len_k.to(gl.int64))
    return first, high, crosses_quads(offset | end, len_k) | turns


@gluon.constexpr_function
def _gather_text(bit):
    """Add 2^bit where the first word is kept, and the double of it where the second one is.

    To a float: additions of floats run beside what Philox does, those of integers do not.
    """
    one, two = (f"0f{(127 + bit + e) << 23:08x}" for e in (0, 1))
    return (
        "{ .reg .pred p, q; setp.ge.u32 p, $2, $4; setp.ge.u32 q, $3, $4; mov.b32 $0, $1; "
        f"@p add.f32 $0, $0, {one}; @q add.f32 $0, $0, {two}; }}"
    )


@gluon.jit
def _halved(x):
    """The quads of the keys 0 to 15, and of 16 to 31: `[64, 4]` each, of `[64, 8]`."""
    L: gl.constexpr = _quad_layout(4)
    low, high = gl.split(gl.permute(gl.reshape(x, [64, 2, 4]), (0, 2, 1)))
    return (
        gl.convert_layout(low, L, assert_trivial=True),
        gl.convert_layout(high, L, assert_trivial=True),
    )


@gluon.jit
def _gathered(total, first, second, limit):
    """Gather what 32 keys' words decide, two of each quad, in front of those of the keys behind."""
    NEAR: gl.constexpr = _gather_text(0)
    FAR: gl.constexpr = _gather_text(2)
    a, c = _halved(first)
    b, d = _halved(second)
    total = total * 16.0
    total = gl.inline_asm_elementwise(
        NEAR, "=&f,f,r,r,r", [total, a, b, limit], gl.float32, True, 1
    )
    return gl.inline_asm_elementwise(FAR, "=&f,f,r,r,r", [total, c, d, limit], gl.float32, True, 1)


@gluon.jit
def _decided(rows, col, seed, threshold, IS_APART: gl.constexpr, BLOCK_N: gl.constexpr):
    """Gather the decisions on the first and the last two keys of the quads that a thread takes."""
    L: gl.constexpr = _quad_layout(8)
    HALF: gl.constexpr = _quad_layout(4)
    first, high, _ = rows
    limit = gl.full([64, 4], threshold.to(gl.uint32), gl.uint32, HALF)
    front = gl.zeros([64, 4], gl.float32, HALF)
    back = front
    first = gl.expand_dims(first + col.to(gl.int64), 1)
    quads = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, L)) + BLOCK_N // 4, 0)
    if IS_APART:
        counter = (first >> 2) + quads.to(gl.int64)
        lane = (first & 3).to(gl.int32)
        for chunk in range(1, BLOCK_N // 32 + 1):
            w0, w1, w2, w3 = quad_words(counter - chunk * 8, lane, True, seed)
            front = _gathered(front, w0, w1, limit)
            back = _gathered(back, w2, w3, limit)
    else:
        low = (first >> 2).to(gl.uint32) + quads.to(gl.uint32)
        for chunk in range(1, BLOCK_N // 32 + 1):
            w0, w1, w2, w3 = words_in_rows(low - chunk * 8, high, seed, True)
            front = _gathered(front, w0, w1, limit)
            back = _gathered(back, w2, w3, limit)
    return front.to(gl.int32), back.to(gl.int32)


@gluon.jit
def kept_bits(rows, col, seed, threshold, BLOCK_N: gl.constexpr):
    """Which scores are kept of the block whose first key is `col`, given `numbers_of_rows`.

    Bit 16 (a % 2) + 2 (a // 2) + e of word `[i, q]` is that of row i, key 8 a + 2 q + e.
    """
    if rows[2]:
        front, back = _decided(rows, col, seed, threshold, True, BLOCK_N)
    else:
        front, back = _decided(rows, col, seed, threshold, False, BLOCK_N)
    pairs = gl.reshape(gl.join(front, back), [64, 2, 2, 2])
    pairs = gl.permute(gl.convert_layout(pairs, _pair_layout()), (0, 2, 3, 1))
    even, odd = gl.split(pairs)
    return gl.reshape(even | (odd << 16), [64, 4])


@gluon.jit
def drop(p, bits):
    """P of a block, without what is dropped."""
    x = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    L: gl.constexpr = x.type.layout
    QUERIES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
    a = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    bits = gl.convert_layout(bits, QUERIES, assert_trivial=True)
    bits = gl.expand_dims(gl.expand_dims(bits, 1), 3)
    a = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 0), 2), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    place = 16 * (a & 1) + 2 * (a >> 1) + e
    bit, _ = gl.broadcast(bits & (1 << place), x)
    x = gl.inline_asm_elementwise(_KEEP, "=f,f,r", [x, bit], gl.float32, True, 1)
    return gl.convert_layout(gl.reshape(x, p.shape), p.type.layout, assert_trivial=True)
