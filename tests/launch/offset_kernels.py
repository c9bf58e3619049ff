"""Planted kernels for the check of 32-bit offsets; compiled in child processes only."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def overflowing_kernel(x, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + inside)  # overflows: program times stride
    tl.store(x + row.to(tl.int64) * stride + inside, value)


@triton.jit
def tile_kernel(x, stride, BLOCK: tl.constexpr):
    base = x + tl.program_id(0).to(tl.int64) * stride
    inside = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(base + inside % 64, tl.load(base + inside))


@gluon.jit
def overflowing_gluon_kernel(x, stride, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    inside = gl.arange(0, BLOCK, layout)
    value = gl.load(x + gl.program_id(0).to(gl.int64) * stride + inside)
    gl.store(x + gl.program_id(0) * stride + inside, value)  # overflows: in Gluon
