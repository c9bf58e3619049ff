"""A call of SwiGLU as plain data: everything that dispatch, the rule and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.ops.rowwise.rows import Rows


@dataclass(frozen=True)
class SwigluProblem:
    """Sizes and types of one call, forward or backward.

    Attributes:
        rows: The rows of gate, up and out; backward: of the output's gradient, gate, up and their
            gradients. Where all tensors are contiguous they are one long row.
        dtype: Dtype of all of them.
    """

    rows: Rows
    dtype: torch.dtype

    @property
    def is_empty(self) -> bool:
        """Whether there is no element."""
        return 0 in (self.rows.count, self.rows.width)
