"""A TMA box begins at a multiple of 16 bytes of the innermost dimension, or the hardware stops."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom import emulator
from tileloom.device.compat import tma_load, tma_store
from tileloom.emulator import OutOfBoundsError


@gluon.jit(do_not_specialize=["column", "to"])
def copy(source, target, column, to):
    smem = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, source.block_type.nbytes)
    tma_load(source, [0, column], bar, smem)
    mbarrier.wait(bar, 0)
    tma_store(target, [0, to], smem)
    tma.store_wait(0)


def _copy(dtype, column, to, device="cpu"):
    x = torch.arange(8 * 96, device=device).reshape(8, 96).to(dtype)
    out = torch.zeros_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([8, 32], getattr(gl, str(dtype).split(".")[1]))
    descs = [TensorDescriptor.from_tensor(t, [8, 32], layout) for t in (x, out)]
    copy[(1,)](*descs, column, to, num_warps=4)
    return x, out


@pytest.mark.parametrize(
    ("dtype", "column", "to", "text"),
    [
        (torch.float16, -95, 0, "begins -190 bytes into the innermost dimension"),
        (torch.float16, 4, 0, "begins 8 bytes into the innermost dimension, and TMA begins at mul"),
        (torch.float32, 2, 0, "begins 8 bytes into"),
        (torch.float32, 0, 6, "begins 24 bytes into"),
    ],
)
def test_a_box_that_begins_between_is_an_error(dtype, column, to, text):
    with pytest.raises(OutOfBoundsError, match=text), emulator.run():
        _copy(dtype, column, to)


@pytest.mark.parametrize(
    ("dtype", "column", "to"),
    [(torch.float16, 8, 24), (torch.float16, -8, 72), (torch.float32, 4, 60)],
)
def test_a_box_that_begins_at_16_bytes_is_copied(dtype, column, to):
    with emulator.run():
        x, out = _copy(dtype, column, to)
    first = max(0, -column)
    count = min(32, 96 - to)
    right = x[:, column + first : column + count]
    assert torch.equal(out[:, to + first : to + count], right)


@pytest.mark.gpu
def test_on_a_gpu():
    x, out = _copy(torch.float16, 8, 24, "cuda")
    assert torch.equal(out[:, 24:56], x[:, 8:40])
