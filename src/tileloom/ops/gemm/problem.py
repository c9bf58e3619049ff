"""A matrix product as plain data: everything that dispatch, tuning and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from tileloom.launch.layout import Layout

Activation = Literal["", "relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True)
class MatmulProblem:
    """Sizes, types and options of one product.

    Shape legend: a `[l, m, k]`, b `[l, k, n]`, out and residual `[l, m, n]`, bias `[n]`. `chunks`
    is 0 where a is all there.
    """

    m: int
    n: int
    k: int
    l: int  # noqa: E741  (CUTLASS's name)
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    out: Layout
    residual: Layout | None = None
    residual_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    activation: str = ""
    chunks: int = 0
    is_exchanged: bool = False

    @staticmethod
    def of(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str,
        chunks: int = 0,
    ) -> MatmulProblem:
        """Describe a call on real tensors of three dimensions."""
        return MatmulProblem(
            *(a.shape[1], b.shape[2], a.shape[2], out.shape[0]),
            dtype=a.dtype,
            out_dtype=out.dtype,
            a=Layout.of(a),
            b=Layout.of(b),
            out=Layout.of(out),
            residual=None if residual is None else Layout.of(residual),
            residual_dtype=None if residual is None else residual.dtype,
            bias_dtype=None if bias is None else bias.dtype,
            activation=activation,
            chunks=chunks,
        )

    def exchanged(self) -> MatmulProblem:
        """The product B^T A^T = C^T of the same operands; what follows it stays C's."""
        return replace(
            self, m=self.n, n=self.m, a=_transposed(self.b), b=_transposed(self.a),
            is_exchanged=not self.is_exchanged,
        )  # fmt: skip

    @property
    def a_is_transposed(self) -> bool:
        """Whether A lies by columns: m is its contiguous dimension."""
        if self.is_exchanged:  # a row or a column lies both ways: what it is called must not change
            return not self.exchanged().b_is_transposed
        return _lies_by_columns(self.a, self.m, self.k)

    @property
    def b_is_transposed(self) -> bool:
        """Whether B lies by columns, as the weight of a linear layer does: k is contiguous."""
        if self.is_exchanged:
            return not self.exchanged().a_is_transposed
        return _lies_by_columns(self.b, self.k, self.n)


def _transposed(layout: Layout) -> Layout:
    batch, row, column = layout.strides
    return Layout((batch, column, row), layout.is_aligned)


def _lies_by_columns(layout: Layout, rows: int, columns: int) -> bool:
    """Whether the contiguous dimension is that of the rows' numbers; a tie goes to rows."""
    _, row, column = layout.strides
    return (column != 1 and columns > 1) and (row == 1 or rows == 1)
