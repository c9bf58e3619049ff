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

from tileloom.ops.attention.pieces_philox import first_index, keep_quad

# `where`, but LLVM would round to half precision first, and then choose and pack 16 bits at a time.
_KEEP = gl.constexpr("{ .reg .pred k; setp.ne.s32 k, $2, 0; selp.f32 $0, $1, 0f00000000, k; }")


@gluon.constexpr_function
def quad_layout():
    """`[64, 8]`: rows, and eight quads of keys, whose bits are those of the keys 4, 8 and 16."""
    lanes = [[0, 2], [0, 1], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], [0, 4]], lanes, [[16, 0], [32, 0]], [], [64, 8])


@gluon.constexpr_function
def pair_layout():
    """`[64, 2, 2, 2]`: rows, and key bits 8, 4 and 2 where the accumulator has them."""
    lanes = [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    regs, warps = [[8, 0, 0, 0], [0, 1, 0, 0]], [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [64, 2, 2, 2])


@gluon.jit
def first_of_rows(offset, batch, head, heads, row, len_q, len_k):
    """The Philox index of key 0 of each row of a warpgroup, int64 `[64]`."""
    i = row + gl.arange(0, 64, gl.SliceLayout(1, quad_layout()))
    return first_index(offset, batch.to(gl.int64), head.to(gl.int64), heads, i, len_q, len_k)


@gluon.jit
def _collected(low, high, quad, weight, chunk):
    """Put the decisions of 32 keys into the words of the first and last two of a quad."""
    k0, k1, k2, k3 = quad
    of_low = gl.where(k0, weight, 0) | gl.where(k1, weight * 2, 0)
    of_high = gl.where(k2, weight, 0) | gl.where(k3, weight * 2, 0)
    low = low | (gl.sum(gl.reshape(of_low, [64, 2, 4]), 1) << (chunk * 8))
    high = high | (gl.sum(gl.reshape(of_high, [64, 2, 4]), 1) << (chunk * 8))
    return low, high


@gluon.jit
def kept_bits(first, col, crosses, seed, threshold, BLOCK_N: gl.constexpr):
    """Which scores are kept: bit 2 a + e of word `[i, q]` is that of row i, key 8 a + 2 q + e.

    `first` is that of `first_of_rows`; `col` is the block's first key. `crosses`: four keys from
    `col` on may take numbers of two Philox calls.
    """
    L: gl.constexpr = quad_layout()
    start = first + col.to(gl.int64)
    lane = gl.expand_dims((start & 3).to(gl.int32), 1)
    quads = gl.arange(0, 8, gl.SliceLayout(0, L))
    counter = gl.expand_dims(start >> 2, 1) + gl.expand_dims(quads.to(gl.int64), 0)
    weight = gl.expand_dims(gl.where(quads >= 4, 16, 1), 0)
    HALVES: gl.constexpr = gl.reshape(counter, [64, 2, 4]).type.layout
    low = gl.zeros([64, 4], gl.int32, gl.SliceLayout(1, HALVES))
    high = low
    if crosses:
        for chunk in range(BLOCK_N // 32):
            quad = keep_quad(counter + chunk * 8, lane, True, seed, threshold)
            low, high = _collected(low, high, quad, weight, chunk)
    else:
        for chunk in range(BLOCK_N // 32):
            quad = keep_quad(counter + chunk * 8, lane, False, seed, threshold)
            low, high = _collected(low, high, quad, weight, chunk)
    pairs = gl.reshape(gl.join(low, high), [64, 2, 2, 2])
    pairs = gl.permute(gl.convert_layout(pairs, pair_layout()), (0, 2, 3, 1))
    even, odd = gl.split(pairs)
    return gl.reshape(even | (odd << 2), [64, 4])


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
    bit, _ = gl.broadcast(bits & (1 << (2 * a + e)), x)
    x = gl.inline_asm_elementwise(_KEEP, "=f,f,r", [x, bit], gl.float32, True, 1)
    return gl.convert_layout(gl.reshape(x, p.shape), p.type.layout, assert_trivial=True)
