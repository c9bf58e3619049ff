"""Kernels whose launches are timed: 19 arguments, next to no work."""

import triton
import triton.language as tl


@triton.jit
def nineteen(a, b, c, d, e, i1, i2, i3, i4, i5, i6, i7, i8, i9, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr):  # fmt: skip  # noqa: E501
    """Five tensors, nine integers, five constants."""
    total = i1 + i2 + i3 + i4 + i5 + i6 + i7 + i8 + i9 + C1 + C2 + C3 + C4 + C5
    tl.store(a, total.to(tl.float32))


@triton.jit
def nineteen_tma(a, b, c, d, e, i1, i2, i3, i4, i5, i6, i7, i8, i9, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, C5: tl.constexpr):  # fmt: skip  # noqa: E501
    """One tensor, four TMA descriptors, nine integers, five constants."""
    total = i1 + i2 + i3 + i4 + i5 + i6 + i7 + i8 + i9 + C1 + C2 + C3 + C4 + C5
    tile = b.load([0, 0]) + c.load([0, 0]) + d.load([0, 0])
    e.store([0, 0], tile)
    tl.store(a, total.to(tl.float32))
