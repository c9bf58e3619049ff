"""Philox on Hopper for whole tiles of scores: `philox_words` in fewer cycles.

One of 20 products falls away, because word 2 of a counter is 0, and one is the same for all
counters that have the high word in common: the second round's of word 0. And their low words need
no arithmetic of 64 bits.

DOUBLES shares the other products out to two units. One of 32 bits by 32 (IMAD.WIDE) keeps a warp's
integer multiplier for four cycles, its lower half alone for two. The upper half can come from the
FP64 unit: a word x is kept as the double 2^84 + 2^32 x, whose bits are 0x45300000 and then x, and

    (2^84 + 2^32 x) * (A 2^-32) + (2^84 - 2^52 A) = 2^84 + A x

is rounded to zero, to a multiple of 2^32: its bits are 0x45300000 and then the upper half of A x.
(All constants are exact, and the sum is below 2^85.) What Philox does with that half is an XOR, of
the low word in place; then it is the next factor. So of the two products of a round, one chain
through all rounds goes this way, and the other one takes whole products meanwhile.

On an H200 the forward gains 2 % by it at a head dim of 64 and 6 % at 128; the backward, whose
tensor cores are busy all the while, loses 9 and 16 % (docs/attention_measurements.md).
"""

import math
import struct

import triton
import triton.language as tl

from tileloom.ops.attention.pieces_philox import next_keys, split_keys, whole_product

_A = tl.constexpr(0xD2511F53)
_B = tl.constexpr(0xCD9E8D57)
_DOUBLE = tl.constexpr(0x4530000000000000)


def _fma(factor: int) -> str:
    """Multiply by a factor as the module's text says: of two constants in hexadecimal."""
    constants = (math.ldexp(factor, -32), float(2**84 - 2**52 * factor))
    scale, base = (f"0d{struct.unpack('>Q', struct.pack('>d', x))[0]:016x}" for x in constants)
    return f"fma.rz.f64 $0, $1, {scale}, {base};"


_TIMES_A = tl.constexpr(_fma(0xD2511F53))
_TIMES_B = tl.constexpr(_fma(0xCD9E8D57))


@triton.jit
def _product(x, FACTOR: tl.constexpr):
    """Upper and lower half; the upper one as a double's bits if x is such."""
    if x.dtype == tl.uint64:
        FMA: tl.constexpr = _TIMES_A if FACTOR == _A else _TIMES_B
        upper = tl.inline_asm_elementwise(FMA, "=l,l", [x], tl.uint64, True, 1)
        return upper, x.to(tl.uint32) * FACTOR
    else:
        return whole_product(x, FACTOR)


@triton.jit
def _mixed(upper, word):
    """XOR of a word into an upper half of `_product`."""
    return upper ^ word.to(upper.dtype)


@triton.jit
def _round(p, p_low, q, q_low, key_p, key_q, OF_P: tl.constexpr, OF_Q: tl.constexpr):
    """Take a round: two factors, and the lower halves of the round before."""
    p_upper, p_next = _product(p, OF_P)
    q_upper, q_next = whole_product(q, OF_Q)
    return _mixed(p_upper, q_low ^ key_p), p_next, q_upper ^ p_low ^ key_q, q_next


@triton.jit
def words_in_rows(low, high, seed, DOUBLES: tl.constexpr):
    """Give the four words of counters `2^32 * high + low`: `low` uint32 tensor, `high` number."""
    key_a, key_b = split_keys(seed)
    if DOUBLES:
        upper, p_low = _product(low.to(tl.uint64) | _DOUBLE, _A)
    else:
        upper, p_low = _product(low, _A)
    p = _mixed(upper, key_b)
    of_all = high ^ key_a
    key_a, key_b = next_keys(key_a, key_b)
    of_all, q_low = whole_product(of_all, _A)
    q = p_low ^ (of_all ^ key_b)
    upper, p_low = _product(p, _B)
    p = _mixed(upper, key_a)
    for _ in tl.static_range(4):
        key_a, key_b = next_keys(key_a, key_b)
        p, p_low, q, q_low = _round(p, p_low, q, q_low, key_b, key_a, _A, _B)
        key_a, key_b = next_keys(key_a, key_b)
        p, p_low, q, q_low = _round(p, p_low, q, q_low, key_a, key_b, _B, _A)
    return p.to(tl.uint32), p_low, q, q_low


@triton.jit
def high_word(first, count):
    """Give the high word of the counter of `first`, and whether `count` numbers on it is another.

    Both are int64 numbers; an index is four times a counter.
    """
    high = (first >> 34) & 0x3FFFFFFF
    return high.to(tl.uint32), (((first + count) >> 34) & 0x3FFFFFFF) != high
