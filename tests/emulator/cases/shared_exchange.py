"""Two partitions hand tiles to each other through shared memory with ordinary stores and loads."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def fill(x_ptr, buf, ready, free, rounds):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    for i in range(rounds):
        mbarrier.wait(free.index(i % 2), ((i // 2) & 1) ^ 1)
        buf.index(i % 2).store(gl.load(x_ptr + i * 128 + at) * 2)
        mbarrier.arrive(ready.index(i % 2), count=1)


@gluon.jit
def drain(y_ptr, buf, ready, free, rounds):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    for i in range(rounds):
        mbarrier.wait(ready.index(i % 2), (i // 2) & 1)
        value = buf.index(i % 2).load(layout)
        mbarrier.arrive(free.index(i % 2), count=1)
        gl.store(y_ptr + i * 128 + at, value + 1)


@gluon.jit
def shared_exchange(x_ptr, y_ptr, rounds):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buf = gl.allocate_shared_memory(gl.float32, [2, 128], flat)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [(drain, (y_ptr, buf, ready, free, rounds)), (fill, (x_ptr, buf, ready, free, rounds))],
        [4],
        [64],
    )


def main(rounds=5):
    x = torch.arange(rounds * 128, dtype=torch.float32)
    y = torch.zeros_like(x)
    shared_exchange[(1,)](x, y, rounds, num_warps=4)
    return y, x * 2 + 1
