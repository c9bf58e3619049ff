"""`tileloom::layer_norm_fwd`, `layer_norm_bwd`: schemas, fakes, and the gradient of the first."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.rowwise.config import announce
from tileloom.ops.rowwise.norm.calls import run_forward
from tileloom.ops.rowwise.norm.plans import backward_plan

Tensor = torch.Tensor

NO_GRADIENT = (
    "layer_norm: the gradient of its gradient is asked for, which is not there. Try: "
    "tileloom.ops.rowwise.layer_norm.layer_norm_reference, which is differentiable to any order."
)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, stream, mean, rstd = run_forward("layer_norm", x, weight, bias, residual, eps, config)
    assert out is not None
    assert mean is not None
    assert rstd is not None
    return out, x.new_empty(0) if stream is None else stream, mean, rstd


def _fake_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    config: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del weight, bias, eps, config
    stream = x.new_empty(0) if residual is None else torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2))
    return torch.empty_like(x), stream, mean, rstd


def _backward(
    grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
    bias: Tensor | None, mean: Tensor, rstd: Tensor, needs_weight: bool, needs_bias: bool,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = backward_plan(
        "layer_norm", grad, stream_grad, h, weight, bias, mean, rstd, config,
        needs_weight=needs_weight, needs_bias=needs_bias,
    )  # fmt: skip
    announce(plan.choice, plan.choice.problem)
    dh, *vectors = plan.run(grad, stream_grad, h, weight, bias, mean, rstd)
    assert dh is not None
    dweight, dbias = (h.new_empty(0) if v is None else v for v in vectors)
    return dh, dweight, dbias


def _fake_backward(
    grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None,
    bias: Tensor | None, mean: Tensor, rstd: Tensor, needs_weight: bool, needs_bias: bool,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, stream_grad, mean, rstd, config
    asked = ((weight, needs_weight), (bias, needs_bias))
    dweight, dbias = (
        h.new_empty(0) if v is None or not needs else v.new_empty(h.shape[-1]) for v, needs in asked
    )
    return torch.empty_like(h), dweight, dbias


layer_norm_bwd = _op.register(
    "layer_norm_bwd(Tensor grad, Tensor? stream_grad, Tensor h, Tensor? weight, "
    "Tensor? bias, Tensor mean, Tensor rstd, bool needs_weight, bool needs_bias, str config) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    no_gradient=NO_GRADIENT,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, ctx.config = inputs
    _, stream, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(stream if ctx.has_residual else x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad: Tensor | None, stream_grad: Tensor | None, *_: object
) -> tuple[Tensor | None, ...]:
    h, weight, bias, mean, rstd = ctx.saved_tensors
    if not ctx.has_residual:
        stream_grad = None
    if grad is None and stream_grad is None:
        return (None,) * 6
    needs_weight = weight is not None and ctx.needs_input_grad[1]
    needs_bias = bias is not None and ctx.needs_input_grad[2]
    dh, dweight, dbias = layer_norm_bwd(
        torch.zeros_like(h) if grad is None else grad,
        stream_grad, h, weight, bias, mean, rstd, needs_weight, needs_bias, ctx.config,
    )  # fmt: skip
    return (
        dh if ctx.needs_input_grad[0] else None,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        dh if ctx.needs_input_grad[3] else None,
        None,
        None,
    )


layer_norm_fwd = _op.register(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
    "str config) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_gradients,
)
