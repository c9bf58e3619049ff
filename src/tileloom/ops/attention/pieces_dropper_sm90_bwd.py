"""A warpgroup of its own for dropout in the Hopper attention backward.

Beside the consumers, a dropper decides which scores of a step are kept, ahead of them, and hands
the words over (`pieces_gluon_sm90_dropout.py`).

Who waits for whom (mbarriers, by phase; counts in brackets):
    words_full[s, w]  (1)    dropper -> consumer w: the words of its keys in a step are there
    words_empty[s, w] (128)  every thread of consumer w -> dropper: it has read them
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileloom.device.barriers import arrive_each_thread
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import following
from tileloom.ops.attention.pieces_gluon_sm90_dropout import decided_words, scores_of


@gluon.jit
def allocate_words(BLOCK_M: gl.constexpr, SLOTS: gl.constexpr):
    """Shared memory for the words of SLOTS steps, and its barriers."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [2 * SLOTS, 2 * BLOCK_M], layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], bars)
    for b in gl.static_range(2 * SLOTS):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=128)
    return words, full, empty


@gluon.jit
def taken_scores(handed, j, WG: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Which scores of step j are kept, as `kept_scores` says; the consumers' side."""
    words, full, empty = handed
    SLOTS: gl.constexpr = words.type.shape[0] // 2
    slot, phase = slot_of(j, SLOTS)
    at = 2 * slot + WG
    mbarrier.wait(full.index(at), phase)
    kept = scores_of(words.index(at), BLOCK_M, LAYOUT)
    arrive_each_thread(empty.index(at))
    return kept


@gluon.jit
def dropper(
    dropout, handed, batch, kv_head, group, heads_q, key, start, stop, shift, padded_q, len_q,
    len_k, BLOCK_M: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Decide for both consumers, step by step."""
    words, full, empty = handed
    SLOTS: gl.constexpr = words.type.shape[0] // 2
    steps = (stop - start) // BLOCK_M * group
    row = start
    head = kv_head * group
    line = start
    for j in range(steps):
        slot, phase = slot_of(j, SLOTS)
        for w in range(2):
            bits = decided_words(
                dropout, batch, head, heads_q, row - shift, key + 64 * w, len_q, len_k, BLOCK_M,
                AT_ONCE,
            )  # fmt: skip
            mbarrier.wait(empty.index(2 * slot + w), phase ^ 1)
            words.index(2 * slot + w).store(bits.reshape([2 * BLOCK_M]))
            mbarrier.arrive(full.index(2 * slot + w), count=1)
        head += (row + BLOCK_M == stop).to(gl.int32)
        row, line = following(row, line, start, stop, padded_q, BLOCK_M)
