"""`tileloom::attention_bwd`: the gradients of `tileloom::attention_fwd`, and how it keeps for them.

Any backward follows any forward: all save q, k, v, O and LSE, and nothing of the scores' size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.attention import plan_backward as plans
from tileloom.ops.attention.checks import check_gradients, check_operator
from tileloom.ops.attention.config import ReferenceConfig, outpaced_by
from tileloom.ops.attention.config_backward import (
    AttentionBackwardConfig,
    TritonBackwardConfig,
    choose_backward,
    decode_backward,
)
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.philox import PhiloxState, is_on_host, state_of
from tileloom.ops.attention.plan_backward import Gradients
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.reference import attention_reference_backward
from tileloom.target import target_of

_NO_SECOND_GRADIENT = (
    "attention: a gradient of its gradient is asked for (create_graph=True), and there is none. "
    "Try: tileloom.ops.attention.attention_reference, which is differentiable to any order."
)
NO_VMAP = (
    "attention: it is called under torch.vmap, which would run it once for each entry. Try: make "
    "the mapped dimension part of the batch, such as attention(q.flatten(0, 1), ...)."
)
_SCHEMA = (
    "attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor? mask, Tensor? bias, Tensor? key_lengths, SymInt? left_top, "
    "SymInt? right_top, SymInt? left_bottom, SymInt? right_bottom, float scale, float dropout_p, "
    "Tensor? philox_seed, Tensor? philox_offset, bool needs_q, bool needs_kv, bool needs_bias, "
    "str config) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a gradient of `[B, H, L, D]`: dense, heads outside of rows or inside as they are."""
    batch, heads, length, width = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)
    return tensor.new_empty((batch, heads, length, width))


def empty_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    needs_q: bool,
    needs_kv: bool,
    needs_bias: bool,
) -> Gradients:
    """Allocate dq, dk, dv and dbias; what is not needed has no element."""
    dq = _like(q) if needs_q else q.new_empty(0)
    dk, dv = (_like(t) if needs_kv else t.new_empty(0) for t in (k, v))
    dbias = q.new_empty(0) if bias is None or not needs_bias else bias.new_empty(bias.shape)
    return dq, dk, dv, dbias


def _backward(
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
    state = state_of("attention_bwd", q, dropout_p, philox_seed, philox_offset)
    given = (dout, dlse, q, k, v, out, lse, mask, bias, key_lengths)
    bounds = (left_top, right_top, left_bottom, right_bottom)
    needs = (needs_q, needs_kv, needs_bias and bias is not None)
    key = None
    if q.is_cuda:
        key = plans.key_of(given, *bounds, scale, dropout_p, is_on_host(state), *needs, config)
        plan = plans.find(key)
        if plan is not None:
            plan.announce()
            if torch._C._cuda_getDevice() == q.get_device():
                return plan.run(*given, state)
            with _op.device_guard(q):
                return plan.run(*given, state)
    band = Band(*bounds)
    check_operator(q, k, v, mask, bias, key_lengths, band, scale)
    sizes = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    check_gradients("attention_bwd", dout, dlse, out, lse, sizes, q)
    problem = AttentionProblem.of(q, k, v, mask, bias, key_lengths, band, scale, dropout_p)
    target = target_of(q)
    choice = choose_backward(problem, target, decode_backward(config))
    slower_than = outpaced_by(choice, problem, target)
    _op.announce(choice, slower_than=slower_than)
    gradients = empty_gradients(q, k, v, bias, *needs)
    if problem.is_empty:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    is_written = (needs[0], needs[1], needs[1], needs[2])
    written = [g if is_wanted else None for g, is_wanted in zip(gradients, is_written)]
    read = plans.readable(dout, out, lse)
    tensors = (read[0], dlse, q, k, v, read[1], read[2], *given[7:], state, *written)
    bind = binder(choice.config)
    with _op.device_guard(q):
        launch = bind(problem, choice.config, *tensors)
        launch(*tensors)
    if key is not None:
        dq, dk, dv, dbias = ((tuple(g.shape), g.stride()) for g in gradients)
        is_readable = read[0] is dout and read[1] is out and read[2] is lse
        made = plans.BackwardPlan(
            choice, slower_than, (dq, dk, dv, dbias), is_written, is_readable, launch
        )
        plans.keep(key, made)
    return gradients


def binder(config: AttentionBackwardConfig) -> Callable[..., Callable[..., None]]:
    """Import the kernels of a backend, which loads Triton, only when they run."""
    if isinstance(config, GluonSm90BackwardConfig):
        from tileloom.ops.attention.launch_gluon_sm90_bwd import bind_attention_bwd

        return bind_attention_bwd
    if isinstance(config, TritonBackwardConfig):
        from tileloom.ops.attention.launch_triton_bwd import bind_attention_bwd

        return bind_attention_bwd
    return _bind_reference


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
    *written: torch.Tensor | None,
) -> None:
    del out, lse
    shown = Mask(problem.band, key_lengths, mask)
    with torch.autocast(q.device.type, enabled=False):  # it would lower the matmuls' precision
        gradients = attention_reference_backward(
            dout, dlse, q, k, v, mask=shown, bias=bias, scale=problem.scale,
            dropout_p=problem.dropout_p, philox=state,
        )  # fmt: skip
    for mine, gradient in zip(written, gradients):
        if mine is not None and gradient is not None:
            mine.copy_(gradient)


def _fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
          v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
          bias: torch.Tensor | None, *rest: Any) -> Gradients:  # fmt: skip
    del dout, dlse, out, lse, mask
    return empty_gradients(q, k, v, bias, *rest[9:12])


attention_bwd = _op.register(
    _SCHEMA, _backward, _fake, no_gradient=_NO_SECOND_GRADIENT, no_vmap=NO_VMAP
)


def setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keep what `gradient` needs: the forward's tensors, and both of its results."""
    q, k, v, mask, bias, key_lengths, *options, seed, offset, config, backward_config = inputs
    ctx.save_for_backward(q, k, v, mask, bias, key_lengths, seed, offset, *output)
    ctx.options = options
    if not backward_config and config == ReferenceConfig().encode():
        backward_config = config
    ctx.backward_config = backward_config
    ctx.set_materialize_grads(False)


def gradient(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each input of `attention_fwd`."""
    q, k, v, mask, bias, key_lengths, seed, offset, out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, _, needs_bias = ctx.needs_input_grad[:5]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias = attention_bwd(
        dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, *ctx.options,
        seed, offset, needs_q, needs_k or needs_v, needs_bias, ctx.backward_config,
    )  # fmt: skip
    gradients = (
        dq if needs_q else None,
        dk if needs_k else None,
        dv if needs_v else None,
        None,
        dbias if needs_bias else None,
    )
    return (*gradients, *(None for _ in range(len(ctx.needs_input_grad) - len(gradients))))
