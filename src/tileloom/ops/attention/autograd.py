"""`tileloom::attention_fwd`: the schema, the fake, and the dispatch to a backend.

Its gradient is in `backward.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention import plan as plans
from tileloom.ops.attention.backward import NO_VMAP, gradient, setup_context
from tileloom.ops.attention.checks import check_operator
from tileloom.ops.attention.config import (
    AttentionConfig,
    GluonSm90Config,
    TritonConfig,
    choose,
    decode,
    outpaced_by,
)
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import PhiloxState, is_on_host, state_of
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.reference import attention_reference
from tileloom.target import target_of

_SCHEMA = (
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? key_lengths, "
    "SymInt? left_top, SymInt? right_top, SymInt? left_bottom, SymInt? right_bottom, float scale, "
    "float dropout_p, Tensor? philox_seed, Tensor? philox_offset, "
    "str config, str backward_config) -> (Tensor, Tensor)"
)


def empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the outputs: O in q's order of dimensions, LSE contiguous.

    Args:
        q: Queries, `[B, Hq, Lq, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.

    Returns:
        O `[B, Hq, Lq, Dv]` in q's dtype, and LSE `[B, Hq, Lq]` in float32 (float64 for float64).
    """
    batch, heads, length, _ = q.shape
    width = v.shape[3]
    if q.stride(1) < q.stride(2):
        out = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, length, width))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((batch, heads, length), dtype=wide)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    state = state_of("attention_fwd", q, dropout_p, philox_seed, philox_offset)
    key = None
    if q.is_cuda:
        bounds = (left_top, right_top, left_bottom, right_bottom)
        options = (scale, dropout_p, is_on_host(state), config)
        key = plans.key_of(q, k, v, mask, bias, key_lengths, *bounds, *options)
        plan = plans.find(key)
        if plan is not None:
            plan.announce()
            if torch._C._cuda_getDevice() == q.get_device():
                return plan.run(q, k, v, mask, bias, key_lengths, state)
            with _op.device_guard(q):
                return plan.run(q, k, v, mask, bias, key_lengths, state)
    band = Band(left_top, right_top, left_bottom, right_bottom)
    check_operator(q, k, v, mask, bias, key_lengths, band, scale)
    target = target_of(q)
    problem = AttentionProblem.of(q, k, v, mask, bias, key_lengths, band, scale, dropout_p)
    choice = choose(problem, target, decode(config))
    slower_than = outpaced_by(choice, problem, target)
    _op.announce(choice, slower_than=slower_than)
    out, lse = empty_outputs(q, v)
    if problem.is_empty:
        out.zero_()
        lse.fill_(float("-inf"))
        return out, lse
    bind = binder(choice.config)
    with _op.device_guard(q):
        launch = bind(problem, choice.config, q, k, v, mask, bias, key_lengths, state, out, lse)
        launch(q, k, v, mask, bias, key_lengths, state, out, lse)
    if key is not None:
        sizes = [(tuple(t.shape), t.stride()) for t in (out, lse)]
        made = plans.Plan(choice, slower_than, sizes[0], sizes[1], lse.new_empty(0), launch)
        plans.keep(key, made)
    return out, lse


def binder(config: AttentionConfig) -> Callable[..., Callable[..., None]]:
    """Import the kernel of a backend, which loads Triton, only when it runs."""
    if isinstance(config, GluonSm90Config):
        from tileloom.ops.attention.launch_gluon_sm90_fwd import bind_attention_fwd

        return bind_attention_fwd
    if isinstance(config, TritonConfig):
        from tileloom.ops.attention.launch_triton_fwd import bind_attention_fwd

        return bind_attention_fwd
    return _bind_reference


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
) -> None:
    shown = Mask(problem.band, key_lengths, mask)
    with torch.autocast(q.device.type, enabled=False):  # it would lower the matmuls' precision
        results = attention_reference(
            q, k, v, mask=shown, bias=bias, scale=problem.scale, return_lse=True,
            dropout_p=problem.dropout_p, philox=state,
        )  # fmt: skip
    out.copy_(results[0])
    lse.copy_(results[1])


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object):  # noqa: ANN202
    del k, rest
    return empty_outputs(q, v)


attention_fwd = _op.register(
    _SCHEMA,
    _forward,
    _fake,
    setup_context=setup_context,
    backward=gradient,
    no_vmap=NO_VMAP,
)
