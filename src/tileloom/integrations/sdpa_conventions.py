"""The conventions of PyTorch's memory-efficient attention, and tileloom's, each in the other's.

What `torch_sdpa` puts in the place of PyTorch's kernels differs from `tileloom.attention` in how
its tensors lie and in what it writes where nothing was computed:

| | `aten::_efficient_attention_*` | `tileloom::attention_*` |
|---|---|---|
| queries, keys, values, output | `[B, M, H, K]` | `[B, H, M, K]`, any strides |
| mask | `custom_mask_type` 0, 1, 2 and `window_size` | `Band` |
| log-sum-exp | `[B, H, M up to a multiple of 32]`, the rest +inf | `[B, H, M]` |
| log-sum-exp of a row that sees no key | 0 | -inf |
| without `compute_log_sumexp` | `[B, H, 0]` | always there |
| gradient of a bias | rows padded to a multiple of 16 | contiguous |

Sizes: B sequences, M queries, N keys, H heads, K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops.attention.masks import Band
from tileloom.ops.attention.philox import PhiloxState, draw

LSE_ROWS = 32
"""The log-sum-exp has a multiple of so many rows."""
BIAS_COLUMNS = 16
"""A row of the gradient of a bias begins a multiple of so many elements after the one before."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the forward and the backward have in common, in the words of their schemas.

    Attributes:
        query: `[B, M, H, K]`; packed: B is 1, and M counts the queries of all sequences.
        key: `[B, N, H, K]`.
        value: `[B, N, H, Kv]`.
        bias: `[B, H, M, N]` or None.
        cu_seqlens_q: int32 `[S + 1]`, where each sequence's queries begin, or None.
        cu_seqlens_k: int32 `[S + 1]`, the same for keys, or None.
        max_seqlen_q: The longest sequence's queries, or None.
        max_seqlen_k: The longest sequence's keys, or None.
        dropout_p: Probability of dropping a weight.
        custom_mask_type: 0 for none, 1 for causal from the top left, 2 from the bottom right.
        scale: Multiplier of the scores; None for `1 / sqrt(K)`.
        window_size: How many keys a query sees of a causal mask, itself included; None or 0 for
            all.
        seqlen_k: int32 `[S]`, how many keys of each sequence count, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    custom_mask_type: int
    scale: float | None
    window_size: int | None
    seqlen_k: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie one after the other in a batch of 1."""
        return self.cu_seqlens_q is not None

    @property
    def window(self) -> int:
        """How many keys a query sees, 0 for all."""
        return max(self.window_size or 0, 0)

    @property
    def band(self) -> Band:
        """The mask as tileloom has it."""
        left = self.window - 1 if self.window else None
        if self.custom_mask_type == 1:
            return Band(left_top=left, right_top=0)
        if self.custom_mask_type == 2:
            return Band(left_bottom=left, right_bottom=0)
        return Band()

    @property
    def multiplier(self) -> float:
        """What the scores are multiplied by."""
        if self.scale is not None:
            return self.scale
        columns = self.query.shape[3]
        return 1.0 / math.sqrt(columns) if columns else 1.0

    @property
    def may_see_nothing(self) -> bool:
        """Whether a row may be without a visible key, as far as sizes and options tell."""
        if self.bias is not None or self.is_packed or not self.key.shape[1]:
            return True
        return self.custom_mask_type == 2 or self.window > 0

    @property
    def is_captured(self) -> bool:
        """Whether the call becomes a part of a CUDA graph."""
        return self.query.is_cuda and torch.cuda.is_current_stream_capturing()

    @property
    def longest(self) -> tuple[int, int]:
        """M and N, or what bounds the lengths of packed sequences.

        PyTorch's kernel says 0 where `max_seqlen_k` is missing, which its backward then refuses.
        """
        if not self.is_packed:
            return self.query.shape[1], self.key.shape[1]
        return self.max_seqlen_q or 0, self.max_seqlen_k or self.key.shape[1]

    @property
    def scores(self) -> int:
        """How many scores dropout decides on, those past a sequence's end included."""
        rows, columns = self.longest
        batch, heads, _ = self.sizes()
        return batch * heads * rows * columns

    def bounds(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return the bounds of the band, as the operators take them."""
        band = self.band
        return band.left_top, band.right_top, band.left_bottom, band.right_bottom

    def options(self) -> tuple[Any, ...]:
        """Return everything but the tensors of the dense call, by value."""
        return (
            self.custom_mask_type, self.window, self.scale, self.dropout_p, self.max_seqlen_q,
            self.cu_seqlens_q is None, self.cu_seqlens_k is None, self.seqlen_k is None,
        )  # fmt: skip

    def sizes(self) -> tuple[int, int, int]:
        """Return B, H and M of the log-sum-exp: of packed sequences S, H and the longest one."""
        batch, _, heads, _ = self.query.shape
        if self.cu_seqlens_q is not None:
            batch = self.cu_seqlens_q.shape[0] - 1
        return batch, heads, self.longest[0]


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """Show `[B, M, H, K]` as `[B, H, M, K]`, or the other way round."""
    return tensor.transpose(1, 2)


def padded_lse(lse: torch.Tensor, *, may_see_nothing: bool) -> torch.Tensor:
    """Turn tileloom's log-sum-exp into PyTorch's: padded by +inf, 0 for rows that see no key.

    Args:
        lse: `[B, H, M]`, float32; overwritten.
        may_see_nothing: Whether a row may hold -inf.

    Returns:
        `[B, H, M up to a multiple of 32]`, contiguous.
    """
    rows = lse.shape[2]
    padding = -rows % LSE_ROWS
    infinity = math.inf
    if not padding:
        if may_see_nothing:
            lse.nan_to_num_(nan=math.nan, posinf=infinity, neginf=0.0)
        return lse
    padded = lse.new_empty((*lse.shape[:2], rows + padding))
    padded[..., rows:].fill_(infinity)
    if may_see_nothing:
        torch.nan_to_num(lse, nan=math.nan, posinf=infinity, neginf=0.0, out=padded[..., :rows])
    else:
        padded[..., :rows].copy_(lse)
    return padded


def rows_of_lse(logsumexp: torch.Tensor, rows: int) -> torch.Tensor:
    """Cut the padding off PyTorch's log-sum-exp.

    The 0 of a row that sees no key stays: every weight of such a row is exp(-inf - 0) = 0, as it
    is with tileloom's -inf. It cannot be told from a row whose log-sum-exp happens to be 0.

    Args:
        logsumexp: `[B, H, M up to a multiple of 32]`.
        rows: M.

    Returns:
        `[B, H, M]`, contiguous; a copy where there was padding.
    """
    return logsumexp[..., :rows].contiguous()


def scalar(call: Call) -> torch.Tensor:
    """Allocate a seed or an offset where PyTorch's kernel has it: on the CPU but for a capture."""
    if call.is_captured:
        return call.query.new_empty((), dtype=torch.int64)
    return torch.empty((), dtype=torch.int64)


def drawn(call: Call) -> PhiloxState:
    """Return the seed and the offset of a call, which advances the generator.

    Without dropout they hold no values, as PyTorch's do not.
    """
    if call.dropout_p:
        return draw(call.query, call.scores)
    return scalar(call), scalar(call)


@dataclass(frozen=True, slots=True)
class Given:
    """What a backward gets of the forward, and from above.

    Attributes:
        grad_out: Gradient of the output, `[B, M, H, Kv]`.
        out: The output, `[B, M, H, Kv]`.
        logsumexp: The forward's, float32.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """How the gradients are wanted; the fields are the schema's."""

    bias_requires_grad: bool
    num_splits_key: int | None
    shared_storage_dqdkdv: bool


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def empty_gradients(call: Call, asked: Asked) -> Gradients:
    """Allocate the gradients as PyTorch's backward does.

    Args:
        call: The call; its tensors have the gradients' shapes.
        asked: Whether bias gets one, and whether the first three lie in one tensor
            `[B, M, 3, H, K]`, for which their shapes have to be the same.

    Returns:
        Gradients of query, key and value, contiguous or parts of one tensor, and of bias: its rows
        padded to a multiple of 16 elements, None if it needs none.
    """
    query, bias = call.query, call.bias
    if asked.shared_storage_dqdkdv:
        batch, rows, heads, columns = query.shape
        dq, dk, dv = query.new_empty((batch, rows, 3, heads, columns)).unbind(2)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, call.key, call.value))
    dbias = None
    if bias is not None and asked.bias_requires_grad:
        columns = bias.shape[3]
        dbias = bias.new_empty((*bias.shape[:3], columns + -columns % BIAS_COLUMNS))
        dbias = dbias[..., :columns]
    return dq, dk, dv, dbias
