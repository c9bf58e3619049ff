"""The Hopper GEMM's steps along k: one wgmma in flight, the slot before it handed back."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tileloom.device.barriers import arrive_each_thread
from tileloom.ops.gemm.pieces_gluon_sm90 import matrix, step_on


@gluon.jit
def zeros(M: gl.constexpr, N: gl.constexpr):
    """An accumulator of a warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    return gl.zeros([M, N], gl.float32, layout)


@gluon.jit
def hand_back(bar, TAIL: gl.constexpr):
    """Say that a slot has been read: each thread, or with a wide tail one when all have met.

    The barrier costs the steps of 128 x 320 less than 256 arrivals (2 %); others gain nothing.
    """
    if TAIL >= 64:
        mbarrier.arrive(bar, count=1)
    else:
        arrive_each_thread(bar)


@gluon.jit
def begin(
    acc, a_smem, b_smem, stage, WG: gl.constexpr, A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr, SPLIT_N: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Issue a tile's first step into the registers of `acc`, whatever they hold."""
    A_PARTS: gl.constexpr = 1 if SPLIT_N else CONSUMERS
    B_PARTS: gl.constexpr = CONSUMERS if SPLIT_N else 1
    a = matrix(a_smem.index(stage * A_PARTS + (0 if SPLIT_N else WG)), A_TRANSPOSED)
    b = matrix(b_smem.index(stage * B_PARTS + (WG if SPLIT_N else 0)), B_TRANSPOSED)
    acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(1, deps=(acc,))  # waits for nothing: only this one is under way


@gluon.constexpr_function
def _is_always(begun):
    return isinstance(begun, int) and begun == 1


@gluon.jit
def multiply(
    acc, tail, a_smem, b_smem, tail_smem, full, empty, k_steps, stage, phase, WG: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, SPLIT_N: gl.constexpr,
    CONSUMERS: gl.constexpr, TAIL: gl.constexpr, begun, KEEPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part of a tile; its slots are handed back one step late.

    If `begun`, 1 or 0, the first step is under way in `acc`. The last TAIL columns are an
    accumulator of their own, `tail`; without any it is not used. Also returns the slot of the last
    step, which with KEEPS is not handed back.
    """
    A_PARTS: gl.constexpr = 1 if SPLIT_N else CONSUMERS
    B_PARTS: gl.constexpr = CONSUMERS if SPLIT_N else 1
    STAGES: gl.constexpr = a_smem.type.shape[0] // A_PARTS
    ALWAYS: gl.constexpr = _is_always(begun)
    before = 0
    if begun:
        before = stage
        stage, phase = step_on(stage, phase, STAGES)
    for step in range(begun, k_steps):
        mbarrier.wait(full.index(stage), phase)
        a = matrix(a_smem.index(stage * A_PARTS + (0 if SPLIT_N else WG)), A_TRANSPOSED)
        b = matrix(b_smem.index(stage * B_PARTS + (WG if SPLIT_N else 0)), B_TRANSPOSED)
        adds = True if ALWAYS else step != 0
        if TAIL > 0:
            acc = warpgroup_mma(a, b, acc, use_acc=adds, is_async=True)
            b = matrix(tail_smem.index(stage * B_PARTS + (WG if SPLIT_N else 0)), B_TRANSPOSED)
            tail = warpgroup_mma(a, b, tail, use_acc=adds, is_async=True)
            acc, tail = warpgroup_mma_wait(2, deps=(acc, tail))
        else:
            acc = warpgroup_mma(a, b, acc, use_acc=adds, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
        if adds:
            hand_back(empty.index(before), TAIL)
        before = stage
        stage, phase = step_on(stage, phase, STAGES)
    if TAIL > 0:
        acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if not KEEPS:
        hand_back(empty.index(before), TAIL)
    return acc, tail, before, stage, phase
