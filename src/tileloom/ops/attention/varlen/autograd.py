"""`tileloom::attention_varlen_fwd`: the schema, the fake, and the dispatch to a backend.

Backends see packed tensors `[T, H, D]` as one batch `[1, H, T, D]`, with the offsets beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention.autograd import binder, empty_outputs
from tileloom.ops.attention.config import choose, decode, outpaced_by
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import state_of
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.varlen.backward import gradient, setup_context
from tileloom.ops.attention.varlen.checks import check_values
from tileloom.ops.attention.varlen.reference import attention_varlen_reference
from tileloom.target import target_of

_SCHEMA = (
    "attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_q, SymInt max_k, Tensor? mask, Tensor? bias, Tensor? key_lengths, "
    "SymInt? left_top, SymInt? right_top, SymInt? left_bottom, SymInt? right_bottom, float scale, "
    "float dropout_p, Tensor? philox_seed, Tensor? philox_offset, "
    "str config, str backward_config) -> (Tensor, Tensor)"
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    left_top: int | None,
    right_top: int | None,
    left_bottom: int | None,
    right_bottom: int | None,
    scale: float,
    dropout_p: float,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    config: str,
    backward_config: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    del backward_config
    check_values(cu_seqlens_q, cu_seqlens_k, max_q, max_k, q.shape[0], k.shape[0])
    state = state_of("attention_varlen_fwd", q, dropout_p, philox_seed, philox_offset)
    band = Band(left_top, right_top, left_bottom, right_bottom)
    target = target_of(q)
    padded = (cu_seqlens_q.shape[0] - 1, max_q, max_k)
    one_q, one_k, one_v = (as_batch(t) for t in (q, k, v))
    problem = AttentionProblem.of(
        one_q, one_k, one_v, mask, bias, key_lengths, band, scale, dropout_p, padded
    )
    choice = choose(problem, target, decode(config))
    _op.announce(choice, slower_than=outpaced_by(choice, problem, target))
    out, lse = empty_outputs(one_q, one_v)
    if problem.is_empty:
        out.zero_()
        lse.fill_(float("-inf"))
    elif choice.config.backend == "reference":
        shown = Mask(band, key_lengths, mask)
        with torch.autocast(q.device.type, enabled=False):  # it would lower the precision
            results = attention_varlen_reference(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask=shown, bias=bias,
                scale=scale, dropout_p=dropout_p, philox=state, return_lse=True,
            )  # fmt: skip
        out[0].transpose(0, 1).copy_(results[0])
        lse[0].copy_(results[1])
    else:
        offsets = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        tensors = (one_q, one_k, one_v, mask, bias, key_lengths, state, out, lse, offsets)
        with _op.device_guard(q):
            binder(choice.config)(problem, choice.config, *tensors)(*tensors)
    return out[0].transpose(0, 1), lse[0]


def as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """View packed sequences `[T, H, D]` as a batch of one, `[1, H, T, D]`."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any):  # noqa: ANN202
    del k, rest
    out, lse = empty_outputs(as_batch(q), as_batch(v))
    return out[0].transpose(0, 1), lse[0]


attention_varlen_fwd = _op.register(
    _SCHEMA, _forward, _fake, setup_context=setup_context, backward=gradient
)
