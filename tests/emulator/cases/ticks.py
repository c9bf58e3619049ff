"""Two partitions that keep step by mbarriers alone: no data passes, so only phases can go wrong."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def strike(tick, tock, last, rounds):
    for i in range(rounds):
        mbarrier.wait(tock, (i & 1) ^ 1)
        mbarrier.arrive(tick, count=1)
    mbarrier.wait(last, 0)


@gluon.jit
def listen(out_ptr, tick, tock, last, rounds):
    for i in range(rounds):
        mbarrier.wait(tick, i & 1)
        gl.store(out_ptr + i, i + 1)
        mbarrier.arrive(tock, count=1)
    mbarrier.arrive(last, count=1)


@gluon.jit
def ticks(out_ptr, rounds):
    tick = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tock = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    last = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(tick, count=1)
    mbarrier.init(tock, count=1)
    mbarrier.init(last, count=1)
    gl.warp_specialize(
        [(listen, (out_ptr, tick, tock, last, rounds)), (strike, (tick, tock, last, rounds))],
        [1],
        [24],
    )


def main(rounds=5):
    out = torch.zeros(rounds, dtype=torch.int32)
    ticks[(1,)](out, rounds, num_warps=4)
    return out, torch.arange(1, rounds + 1)
