"""A cross-entropy problem as plain data: everything that dispatch and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tileloom.ops.rowwise.rows import Rows, rows_of

REDUCTIONS = ("mean", "sum", "none")
Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Options:
    """What changes the loss besides logits and labels.

    Attributes:
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
        ignore_index: Rows with this label do not count.
        soft_cap: Bound of the logits; 0 for none.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    label_smoothing: float
    ignore_index: int
    soft_cap: float
    reduction: str

    @staticmethod
    def of(
        label_smoothing: float, ignore_index: int, soft_cap: float | None, reduction: str
    ) -> Options:
        """Take them as the public function has them."""
        return Options(float(label_smoothing), ignore_index, float(soft_cap or 0.0), reduction)


@dataclass(frozen=True)
class CrossEntropyProblem:
    """Sizes and layouts of one call, forward or backward.

    Attributes:
        rows: The rows of the logits (backward also of their gradient); loose are the labels, one a
            row, and backward the gradient of the losses.
        dtype: Dtype of the logits.
        options: See `Options`.
        is_backward: Which of the two it is.
    """

    rows: Rows
    dtype: torch.dtype
    options: Options
    is_backward: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is no row, or rows have no class."""
        return self.rows.count == 0 or self.rows.width == 0


def _each_row(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor with one entry a row."""
    return (*tensor.stride(), 1)


def forward_problem(
    logits: torch.Tensor, labels: torch.Tensor, options: Options
) -> CrossEntropyProblem:
    """Read the problem of a forward call."""
    rows = rows_of(
        logits.shape, (logits.stride(),), logits.element_size(), loose=(_each_row(labels),)
    )
    return CrossEntropyProblem(rows, logits.dtype, options, False)


def backward_problem(
    grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    out_strides: tuple[int, ...],
    options: Options,
) -> CrossEntropyProblem:
    """Read the problem of a backward call; `out_strides` are those of the logits' gradient."""
    loose = (_each_row(labels), _each_row(grad.expand(labels.shape)))
    strides = (logits.stride(), out_strides)
    rows = rows_of(logits.shape, strides, logits.element_size(), loose=loose)
    return CrossEntropyProblem(rows, logits.dtype, options, True)
