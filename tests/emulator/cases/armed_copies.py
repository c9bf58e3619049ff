"""TMA loads that one partition announces, another issues and a third one waits for.

Nothing tells the partition that announces a load when the one before was waited for: only the load
itself, issued after that wait, keeps the mbarrier from going two phases on.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.names import tma_load


@gluon.jit
def announce(desc, full, rounds):
    for i in range(rounds):
        mbarrier.wait(full, (i & 1) ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes)


@gluon.jit
def issue(desc, buf, full, free, rounds):
    for i in range(rounds):
        mbarrier.wait(free, (i & 1) ^ 1)
        tma_load(desc, [i * 16, 0], full, buf)


@gluon.jit
def use(out_ptr, buf, full, free, rounds):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    for i in range(rounds):
        mbarrier.wait(full, i & 1)
        value = buf.load(layout)
        fence_async_shared()
        mbarrier.arrive(free, count=1)
        gl.store(out_ptr + (i * 16 + rows) * 64 + cols, value + 1)


@gluon.jit
def armed_copies(desc, out_ptr, rounds):
    buf = gl.allocate_shared_memory(gl.float16, [16, 64], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (use, (out_ptr, buf, full, free, rounds)),
            (announce, (desc, full, rounds)),
            (issue, (desc, buf, full, free, rounds)),
        ],
        [1, 1],
        [24, 24],
    )


def main(rounds=5):
    torch.manual_seed(0)
    x = torch.randn(rounds * 16, 64, dtype=torch.float16)
    out = torch.zeros_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float16)
    desc = TensorDescriptor.from_tensor(x, [16, 64], layout)
    armed_copies[(1,)](desc, out, rounds, num_warps=4)
    return out, x + 1
