"""Kernels that the bundle tests compile; imported only in the compiling processes."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def scalars_kernel(out, a, b, c, d, e, f, g, h, i, j, k, absent, one, MODE: tl.constexpr):
    """Write what arrived: each argument as a double at its own place."""
    tl.store(out + 0, a.to(tl.float64))
    tl.store(out + 1, b.to(tl.float64))
    tl.store(out + 2, c.to(tl.float64))
    tl.store(out + 3, d.to(tl.float64))
    tl.store(out + 4, e.to(tl.float64))
    tl.store(out + 5, f.to(tl.float64))
    tl.store(out + 6, g.to(tl.float64))
    tl.store(out + 7, h.to(tl.float64))
    tl.store(out + 8, i.to(tl.float64))
    tl.store(out + 9, j.to(tl.float64))
    tl.store(out + 10, k.to(tl.float64))
    if absent is None:
        tl.store(out + 11, one * 1.0)
    if MODE == "twelve":
        tl.store(out + 12, 12.0)


@triton.jit
def scratch_kernel(x, out, BLOCK: tl.constexpr):
    """Copy a tile by a descriptor made on the device, which needs scratch memory."""
    desc = tl.make_tensor_descriptor(x, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    tile = desc.load([0, 0])
    at = tl.arange(0, BLOCK)
    tl.store(out + at[:, None] * BLOCK + at[None, :], tile)
