"""Small Gluon kernels of the tests of cpasync."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tileloom.device.compat import tma_load


@gluon.jit(do_not_specialize=["row", "column"])
def read_box_kernel(source, out, row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Load the box at (row, column) by TMA and write it out, element by element."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, source.block_type.nbytes)
    tma_load(source, [row, column], bar, smem)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    gl.store(out + r * COLUMNS + c, smem.load(layout))
