"""Asynchronous copies in a Gluon kernel: TMA in, arithmetic, TMA out.

Without a GPU this example runs on the emulator, which plays the copies as late as they may be:
there a kernel that forgets a wait is told so. A GPU must be of compute capability 9.0 or later.
"""

import contextlib

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import tileloom
from tileloom.cpasync import gluon as cp


@gluon.jit
def add_one_kernel(x_desc, y_desc, WAITS: gl.constexpr):
    """Each program adds 1 to a box of its own; boxes may reach past the edges."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = x_desc.block_type.shape[0]
    columns: gl.constexpr = x_desc.block_type.shape[1]
    corner = [gl.program_id(0) * rows, gl.program_id(1) * columns]
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = cp.mbarrier_allocate(1)
    cp.mbarrier_init(full.index(0), count=1)
    cp.fence_barrier_init()
    cp.arrive_and_expect_tx(full.index(0), x_desc.block_type.nbytes)
    cp.tma_load(x_desc, corner, full.index(0), tile)
    if WAITS:
        cp.mbarrier_wait(full.index(0), 0)
    tile.store(tile.load(layout) + 1)
    cp.fence_proxy_async()
    cp.tma_store(y_desc, corner, tile)
    cp.tma_store_wait(0)


def add_one(x, waits=True):
    """Launch it: rows of `x` lie at multiples of 16 bytes."""
    y, box = torch.empty_like(x), [32, 64]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)
    x_desc, y_desc = (TensorDescriptor.from_tensor(t, box, layout) for t in (x, y))
    grid = -(-x.shape[0] // box[0]), -(-x.shape[1] // box[1])
    add_one_kernel[grid](x_desc, y_desc, waits, num_warps=4)
    return y


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device(torch.cuda.current_device() if has_gpu else "cpu")
    x = torch.randn(100, 200, device=device).half()

    with contextlib.nullcontext() if has_gpu else tileloom.emulator.run():
        print(f"{(add_one(x) != x + 1).sum()} elements differ")
    if has_gpu:
        return
    with tileloom.emulator.run(collect=True) as run:
        add_one(x, waits=False)
    print(run.errors[0])


if __name__ == "__main__":
    main()
