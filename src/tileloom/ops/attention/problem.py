"""An attention problem as plain data: everything that dispatch, tuning and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.ops.attention.masks import Band


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in memory: strides in elements, and a 16-byte aligned base or not."""

    strides: tuple[int, ...]
    is_aligned: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Read the layout of a real tensor."""
        return Layout(tensor.stride(), tensor.data_ptr() % 16 == 0)


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes, types and options of one call.

    Shape legend: q `[batch, heads_q, len_q, head_dim]`, k `[batch, heads_kv, len_k, head_dim]`,
    v `[batch, heads_kv, len_k, head_dim_v]`.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    scale: float
    q: Layout
    k: Layout
    v: Layout
    band: Band
    has_key_lengths: bool = False
    has_mask: bool = False
    has_bias: bool = False
    dropout_p: float = 0.0

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        key_lengths: torch.Tensor | None,
        band: Band,
        scale: float,
        dropout_p: float = 0.0,
    ) -> AttentionProblem:
        """Describe a call on real tensors."""
        return AttentionProblem(
            *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            dtype=q.dtype,
            scale=scale,
            q=Layout.of(q),
            k=Layout.of(k),
            v=Layout.of(v),
            band=band,
            has_key_lengths=key_lengths is not None,
            has_mask=mask is not None,
            has_bias=bias is not None,
            dropout_p=dropout_p,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element, or no key is there to be seen."""
        return 0 in (self.batch, self.heads_q, self.len_q, self.len_k)
