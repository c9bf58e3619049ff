"""The two kernels that `torch_sdpa` puts in PyTorch's place, as plain functions of their schemas.

They run below autograd: PyTorch keeps what its own formula asks for, and calls the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileloom import log
from tileloom.integrations.sdpa_conventions import Asked, Call, Given, Gradients
from tileloom.integrations.sdpa_dense import backward_dense, forward_dense
from tileloom.integrations.sdpa_packed import backward_packed, forward_packed
from tileloom.ops.attention.philox import state_of

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: torch.Tensor | None = None,
    window_size: int | None = None,
) -> Outputs:
    """Compute `aten::_efficient_attention_forward`; the arguments are those of `Call`.

    Returns:
        The output `[B, M, H, Kv]`, contiguous; the log-sum-exp `[B, H, M up to a multiple of 32]`,
        of packed sequences `[S, H, longest up to a multiple of 32]`, or without rows; seed and
        offset of the random numbers, on the CPU, or on the GPU while a graph is captured; M and N,
        or the lengths of the longest sequences.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    call = Call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        custom_mask_type, scale, window_size, seqlen_k,
    )  # fmt: skip
    compute = forward_packed if call.is_packed else forward_dense
    out, lse, seed, offset = compute(call, with_lse=compute_log_sumexp)
    _warn_of_lost_options(call)
    return out, lse, seed, offset, *call.longest


def _warn_of_lost_options(call: Call) -> None:
    """Say what PyTorch's formula for the gradient does not pass on, where there will be one."""
    given = {"window_size": bool(call.window), "seqlen_k": call.seqlen_k is not None}
    lost = [name for name, is_given in given.items() if is_given]
    if not lost or not torch.is_grad_enabled() or not call.query.requires_grad:
        return
    name = lost[0]
    log.warn(
        f"aten::_efficient_attention_forward: {name} is given and a gradient will be asked for; "
        f"PyTorch's formula for it does not pass {name} on, so that the gradients will be those of "
        "another mask. Try: tileloom.attention or tileloom.attention_varlen with mask=."
    )


def backward(
    grad_out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: torch.Tensor,
    dropout_p: float,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Gradients | tuple[None, None, None, None]:
    """Compute `aten::_efficient_attention_backward`.

    Args:
        grad_out: Gradient of the output, `[B, M, H, Kv]`; without it there are no gradients.
        query: As in `Call`; so are the other arguments that it has.
        key: See `query`.
        value: See `query`.
        bias: See `query`.
        out: The forward's output, `[B, M, H, Kv]`.
        cu_seqlens_q: See `query`.
        cu_seqlens_k: See `query`.
        max_seqlen_q: See `query`.
        max_seqlen_k: See `query`.
        logsumexp: The forward's.
        dropout_p: See `query`.
        philox_seed: The forward's.
        philox_offset: The forward's.
        custom_mask_type: See `query`.
        bias_requires_grad: Whether bias gets a gradient.
        scale: See `query`.
        num_splits_key: Into how many parts PyTorch's kernel divides the keys; tileloom's do not
            need to be told.
        window_size: See `query`.
        shared_storage_dqdkdv: Whether the first three gradients lie in one tensor.

    Returns:
        The gradients of query, key, value and bias, as `empty_gradients` lays them out.

    Raises:
        Refused: If PyTorch's kernel has to run.
    """
    if grad_out is None:
        return None, None, None, None
    call = Call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        custom_mask_type, scale, window_size,
    )  # fmt: skip
    name = "aten::_efficient_attention_backward"
    state = state_of(name, query, dropout_p, philox_seed, philox_offset)
    asked = Asked(bias_requires_grad, num_splits_key, shared_storage_dqdkdv)
    compute = backward_packed if call.is_packed else backward_dense
    return compute(call, Given(grad_out, out, logsumexp), state, asked)


KERNELS: dict[str, tuple[Callable[..., Any], int]] = {
    "_efficient_attention_forward": (forward, 0),
    "_efficient_attention_backward": (backward, 1),
}
"""What replaces which operator of `aten`, and which of its arguments is query."""
