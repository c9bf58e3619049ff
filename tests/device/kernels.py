"""Small Gluon kernels of the device tests."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tileloom.device.compat import tma_load, tma_store


@gluon.jit(do_not_specialize=["b", "h", "row", "to_b", "to_h", "to_row"])
def copy_box_kernel(source, target, b, h, row, to_b, to_h, to_row):
    smem = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, source.block_type.nbytes)
    tma_load(source, [b, h, row, 0], bar, smem)
    mbarrier.wait(bar, 0)
    tma_store(target, [to_b, to_h, to_row, 0], smem)
    tma.store_wait(0)
    mbarrier.invalidate(bar)
