"""One step of the Hopper attention forward: the scores of a block, their softmax, P V before it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tileloom.device.barriers import arrive_each_thread
from tileloom.device.order import pin
from tileloom.ops.attention.pieces_dropout_sm90 import drop, kept_bits
from tileloom.ops.attention.pieces_gluon_sm90 import (
    issue_scores,
    mask,
    slot_of,
    softmax,
    turn_begin,
    turn_end,
    values_of,
)
from tileloom.ops.attention.pieces_scores_sm90 import clear_if_careful, weigh

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def weighed_softmax(x, m, total):
    """`softmax` of scores that are scaled and have their bias; m is in natural units.

    The maximum is taken away before anything is multiplied by log2(e) where that would overflow: a
    row that holds finfo.min and no more weighs its keys alike. Such keys differ by nothing or by so
    much that any factor tells it.
    """
    M: gl.constexpr = x.shape[0]
    part = gl.max(gl.reshape(x, [M, x.shape[1] // 8, 8]), 1)
    m_new = gl.maximum(m, gl.convert_layout(gl.max(part, 1), m.type.layout))
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
    MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
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
        return weighed_softmax(s, m, total)
    else:
        return softmax(s, m, total, scale, GUARD or CUT or HIDES)


@gluon.jit
def step(
    q, rings, ring_full, ring_empty, p, acc, m, total, item, row, col, lo, hi, scale,
    given, dropout, WG: gl.constexpr, CONSUMERS: gl.constexpr, MASK_RIGHT: gl.constexpr,
    MASK_LEFT: gl.constexpr, EDGE: gl.constexpr, PIN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, EVEN: gl.constexpr, BIAS_MODE: gl.constexpr,
    BIAS_VECTOR: gl.constexpr, MASK_MODE: gl.constexpr, MASK_VECTOR: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Q K^T of a block and P V of the one before in flight together; its softmax under P V.

    `given` is what `pieces_scores_sm90.py` wants of a bias or mask tensor, `dropout` what
    `kept_bits` wants.
    """
    SLOTS: gl.constexpr = ring_full.type.shape[0]
    BLOCK_N: gl.constexpr = rings[0].type.shape[3]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    if DROPOUT:
        # Before the products: while scores are in registers, ptxas runs one Philox after another.
        first, crosses, seed, threshold = dropout
        bits = kept_bits(first, col, crosses, seed, threshold, BLOCK_N)
    k_slot, k_phase = slot_of(item, SLOTS)
    v_slot, v_phase = slot_of(item - 1, SLOTS)
    mbarrier.wait(ring_full.index(k_slot), k_phase)
    if BIAS_MODE + MASK_MODE > 0:
        clear_if_careful(
            rings, ring_full, item, col, lo, hi, given, WG, CONSUMERS, HAS_LEFT, HAS_RIGHT,
            BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR,
        )  # fmt: skip
    turn_begin(WG)
    s = issue_scores(q, rings, k_slot, SLOTS, zero)
    mbarrier.wait(ring_full.index(v_slot), v_phase)
    acc = warpgroup_mma(p, values_of(rings, v_slot, SLOTS), acc, is_async=True)
    turn_end(WG, CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s])
    arrive_each_thread(ring_empty.index(k_slot))
    p_new, alpha, m, total = block_softmax(
        s, m, total, scale, row, col, lo, hi, item, given, WG, CONSUMERS, MASK_RIGHT, MASK_LEFT,
        EDGE, False, EVEN, BIAS_MODE, BIAS_VECTOR, MASK_MODE, MASK_VECTOR,
    )  # fmt: skip
    if DROPOUT:
        p_new = drop(p_new, bits)
    p_half = p_new.to(q[0].dtype)
    if PIN:
        total = pin(total, 4)
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive_each_thread(ring_empty.index(v_slot))
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1)
    return gl.convert_layout(p_half, P_LAYOUT, assert_trivial=True), acc, m, total
