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

LSE_ROWS = 32
"""The log-sum-exp has a multiple of so many rows."""
BIAS_COLUMNS = 16
"""A row of the gradient of a bias begins a multiple of so many elements after the one before."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
    def scores(self) -> int:
        """How many scores dropout decides on, those past a sequence's end included."""
        batch, heads, rows = self.sizes()
        columns = (self.max_seqlen_k or 0) if self.is_packed else self.key.shape[1]
        return batch * heads * rows * columns

    def options(self) -> tuple[Any, ...]:
        """Return everything but the tensors of the dense call, by value."""
        return (
            self.custom_mask_type, self.window, self.scale, self.dropout_p, self.max_seqlen_q,
            self.cu_seqlens_q is None, self.cu_seqlens_k is None, self.seqlen_k is None,
        )  # fmt: skip

    def sizes(self) -> tuple[int, int, int]:
        """Return B, H and M of the log-sum-exp: of packed sequences S, H and the longest one."""
        batch, rows, heads, _ = self.query.shape
        if self.cu_seqlens_q is None:
            return batch, heads, rows
        return self.cu_seqlens_q.shape[0] - 1, heads, self.max_seqlen_q or 0


def malformed(call: Call) -> str | None:
    """Say what PyTorch's kernel has to refuse in a call, None if nothing.

    Such a call is not tileloom's to judge: PyTorch's kernel gets it, and raises in its own words.
    """
    query, key, value = call.query, call.key, call.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            return f"{name} has {tensor.dim()} dimensions, not 4"
        if tensor.dtype != query.dtype or tensor.dtype not in _DTYPES:
            return f"{name} has dtype {tensor.dtype}, query {query.dtype}"
        if tensor.device != query.device or tensor.layout is not torch.strided:
            return f"{name} is not a dense tensor on query's device"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "query, key and value differ in their batch"
    if key.shape[1] != value.shape[1]:
        return "key and value differ in their lengths"
    heads = key.shape[2]
    if heads != value.shape[2] or (query.shape[2] % heads if heads else query.shape[2]):
        return "the heads of query, key and value do not fit each other"
    if query.shape[3] != key.shape[3]:
        return "query and key differ in their head dim"
    return _malformed_options(call)


def _malformed_options(call: Call) -> str | None:
    if call.custom_mask_type not in (0, 1, 2):
        return f"custom_mask_type is {call.custom_mask_type}, not 0, 1 or 2"
    if call.window and not call.custom_mask_type:
        return f"window_size is {call.window} without a causal custom_mask_type"
    if not 0.0 <= call.dropout_p < 1.0:
        return f"dropout_p is {call.dropout_p}, not in [0, 1)"
    if not math.isfinite(call.multiplier):
        return f"scale is {call.scale}"
    bias, query = call.bias, call.query
    if bias is not None:
        expected = (query.shape[0], query.shape[2], query.shape[1], call.key.shape[1])
        if tuple(bias.shape) != expected:
            return f"bias has shape {tuple(bias.shape)}, not {expected}"
        if bias.dtype != query.dtype or bias.device != query.device:
            return f"bias has dtype {bias.dtype}, query {query.dtype}, or is on another device"
    return _malformed_packing(call)


def _malformed_packing(call: Call) -> str | None:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    if starts_q is None and starts_k is None:
        return None
    if starts_q is None or starts_k is None:
        return "only one of cu_seqlens_q and cu_seqlens_k is given"
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.is_contiguous():
            return f"{name} is not a contiguous int32 tensor of one dimension"
        if starts.device != call.query.device:
            return f"{name} is not on query's device"
    if starts_q.shape != starts_k.shape or not starts_q.shape[0]:
        return "cu_seqlens_q and cu_seqlens_k differ in their sizes, or are empty"
    if call.query.shape[0] != 1:
        return f"packed sequences in a batch of {call.query.shape[0]}, not 1"
    if call.max_seqlen_q is None:
        return "max_seqlen_q is missing"
    if call.bias is not None:
        return "a bias with packed sequences"
    return None


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


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def empty_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    bias_requires_grad: bool,
    shared_storage_dqdkdv: bool,
) -> Gradients:
    """Allocate the gradients as PyTorch's backward does.

    Args:
        query: `[B, M, H, K]`.
        key: `[B, N, H, K]`.
        value: `[B, N, H, Kv]`.
        bias: `[B, H, M, N]` or None.
        bias_requires_grad: Whether bias gets a gradient.
        shared_storage_dqdkdv: Whether the first three lie in one tensor `[B, M, 3, H, K]`, whose
            shapes the caller has checked.

    Returns:
        Gradients of query, key and value, contiguous or parts of one tensor, and of bias: its rows
        padded to a multiple of 16 elements, None if it needs none.
    """
    if shared_storage_dqdkdv:
        batch, rows, heads, columns = query.shape
        dq, dk, dv = query.new_empty((batch, rows, 3, heads, columns)).unbind(2)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    dbias = None
    if bias is not None and bias_requires_grad:
        columns = bias.shape[3]
        dbias = bias.new_empty((*bias.shape[:3], columns + -columns % BIAS_COLUMNS))
        dbias = dbias[..., :columns]
    return dq, dk, dv, dbias
