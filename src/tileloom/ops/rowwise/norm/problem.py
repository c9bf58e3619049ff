"""A normalisation as plain data: everything that dispatch, the rule and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.ops.rowwise.rows import Rows


@dataclass(frozen=True)
class NormProblem:
    """Sizes, types and options of one call, forward or backward.

    Attributes:
        rows: The rows of x, residual and out; backward: of the output's gradient, the stream's
            gradient, x and dx.
        dtype: Dtype of x and of everything in its shape.
        is_centred: Whether the mean is taken off: layer norm.
        has_weight: Whether there is a weight; backward: whether its gradient is asked for too.
        has_bias: Whether there is a bias; backward: whether its gradient is asked for.
        has_residual: Whether x + residual is normalised; backward: whether the sum has a gradient.
        is_backward: Whether this is the gradient.
        weight_bytes: Bytes of an element of the weight, forward of the larger one's of weight and
            bias; 0 without one.
        is_aligned: Whether rows, weight and (forward) bias begin at multiples of 16 bytes.
    """

    rows: Rows
    dtype: torch.dtype
    is_centred: bool
    has_weight: bool
    has_bias: bool
    has_residual: bool
    is_backward: bool
    weight_bytes: int = 4
    is_aligned: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is no row or no column."""
        return 0 in (self.rows.count, self.rows.width)
