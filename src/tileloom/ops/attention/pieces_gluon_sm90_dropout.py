"""Dropout of transposed scores `[64 keys, queries]` in the layout of a wgmma accumulator.

One Philox call decides on four neighbouring keys of a query (`pieces_philox.py`), and in the
accumulator those four lie in four lanes (bits 2 and 3 of the lane are bits 0 and 1 of the key).
So the calls are shared out otherwise: those two lane bits count queries (bits 0 and 3), and every
call is made once. A thread packs its eight calls of 64 queries into the 32 bits of one word; the
words go around among the four lanes, and each thread picks the bits of its own key out of four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.ops.attention.pieces_philox import crosses_quads, keep_quad
from tileloom.ops.attention.pieces_philox_sm90 import high_word, words_in_rows


@gluon.constexpr_function
def _quad_layout():
    """Owners of `[16 quads of keys, 16 queries]`: two calls a thread, and none twice."""
    lanes = [[0, 2], [0, 4], [0, 1], [0, 8], [1, 0]]
    return gl.DistributedLinearLayout([[2, 0]], lanes, [[4, 0], [8, 0]], [], [16, 16])


@gluon.constexpr_function
def _axis_layout(layout, dim, rank):
    for d in range(rank - 1, -1, -1):
        if d != dim:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def _axis(SIZE: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """The numbers 0 .. SIZE - 1 along one of RANK dimensions."""
    OWN: gl.constexpr = _axis_layout(LAYOUT, DIM, RANK)
    x = gl.arange(0, SIZE, OWN)
    for d in gl.static_range(RANK):
        if d != DIM:
            x = gl.expand_dims(x, d)
    return x


@gluon.jit
def _kept_bits(first, len_k, crosses, seed, threshold):
    """Decide on 64 keys and 16 queries: a thread's two calls are bits 0 to 3 and 16 to 19."""
    LAYOUT: gl.constexpr = _quad_layout()
    first += gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)).to(gl.int64) * len_k
    quads = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), 1)
    lane = gl.expand_dims((first & 3).to(gl.int32), 0)
    counter = gl.expand_dims(first >> 2, 0) + quads
    k0, k1, k2, k3 = keep_quad(counter, lane, crosses, seed, threshold)
    k0 = k0.reshape([4, 2, 2, 16])  # key bits 5 4, 3, 2; query bits 3 2 1 0
    OWN: gl.constexpr = k0.type.layout
    bit = 1 << (16 * _axis(2, 1, 4, OWN))
    bits = gl.where(k0, bit, 0) | gl.where(k1.reshape([4, 2, 2, 16]), bit * 2, 0)
    bits = bits | gl.where(k2.reshape([4, 2, 2, 16]), bit * 4, 0)
    bits = bits | gl.where(k3.reshape([4, 2, 2, 16]), bit * 8, 0)
    return gl.sum(bits, 1)


@gluon.jit
def kept_words(dropout, batch, head, heads, row, key, len_q, len_k, BLOCK_M: gl.constexpr):
    """Decide on a tile; of 64 queries one word a thread, which `kept_scores` reads.

    `row` and `key` are the first ones of the tile, which may be negative where none is there. Calls
    run one pair after the other: side by side they would take too many registers.
    """
    seed, offset, threshold, _scale = dropout
    line = (batch.to(gl.int64) * heads + head) * len_q + row
    first = offset + line * len_k + key
    crosses = ((offset | len_k | key) & 3) != 0
    LAYOUT: gl.constexpr = _quad_layout()
    whole = gl.zeros([16, 16], gl.int32, LAYOUT).reshape([4, 2, 2, 16])
    none = gl.sum(whole, 1)
    words = none
    for c in range(4):
        at = first + (16 * c) * len_k.to(gl.int64)
        words = words | (_kept_bits(at, len_k, crosses, seed, threshold) << (4 * c))
    if BLOCK_M == 128:
        more = none
        for c in range(4):
            at = first + (64 + 16 * c) * len_k.to(gl.int64)
            more = more | (_kept_bits(at, len_k, crosses, seed, threshold) << (4 * c))
        return gl.join(words, more).permute((0, 1, 3, 2))
    else:
        return words.reshape([4, 2, 1, 16])


@gluon.constexpr_function
def _words_layout(OWN):
    return gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(5, OWN)))


@gluon.jit
def _whole(BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers of a tile by key bits 5 4, 3, 2, 1 0 and query bits 6, 5 4, 3 2 1 0."""
    return gl.zeros([64, BLOCK_M], gl.int32, LAYOUT).reshape([4, 2, 2, 4, BLOCK_M // 64, 4, 16])


@gluon.jit
def kept_scores(words, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Return which scores of a tile are kept, bool `[64, BLOCK_M]` in LAYOUT."""
    OWN: gl.constexpr = _whole(BLOCK_M, LAYOUT).type.layout
    return _picked(gl.convert_layout(words, _words_layout(OWN)), BLOCK_M, LAYOUT)


@gluon.jit
def scores_of(place, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """`kept_scores` of words in shared memory, one after the other."""
    OWN: gl.constexpr = _whole(BLOCK_M, LAYOUT).type.layout
    like = gl.zeros([4, 2, BLOCK_M // 64, 16], gl.int32, _words_layout(OWN))
    FLAT: gl.constexpr = like.reshape([2 * BLOCK_M]).type.layout
    words = place.load(FLAT).reshape([4, 2, BLOCK_M // 64, 16])
    return _picked(gl.convert_layout(words, _words_layout(OWN)), BLOCK_M, LAYOUT)


@gluon.jit
def _picked(words, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Pick the bits of a thread's own keys and queries."""
    OWN: gl.constexpr = _whole(BLOCK_M, LAYOUT).type.layout
    words = gl.expand_dims(gl.expand_dims(gl.expand_dims(words, 1), 3), 5)
    words = words >> _axis(4, 3, 7, OWN)
    bits = words & (1 << (16 * _axis(2, 1, 7, OWN) + 4 * _axis(4, 5, 7, OWN)))
    return gl.convert_layout(bits.reshape([64, BLOCK_M]), LAYOUT, assert_trivial=True) != 0


@gluon.constexpr_function
def _decide_ptx():
    """A word and the words of two calls: a bit where one is large enough."""
    text = "{ .reg .pred p; mov.b32 $0, $1; "
    for i in range(8):
        bit = 1 << ((i & 3) + 16 * (i >> 2))
        text += f"setp.ge.u32 p, ${2 + i}, $10; @p or.b32 $0, $0, {bit}; "
    return text + "}"


@gluon.jit
def _halves_of(x):
    """Quads with key bit 3 not set, and set: `[4, 2, 16]` each, from `[16, 16]`."""
    return gl.split(gl.permute(gl.reshape(x, [4, 2, 2, 16]), (0, 2, 3, 1)))


@gluon.jit
def _decided(word, low, high, seed, limit):
    """Put the decisions on 64 keys and 16 queries into bits 0 to 3 and 16 to 19 of words."""
    w0, w1, w2, w3 = words_in_rows(low, high, seed, False)
    a0, b0 = _halves_of(w0)
    a1, b1 = _halves_of(w1)
    a2, b2 = _halves_of(w2)
    a3, b3 = _halves_of(w3)
    text: gl.constexpr = _decide_ptx()
    return gl.inline_asm_elementwise(
        text, "=&r,r,r,r,r,r,r,r,r,r,r", [word, a0, a1, a2, a3, b0, b1, b2, b3, limit], gl.int32,
        True, 1,
    )  # fmt: skip


@gluon.jit
def _decided_words(low, quarter, high, seed, threshold, AT_ONCE: gl.constexpr):
    """Words of 64 keys and 64 queries; 16 queries, or the calls of 32 side by side."""
    LAYOUT: gl.constexpr = _quad_layout()
    lines = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)).to(gl.uint32) * quarter
    quads = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)).to(gl.uint32)
    counters = gl.expand_dims(lines, 0) + gl.expand_dims(quads, 1)
    word, _half = _halves_of(gl.zeros([16, 16], gl.int32, LAYOUT))
    limit = word.to(gl.uint32) + threshold.to(gl.uint32)
    low += 64 * quarter
    for _turn in range(4 // AT_ONCE):
        for part in gl.static_range(AT_ONCE):
            at = low - (16 * part + 16) * quarter
            word = _decided(word << 4, counters + at, high, seed, limit)
        low -= 16 * AT_ONCE * quarter
    return word


@gluon.jit
def decided_words(
    dropout, batch, head, heads, row, key, len_q, len_k, BLOCK_M: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """`kept_words` in fewer cycles where the tile allows it."""
    seed, offset, threshold, _scale = dropout
    line = (batch.to(gl.int64) * heads + head) * len_q + row
    first = offset + line * len_k + key
    high, turns = high_word(first, BLOCK_M * len_k.to(gl.int64) + 64)
    if crosses_quads(offset | key, len_k) | turns:
        words = kept_words(dropout, batch, head, heads, row, key, len_q, len_k, BLOCK_M)
    else:
        low, quarter = (first >> 2).to(gl.uint32), (len_k >> 2).to(gl.uint32)
        words = _decided_words(low, quarter, high, seed, threshold, AT_ONCE)
        if BLOCK_M == 128:
            more = _decided_words(low + 64 * quarter, quarter, high, seed, threshold, AT_ONCE)
            words = gl.join(words, more).permute((0, 1, 3, 2))
        else:
            words = words.reshape([4, 2, 1, 16])
    return words
