"""Programs combine their tiles into one by TMA reductions; the last to arrive reads the result."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.names import reduce_add, reduce_max, store_wait_all

_ROUNDS = gl.constexpr(2)


@gluon.jit
def reduced_tiles(x_ptr, sum_desc, top_desc, sum_ptr, out_ptr, count_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, layout)), 1)
    at = rows * 16 + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, layout)), 0)
    tile = gl.allocate_shared_memory(sum_desc.dtype, [32, 16], sum_desc.layout)
    half = gl.allocate_shared_memory(top_desc.dtype, [32, 16], top_desc.layout)
    x = gl.load(x_ptr + gl.program_id(0) * 512 + at)
    half.store(x.to(top_desc.dtype))
    for i in range(_ROUNDS):
        tma.store_wait(0)
        tile.store(x + i)
        fence_async_shared()
        reduce_add(sum_desc, [0, 0], tile)
    reduce_max(top_desc, [0, 0], half)
    store_wait_all()
    ticket = gl.atomic_add(count_ptr, 1, sem="acq_rel")
    if ticket == gl.num_programs(0) - 1:
        gl.store(out_ptr + at, gl.load(sum_ptr + at))


def main(programs=3):
    torch.manual_seed(0)
    x = torch.randn(programs, 32, 16)
    total, out = torch.zeros(32, 16), torch.zeros(32, 16)
    top = torch.full((32, 16), -9.0, dtype=torch.float16)

    def describe(tensor, dtype):
        return TensorDescriptor.from_tensor(
            tensor, [32, 16], gl.NVMMASharedLayout.get_default_for([32, 16], dtype)
        )

    reduced_tiles[(programs,)](
        x, describe(total, gl.float32), describe(top, gl.float16), total, out,
        torch.zeros(1, dtype=torch.int32), num_warps=4,
    )  # fmt: skip
    expected = torch.cat([2 * x.sum(0) + programs, x.half().amax(0).float()])
    return torch.cat([out, top.float()]), expected
