"""A tile comes by TMA as fp16; the same bytes then hold fp32 results that leave by TMA."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.names import reinterpret, tma_load, tma_store


@gluon.jit
def load_tiles(x_desc, x_s, full, empty, tiles):
    for tile in range(tiles):
        mbarrier.wait(empty, (tile & 1) ^ 1)
        mbarrier.expect(full, x_desc.block_type.nbytes)
        tma_load(x_desc, [tile * 64, 0], full, x_s)


@gluon.jit
def store_products(y_desc, x_s, full, empty, tiles):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    y_s = reinterpret(x_s, gl.float32, [2, 16, 64], y_desc.layout)
    for tile in range(tiles):
        mbarrier.wait(full, tile & 1)
        a = x_s.slice(0, 16).load(layout).to(gl.float32)
        b = x_s.slice(16, 16).load(layout).to(gl.float32)
        c = x_s.slice(32, 16).load(layout).to(gl.float32)
        d = x_s.slice(48, 16).load(layout).to(gl.float32)
        y_s.index(0).store(a * b)
        y_s.index(1).store(c * d)
        fence_async_shared()
        tma_store(y_desc, [tile * 32, 0], y_s.index(0))
        tma_store(y_desc, [tile * 32 + 16, 0], y_s.index(1))
        tma.store_wait(0)
        mbarrier.arrive(empty, count=1)


@gluon.jit
def reused_bytes(x_desc, y_desc, tiles):
    x_s = gl.allocate_shared_memory(gl.float16, [64, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (store_products, (y_desc, x_s, full, empty, tiles)),
            (load_tiles, (x_desc, x_s, full, empty, tiles)),
        ],
        [1],
        [24],
    )


def main(tiles=3):
    torch.manual_seed(0)
    x = torch.randn(tiles * 64, 64, dtype=torch.float16)
    y = torch.zeros(tiles * 32, 64)
    wide = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    narrow = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float32)
    reused_bytes[(1,)](
        TensorDescriptor.from_tensor(x, [64, 64], wide),
        TensorDescriptor.from_tensor(y, [16, 64], narrow), tiles, num_warps=4,
    )  # fmt: skip
    rows = x.float().view(tiles, 2, 2, 16, 64)
    return y, rows.prod(2).reshape(tiles * 32, 64)
