"""One step of the Hopper attention forward: the scores of a block, their softmax, P V before it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tileloom.device.order import pin
from tileloom.ops.attention.pieces_dropout_sm90 import drop, kept_bits
from tileloom.ops.attention.pieces_gluon_sm90 import (
    greater,
    mask,
    rescale,
    slot_of,
    softmax,
    turn_begin,
    turn_end,
)
from tileloom.ops.attention.pieces_rings_sm90 import issue_scores, release, values_of
from tileloom.ops.attention.pieces_scores_sm90 import clear_if_careful, weigh

LOG2_E = gl.constexpr(1.4426950408889634)


_TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def packed_pairs(p, dtype: gl.constexpr):
    """P in half precision, two neighbours in a word: `[M, N / 2]`, int32.

    As halves it would be carried from loop to loop as 16-bit values, which ptxas swaps and swaps
    back: 64 instructions of 500 in a step.
    """
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    text: gl.constexpr = _TO_BF16 if dtype == gl.bfloat16 else _TO_F16
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], gl.int32, False, 1)


@gluon.jit
def from_pairs(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """What `packed_pairs` packed, as the left operand of P V."""
    pairs = gl.reshape(gl.join(words, words), [words.shape[0], words.shape[1] * 2])
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [pairs], gl.bfloat16, False, 2)
    else:
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [pairs], gl.float16, False, 2)
    return gl.convert_layout(p, LAYOUT, assert_trivial=True)


@gluon.jit
def weighed_softmax(x, m, total, LAZY: gl.constexpr):
    """`softmax` of scores that are scaled and have their bias; m is in natural units.

    The maximum is taken away before anything is multiplied by log2(e) where that would overflow: a
    row that holds finfo.min and no more weighs its keys alike. Such keys differ by nothing or by so
    much that any factor tells it.
    """
    M: gl.constexpr = x.shape[0]
    part = gl.max(gl.reshape(x, [M, x.shape[1] // 8, 8]), 1)
    row_max = gl.convert_layout(gl.max(part, 1), m.type.layout)
    m_new = greater(gl.maximum(m, row_max), m, LAZY)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    unit = gl.where(gl.abs(base) > 1e38, 0.5, LOG2_E)
    alpha = gl.exp2((m - base) * LOG2_E)
    p = gl.exp2(x * gl.expand_dims(unit, 1) - gl.expand_dims(base * unit, 1))
    wide = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout)), 1)
    sums = gl.sum(gl.reshape(p, [M, x.shape[1] // 8, 8]), 1)
    return p, alpha, m_new, total * wide + sums


@gluon.jit
def block_softmax(
    s, m, total, scale, row, col, lo, hi, item, given, WG: gl.constexpr, CONSUMERS: gl.constexpr,
    MASK_RIGHT: gl.constexpr, MASK_LEFT: gl.constexpr, EDGE: gl.constexpr, GUARD: gl.constexpr,
    EVEN: gl.constexpr, BIAS_MODE: gl.constexpr, BIAS_VECTOR: gl.constexpr,
    MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """Bias, masks and softmax of a block whose scores are there; GUARD as in `softmax`."""
    CUT: gl.constexpr = MASK_RIGHT or MASK_LEFT or EDGE
    HIDES: gl.constexpr = BIAS_MODE + MASK_MODE > 0
    if HIDES:
        _, _, _, _, bias_at, _, bias_k, _, mask_at, _, mask_k, ride, full, empty = given
        s = weigh(
            s, scale, col, item // 2, bias_at, bias_k, mask_at, mask_k, ride, full, empty, WG,
            CONSUMERS, BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR, EVEN,
        )  # fmt: skip
    if CUT:
        s = mask(s, row, col, lo, hi, MASK_RIGHT, MASK_LEFT, EDGE)
    if BIAS_MODE > 0:
        return weighed_softmax(s, m, total, LAZY)
    else:
        return softmax(s, m, total, scale, GUARD or CUT or HIDES, LAZY)


@gluon.jit
def step(
    q, rings, ring_full, ring_empty, p, acc, m, total, item, row, col, lo, hi, scale,
    given, dropout, WG: gl.constexpr, CONSUMERS: gl.constexpr, MASK_RIGHT: gl.constexpr,
    MASK_LEFT: gl.constexpr, EDGE: gl.constexpr, PIN: gl.constexpr, TURNS: gl.constexpr,
    HELD: gl.constexpr, LAZY: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, EVEN: gl.constexpr, BIAS_MODE: gl.constexpr,
    BIAS_VECTOR: gl.constexpr, MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Q K^T of a block and P V of the one before in flight together; its softmax under P V.

    `given` is what `pieces_scores_sm90.py` wants of a bias or mask tensor, `dropout` what
    `kept_bits` wants.
    """
    SLOTS: gl.constexpr = 2 * ring_full[0].type.shape[0]
    BLOCK_N: gl.constexpr = rings[0].type.shape[3]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    if DROPOUT:
        # Before the products: while scores are in registers, ptxas runs one Philox after another.
        rows, seed, threshold = dropout
        bits = kept_bits(rows, col, seed, threshold, BLOCK_N)
    p = from_pairs(p, q[0].dtype, P_LAYOUT)
    k_slot, k_phase = slot_of(item, SLOTS)
    v_slot, v_phase = slot_of(item - 1, SLOTS)
    mbarrier.wait(ring_full[0].index(k_slot // 2), k_phase)
    if BIAS_MODE + MASK_MODE > 0:
        clear_if_careful(
            rings, ring_full, item, col, lo, hi, given, WG, CONSUMERS, HAS_LEFT, HAS_RIGHT,
            BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR,
        )  # fmt: skip
    turn_begin(WG, TURNS)
    s = issue_scores(q, rings, k_slot, SLOTS, zero, HELD)
    mbarrier.wait(ring_full[1].index(v_slot // 2), v_phase)
    acc = warpgroup_mma(p, values_of(rings, v_slot, SLOTS), acc, is_async=True)
    turn_end(WG, CONSUMERS, TURNS)
    s = warpgroup_mma_wait(1, deps=[s])
    release(ring_empty, k_slot, 0, CONSUMERS)
    p_new, alpha, m, total = block_softmax(
        s, m, total, scale, row, col, lo, hi, item, given, WG, CONSUMERS, MASK_RIGHT, MASK_LEFT,
        EDGE, False, EVEN, BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR, LAZY,
    )  # fmt: skip
    if DROPOUT:
        p_new = drop(p_new, bits)
    if PIN:
        total = pin(total, 4)
    acc = warpgroup_mma_wait(0, deps=[acc])
    p_half = packed_pairs(p_new, q[0].dtype)
    release(ring_empty, v_slot, 1, CONSUMERS)
    acc = rescale(acc, alpha, LAZY)
    return p_half, acc, m, total
