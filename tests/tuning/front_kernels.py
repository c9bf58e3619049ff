"""Kernels as a user would write them, for the decorators of `tileloom.tuning`."""

import triton
import triton.language as tl

from tileloom import tuning


@tuning.reduction(sizes={"x": "rows", "r": "cols"}, hint="inner")
@triton.jit
def row_sum(x, y, rows, cols, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    total = tl.zeros((XBLOCK, R0_BLOCK), tl.float32)
    for at in range(0, cols, R0_BLOCK):
        col = at + tl.arange(0, R0_BLOCK)[None, :]
        total += tl.load(x + row * cols + col, (row < rows) & (col < cols), 0.0)
    tl.store(y + row, tl.sum(total, 1)[:, None], row < rows)


@tuning.persistent_reduction(sizes={"x": "rows", "r": "cols"}, hint="inner")
@triton.jit
def row_max(x, y, rows, cols, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    col = tl.arange(0, R0_BLOCK)[None, :]
    part = tl.load(x + row * cols + col, (row < rows) & (col < cols), float("-inf"))
    tl.store(y + row, tl.max(part, 1)[:, None], row < rows)


@tuning.pointwise(sizes={"x": "cols", "y": "rows"}, hint="square")
@triton.jit
def transpose(x, out, rows, cols, XBLOCK: tl.constexpr, YBLOCK: tl.constexpr):
    col = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    row = tl.program_id(1).to(tl.int64) * YBLOCK + tl.arange(0, YBLOCK)[None, :]
    seen = (row < rows) & (col < cols)
    tl.store(out + col * rows + row, tl.load(x + row * cols + col, seen), seen)


@tuning.pointwise(sizes={"x": "n"}, changed=["x"], refine=True)
@triton.jit
def scale(x, n, factor, SQUARED: tl.constexpr, XBLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)
    value = tl.load(x + at, at < n)
    if SQUARED:
        value *= value
    tl.store(x + at, value * factor, at < n)
