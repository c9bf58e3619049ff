"""A softmax problem as plain data: everything that dispatch and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.ops.rowwise.rows import Rows, rows_of


@dataclass(frozen=True)
class SoftmaxProblem:
    """Sizes and layouts of one call, forward or backward.

    Attributes:
        rows: The rows of x and y, with the mask's as the loose tensor; backward of y, dy and dx.
        dtype: Dtype of x.
        has_mask: Whether a mask is given.
    """

    rows: Rows
    dtype: torch.dtype
    has_mask: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no element at all."""
        return self.rows.count == 0 or self.rows.width == 0


def forward_problem(x: torch.Tensor, mask: torch.Tensor | None) -> SoftmaxProblem:
    """Read the problem of a forward call; the mask broadcasts to x."""
    strides = (x.stride(), torch.empty_like(x, device="meta").stride())
    loose = None if mask is None else mask.expand(x.shape).stride()
    rows = rows_of(x.shape, strides, x.element_size(), loose=(loose,))
    return SoftmaxProblem(rows, x.dtype, mask is not None)


def backward_problem(y: torch.Tensor, dy: torch.Tensor) -> SoftmaxProblem:
    """Read the problem of a backward call."""
    strides = (y.stride(), dy.stride(), torch.empty_like(y, device="meta").stride())
    return SoftmaxProblem(rows_of(y.shape, strides, y.element_size()), y.dtype)
