"""TMA descriptors over whole tensors of four dimensions: the boxes that Hopper kernels load."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def layout_arguments(columns: int, itemsize: int = 2) -> dict[str, int]:
    """The arguments of `tile_layout`'s layout, by name."""
    swizzle = min(128, itemsize * columns)
    return {"swizzle_byte_width": swizzle, "element_bitwidth": 8 * itemsize, "rank": 4}


@functools.cache
def tile_layout(columns: int, itemsize: int = 2) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a tile `[1, 1, rows, columns]`: the widest swizzle that fits."""
    swizzle, bits, rank = layout_arguments(columns, itemsize).values()
    return gl.NVMMASharedLayout(swizzle, bits, rank)


def descriptor(
    x: torch.Tensor, rows: int, columns: int, is_packed: bool = False
) -> TensorDescriptor:
    """A TMA descriptor over the whole tensor `[B, H, L, D]`, for boxes `[1, 1, rows, columns]`.

    Of packed sequences, `[1, H, T, D]`, the first dimension is a sequence's first row.
    """
    # The stride of a dimension of size 1 is never used, but the driver checks it.
    unused = -(-x.shape[-1] // 16) * 16
    strides = [s if n > 1 else unused for s, n in zip(x.stride(), x.shape[:-1])]
    box = [1, 1, rows, columns]
    layout = tile_layout(columns, x.itemsize)
    if not is_packed:
        return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)
    shape = [x.shape[2], *x.shape[1:]]
    return TensorDescriptor(x, shape, [strides[2], *strides[1:], 1], box, layout)
