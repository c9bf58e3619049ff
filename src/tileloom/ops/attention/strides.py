"""Strides as the portable kernels take them: in units that tell the compiler their alignment."""

from __future__ import annotations

import torch

from tileloom.ops.attention.problem import AttentionProblem


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 where they do not matter."""
    return tuple(s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape))


def batch_strides(tensor: torch.Tensor, problem: AttentionProblem) -> tuple[int, ...]:
    """Strides of `[B, H, L, D]`; of packed sequences, B is a sequence's first row."""
    batch, head, row, column = strides_of(tensor)
    return (row if problem.packed else batch), head, row, column


def vector_of(widest: int, *tensors: torch.Tensor) -> int:
    """Return the unit of the strides: `widest` elements, 1, or 0 if a last dimension has a stride.

    `widest` is 16 bytes; whether the base is aligned as well Triton sees from the pointer.
    """
    vector = widest
    for tensor in tensors:
        *outer, last = strides_of(tensor)
        if last != 1 and tensor.shape[-1] > 1:
            return 0
        if any(s % widest for s in outer):
            vector = 1
    return vector


def scores_arguments(
    tensor: torch.Tensor | None, full: tuple[int, int, int, int]
) -> tuple[int, int, tuple[int, ...]]:
    """Return mode, unit and strides of a mask or bias, broadcast to `[B, Hq, Lq, Lk]`.

    The mode is 0 without the tensor, 1 if it is the same for every row, 2 otherwise.
    """
    if tensor is None:
        return 0, 0, (0, 0, 0, 0)
    whole = tensor.expand(full)
    strides = strides_of(whole)
    vector = vector_of(16 // tensor.element_size(), whole)
    mode = 1 if strides[2] == 0 else 2
    return mode, vector, tuple(s // (vector or 1) for s in strides)
