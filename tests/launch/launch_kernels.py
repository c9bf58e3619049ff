"""Kernels for the tests of the launcher; they do nothing but use what they are given."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tileloom.device.compat import tma_load, tma_store


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = at < n
    tl.store(out + at, tl.load(x + at, mask=kept) + tl.load(y + at, mask=kept), mask=kept)


@triton.jit(do_not_specialize=["small"], do_not_specialize_on_alignment=["large"])
def mixed(out, source, small, large, number, truth, nothing, wide: tl.int64, BLOCK: tl.constexpr = 32):  # fmt: skip  # noqa: E501
    lanes = tl.arange(0, BLOCK)
    value = small + large + number + wide
    if nothing is not None:
        value += 1
    if truth:
        value += 2
    tl.store(out + lanes, tl.load(source + lanes) + value)


@triton.jit(do_not_specialize=["varies"])
def add_number(out, varies: tl.int64, n):
    tl.store(out + tl.arange(0, 32), (varies + n).to(out.dtype.element_ty))


@triton.jit
def annotated(out, a: tl.int32, b: tl.uint8, c: tl.float16, d: tl.float64, wide: tl.int64, MODE: tl.constexpr):  # fmt: skip  # noqa: E501
    tl.store(out, a + b + c + d + wide)


SCALE = tl.constexpr(2)


@triton.jit
def with_global(out, n):
    tl.store(out, n * SCALE)


@triton.jit
def copy_tile(source, target, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    target.store([row, 0], (source.load([row, 0]) + n).to(target.dtype))


@triton.jit
def copy_by_own(source, target, rows, columns, BLOCK: tl.constexpr):
    """Copy a matrix by descriptors made on the device, which lie in scratch memory."""
    given = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    taken = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    taken.store(at, given.load(at))


@triton.jit
def copy_to_own(source, target, rows, columns, BLOCK: tl.constexpr):
    """The same from a descriptor that is an argument."""
    taken = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    taken.store(at, source.load(at))


@gluon.jit
def gluon_add(x, out, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(out + at, gl.load(x + at, mask=at < n) + 1, mask=at < n)


@gluon.jit
def gluon_copy_tile(source, target, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    row = gl.program_id(0) * BLOCK
    mbarrier.expect(bar, source.block_type.nbytes)
    tma_load(source, [row, 0], bar, tile)
    mbarrier.wait(bar, 0)
    value = tile.load(layout) + n
    tile.store(value.to(source.dtype))
    fence_async_shared()
    tma_store(target, [row, 0], tile)
    tma.store_wait(0)


def triton_descriptor(tensor, block):
    """A descriptor of Triton over a whole tensor."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def gluon_descriptor(tensor, block):
    """The same of Gluon, for a tile in the widest swizzle."""
    bits = tensor.dtype.itemsize * 8
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    return Descriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
