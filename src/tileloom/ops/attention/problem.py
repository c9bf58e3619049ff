"""An attention problem as plain data: everything that dispatch, tuning and tests decide by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tileloom.launch.layout import Layout
from tileloom.ops.attention.masks import Band

Offsets = tuple[torch.Tensor, torch.Tensor]
"""Where packed sequences of queries and of keys begin and end: `[S + 1]`, int32, contiguous."""


@dataclass(frozen=True)
class Packed:
    """Rows of packed sequences, all together: `[1, heads_q, total_q, head_dim]` and so on."""

    total_q: int
    total_k: int

    @property
    def totals(self) -> tuple[int, int]:
        """Both."""
        return self.total_q, self.total_k


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes, types and options of one call.

    Shape legend: q `[batch, heads_q, len_q, head_dim]`, k `[batch, heads_kv, len_k, head_dim]`,
    v `[batch, heads_kv, len_k, head_dim_v]`. Of packed sequences (`packed`) these are the sizes of
    the padded batch: batch is the number of sequences, len_q and len_k bound their lengths.
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
    packed: Packed | None = None
    bias_dtype: torch.dtype | None = None

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
        padded: tuple[int, int, int] | None = None,
    ) -> AttentionProblem:
        """Describe a call on real tensors.

        With `padded`, the sizes `(S, max_q, max_k)` of the padded batch, they are packed sequences
        `[1, H, T, D]`.
        """
        batch, len_q, len_k = padded or (q.shape[0], q.shape[2], k.shape[2])
        return AttentionProblem(
            *(batch, q.shape[1], k.shape[1], len_q, len_k, q.shape[3], v.shape[3]),
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
            packed=None if padded is None else Packed(q.shape[2], k.shape[2]),
            bias_dtype=None if bias is None else bias.dtype,
        )

    def blocks_q(self, block: int) -> int:
        """Query blocks of one head, of all sequences; of packed ones a bound (`pieces_packed`)."""
        if self.packed is None:
            return self.batch * -(-self.len_q // max(block, 1))
        return self.packed.total_q // max(block, 1) + self.batch

    def blocks_k(self, block: int) -> int:
        """Key blocks of one head, likewise."""
        if self.packed is None:
            return self.batch * -(-self.len_k // max(block, 1))
        return self.packed.total_k // max(block, 1) + self.batch

    @property
    def scores(self) -> int:
        """Elements of a bias that has one for each score."""
        return self.batch * self.heads_q * self.len_q * self.len_k

    @property
    def name(self) -> str:
        """What the function is called that takes such a problem."""
        return "attention" if self.packed is None else "attention_varlen"

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element, or no key is there to be seen."""
        sizes = (self.batch, self.heads_q, self.len_q, self.len_k)
        rows = () if self.packed is None else (self.packed.total_q, self.packed.total_k)
        return 0 in (*sizes, *rows)
