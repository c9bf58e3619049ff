"""`tileloom::attention_varlen_fwd`: the schema, the fake, and the dispatch to a backend.

Backends see packed tensors `[T, H, D]` as one batch `[1, H, T, D]`, with the offsets beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention import plan as plans
from tileloom.ops.attention.autograd import binder, empty_outputs
from tileloom.ops.attention.config import AttentionConfig, choose, decode, outpaced_by
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import PhiloxState, is_on_host, state_of
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.varlen.backward import NO_VMAP, gradient, setup_context
from tileloom.ops.attention.varlen.checks import check_offsets, check_operator, check_values
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
    check_values(q, k, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    state = state_of("attention_varlen_fwd", q, dropout_p, philox_seed, philox_offset)
    padded = (cu_seqlens_q.shape[0] - 1, max_q, max_k)
    bounds = (left_top, right_top, left_bottom, right_bottom)
    offsets = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    one_q, one_k, one_v = (as_batch(t) for t in (q, k, v))
    given = (one_q, one_k, one_v, mask, bias, key_lengths, state)
    key = None
    if q.is_cuda:
        own = (padded, *((t.data_ptr() & 15, t.dtype, t.shape) for t in offsets))
        options = (scale, dropout_p, is_on_host(state), config)
        key = plans.key_of(*given[:6], own, *bounds, *options)
        plan = plans.find(key)
        if plan is not None:
            plan.announce()
            with _op.device_guard(q):
                out, lse = plan.run(*given, offsets)
            return out[0].transpose(0, 1), lse[0]
    band = Band(*bounds)
    check_offsets(q, cu_seqlens_q, cu_seqlens_k)
    check_operator(q, k, v, padded, mask, bias, key_lengths, band, scale)
    problem = AttentionProblem.of(*given[:6], band, scale, dropout_p, padded)
    target = target_of(q)
    choice = choose(problem, target, decode(config))
    slower_than = outpaced_by(choice, problem, target)
    _op.announce(choice, slower_than=slower_than)
    out, lse = empty_outputs(one_q, one_v)
    if problem.is_empty:
        out.zero_()
        lse.fill_(float("-inf"))
        return out[0].transpose(0, 1), lse[0]
    bind = _bind_reference if choice.config.backend == "reference" else binder(choice.config)
    with _op.device_guard(q):
        launch = bind(problem, choice.config, *given, out, lse, offsets)
        launch(*given, out, lse, offsets)
    if key is not None:
        sizes = [(tuple(t.shape), t.stride()) for t in (out, lse)]
        made = plans.Plan(choice, slower_than, sizes[0], sizes[1], lse.new_empty(0), launch)
        plans.keep(key, made)
    return out[0].transpose(0, 1), lse[0]


def _bind_reference(
    problem: AttentionProblem, config: AttentionConfig, *tensors: Any
) -> Callable[..., None]:
    del config, tensors
    return functools.partial(_run_reference, problem)


def _run_reference(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    state: PhiloxState | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: Offsets,
) -> None:
    with torch.autocast(q.device.type, enabled=False):  # it would lower the matmuls' precision
        results = attention_varlen_reference(
            *_packed(q, k, v), offsets[0], offsets[1], problem.len_q, problem.len_k,
            mask=Mask(problem.band, key_lengths, mask), bias=bias, scale=problem.scale,
            dropout_p=problem.dropout_p, philox=state, return_lse=True,
        )  # fmt: skip
    out[0].transpose(0, 1).copy_(results[0])
    lse[0].copy_(results[1])


def as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """View packed sequences `[T, H, D]` as a batch of one, `[1, H, T, D]`."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any):  # noqa: ANN202
    del k, rest
    out, lse = empty_outputs(as_batch(q), as_batch(v))
    return out[0].transpose(0, 1), lse[0]


attention_varlen_fwd = _op.register(
    _SCHEMA,
    _forward,
    _fake,
    setup_context=setup_context,
    backward=gradient,
    no_vmap=NO_VMAP,
)
