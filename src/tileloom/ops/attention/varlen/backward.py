"""`tileloom::attention_varlen_bwd`: the gradients of `tileloom::attention_varlen_fwd`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention import plan_backward as plans
from tileloom.ops.attention.backward import Gradients, binder, empty_gradients
from tileloom.ops.attention.checks import check_gradients
from tileloom.ops.attention.config import ReferenceConfig, outpaced_by
from tileloom.ops.attention.config_backward import (
    AttentionBackwardConfig,
    choose_backward,
    decode_backward,
)
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import PhiloxState, is_on_host, state_of
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.varlen.checks import check_offsets, check_operator, check_values
from tileloom.ops.attention.varlen.reference import attention_varlen_reference_backward
from tileloom.target import target_of

_NO_SECOND_GRADIENT = (
    "attention_varlen: a gradient of its gradient is asked for (create_graph=True), and there is "
    "none. Try: tileloom.ops.attention.varlen.attention_varlen_reference, which is differentiable "
    "to any order."
)
NO_VMAP = (
    "attention_varlen: it is called under torch.vmap, which would run it once for each entry. Try: "
    "pack the sequences of all entries one behind the other, for one call."
)
_SCHEMA = (
    "attention_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, SymInt max_k, "
    "Tensor? mask, Tensor? bias, Tensor? key_lengths, SymInt? left_top, SymInt? right_top, "
    "SymInt? left_bottom, SymInt? right_bottom, float scale, float dropout_p, "
    "Tensor? philox_seed, Tensor? philox_offset, bool needs_q, bool needs_kv, bool needs_bias, "
    "str config) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _as_batch(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _as_given(gradients: Gradients, needs_q: bool, needs_kv: bool) -> Gradients:
    """Gradients `[1, H, T, D]` as `[T, H, D]`; what is not needed has no element."""
    needs = (needs_q, needs_kv, needs_kv)
    dq, dk, dv = (g[0].transpose(0, 1) if need else g for g, need in zip(gradients, needs))
    return dq, dk, dv, gradients[3]


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
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
    needs_q: bool,
    needs_kv: bool,
    needs_bias: bool,
    config: str,
) -> Gradients:
    check_values(q, k, cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    state = state_of("attention_varlen_bwd", q, dropout_p, philox_seed, philox_offset)
    padded = (cu_seqlens_q.shape[0] - 1, max_q, max_k)
    bounds = (left_top, right_top, left_bottom, right_bottom)
    needs = (needs_q, needs_kv, needs_bias and bias is not None)
    offsets = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
    one_q, one_k, one_v, one_do, one_out = (_as_batch(t) for t in (q, k, v, dout, out))
    one_dlse = None if dlse is None else dlse[None]
    given = (one_do, one_dlse, one_q, one_k, one_v, one_out, lse[None], mask, bias, key_lengths)
    key = None
    if q.is_cuda:
        own = (padded, *((t.data_ptr() & 15, t.dtype, t.shape) for t in offsets))
        options = (scale, dropout_p, is_on_host(state), *needs, config)
        key = plans.key_of(given, own, *bounds, *options)
        plan = plans.find(key)
        if plan is not None:
            plan.announce()
            with _op.device_guard(q):
                return _as_given(plan.run(*given, state, offsets), needs_q, needs_kv)
    band = Band(*bounds)
    check_offsets(q, cu_seqlens_q, cu_seqlens_k)
    check_operator(q, k, v, padded, mask, bias, key_lengths, band, scale)
    sizes = (1, q.shape[1], q.shape[0], v.shape[2])
    check_gradients("attention_varlen_bwd", one_do, one_dlse, one_out, given[6], sizes, q)
    given_of = (one_q, one_k, one_v, mask, bias, key_lengths)
    problem = AttentionProblem.of(*given_of, band, scale, dropout_p, padded)
    target = target_of(q)
    choice = choose_backward(problem, target, decode_backward(config))
    slower_than = outpaced_by(choice, problem, target)
    _op.announce(choice, slower_than=slower_than)
    gradients = empty_gradients(one_q, one_k, one_v, bias, *needs)
    if problem.is_empty:
        for own in gradients:
            own.zero_()
        return _as_given(gradients, needs_q, needs_kv)
    is_written = (needs[0], needs[1], needs[1], needs[2])
    written = [g if is_wanted else None for g, is_wanted in zip(gradients, is_written)]
    read = plans.readable(one_do, one_out, given[6])
    tensors = (read[0], *given[1:5], *read[1:], *given[7:], state, *written, offsets)
    bind = _bind_reference if choice.config.backend == "reference" else binder(choice.config)
    with _op.device_guard(q):
        launch = bind(problem, choice.config, *tensors)
        launch(*tensors)
    if key is not None:
        dq, dk, dv, dbias = ((tuple(g.shape), g.stride()) for g in gradients)
        is_readable = read[0] is one_do and read[1] is one_out and read[2] is given[6]
        made = plans.BackwardPlan(
            choice, slower_than, (dq, dk, dv, dbias), is_written, is_readable, launch
        )
        plans.keep(key, made)
    return _as_given(gradients, needs_q, needs_kv)


def _bind_reference(
    problem: AttentionProblem, config: AttentionBackwardConfig, *tensors: Any
) -> Callable[..., None]:
    del config, tensors
    return functools.partial(_run_reference, problem)


def _run_reference(
    problem: AttentionProblem,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    state: PhiloxState | None,
    *written: Any,
) -> None:
    del out, lse
    *gradients, dbias, offsets = written
    with torch.autocast(q.device.type, enabled=False):  # it would lower the matmuls' precision
        *results, of_bias = attention_varlen_reference_backward(
            dout[0].transpose(0, 1), None if dlse is None else dlse[0], q[0].transpose(0, 1),
            k[0].transpose(0, 1), v[0].transpose(0, 1), offsets[0], offsets[1], problem.len_q,
            problem.len_k, mask=Mask(problem.band, key_lengths, mask), bias=bias,
            scale=problem.scale, dropout_p=problem.dropout_p, philox=state,
        )  # fmt: skip
    for mine, result in zip(gradients, results):
        if mine is not None and result is not None:
            mine[0].transpose(0, 1).copy_(result)
    if dbias is not None and of_bias is not None:
        dbias.copy_(of_bias)


def _fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
          v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, cu_seqlens_q: torch.Tensor,
          cu_seqlens_k: torch.Tensor, max_q: int, max_k: int, mask: torch.Tensor | None,
          bias: torch.Tensor | None, *rest: Any) -> Gradients:  # fmt: skip
    del dout, dlse, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, mask
    needs = rest[-4:-1]
    gradients = empty_gradients(_as_batch(q), _as_batch(k), _as_batch(v), bias, *needs)
    return _as_given(gradients, *needs[:2])


attention_varlen_bwd = _op.register(
    _SCHEMA, _backward, _fake, no_gradient=_NO_SECOND_GRADIENT, no_vmap=NO_VMAP
)


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what `gradient` needs: the forward's tensors, and both of its results."""
    q, k, v, cu_q, cu_k, max_q, max_k, mask, bias, lengths, *options = inputs
    *options, seed, offset, config, backward_config = options
    ctx.save_for_backward(q, k, v, cu_q, cu_k, mask, bias, lengths, seed, offset, *output)
    ctx.bounds, ctx.options = (max_q, max_k), options
    if not backward_config and config == ReferenceConfig().encode():
        backward_config = config
    ctx.backward_config = backward_config
    ctx.set_materialize_grads(False)


def gradient(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each input of `attention_varlen_fwd`."""
    q, k, v, cu_q, cu_k, mask, bias, lengths, seed, offset, out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    needs_bias = ctx.needs_input_grad[8]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias = attention_varlen_bwd(
        dout, dlse, q, k, v, out, lse, cu_q, cu_k, *ctx.bounds, mask, bias, lengths, *ctx.options,
        seed, offset, needs_q, needs_k or needs_v, needs_bias, ctx.backward_config,
    )  # fmt: skip
    found = {0: dq if needs_q else None, 1: dk if needs_k else None, 2: dv if needs_v else None}
    found[8] = dbias if needs_bias else None
    return tuple(found.get(i) for i in range(len(ctx.needs_input_grad)))
