"""One program writes tiles by plain stores and raises flags; another one loads them by TMA."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.flag_chain import signal, wait_for
from tests.emulator.cases.names import tma_load


@gluon.jit
def fence_proxies():
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


@gluon.jit
def flagged_tile(tile_ptr, tile_desc, out_ptr, flags, TILES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, layout)), 1)
    at = rows * 16 + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, layout)), 0)
    if gl.program_id(0) == 0:
        for tile in range(TILES):
            gl.store(tile_ptr + tile * 512 + at, (at + tile).to(gl.float32))
            signal(flags + tile)
    else:
        buf = gl.allocate_shared_memory(gl.float32, [32, 16], tile_desc.layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        fence_async_shared()
        for tile in range(TILES):
            wait_for(flags + tile)
            fence_proxies()
            mbarrier.expect(bar, tile_desc.block_type.nbytes)
            tma_load(tile_desc, [tile * 32, 0], bar, buf)
            mbarrier.wait(bar, tile & 1)
            gl.store(out_ptr + tile * 512 + at, buf.load(layout) * 2)
            fence_async_shared()


def main(tiles=3):
    x, out = torch.zeros(tiles * 32, 16), torch.zeros(tiles, 512)
    layout = gl.NVMMASharedLayout.get_default_for([32, 16], gl.float32)
    desc = TensorDescriptor.from_tensor(x, [32, 16], layout)
    flagged_tile[(2,)](x, desc, out, torch.zeros(tiles, dtype=torch.int32), tiles, num_warps=4)
    return out, 2 * (torch.arange(512.0)[None] + torch.arange(float(tiles))[:, None])
