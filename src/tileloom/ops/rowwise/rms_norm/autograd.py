"""`tileloom::rms_norm_fwd` and `rms_norm_bwd`: schemas, fakes, and the gradient of the first."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.rowwise.config import announce
from tileloom.ops.rowwise.norm.calls import run_forward
from tileloom.ops.rowwise.norm.plans import backward_plan

Tensor = torch.Tensor

NO_GRADIENT = (
    "rms_norm: the gradient of its gradient is asked for, which is not there. Try: "
    "tileloom.ops.rowwise.rms_norm.rms_norm_reference, which is differentiable to any order."
)


def _forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, config: str
) -> tuple[Tensor, Tensor, Tensor]:
    out, stream, _, rstd = run_forward("rms_norm", x, weight, None, residual, eps, config)
    assert out is not None
    assert rstd is not None
    return out, x.new_empty(0) if stream is None else stream, rstd


def _fake_forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, config: str
) -> tuple[Tensor, Tensor, Tensor]:
    del weight, eps, config
    stream = x.new_empty(0) if residual is None else torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), stream, x.new_empty(x.shape[:-1], dtype=wide)


def _backward(
    grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor,
    needs_weight: bool, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan = backward_plan(
        "rms_norm", grad, stream_grad, h, weight, None, None, rstd, config,
        needs_weight=needs_weight, needs_bias=False,
    )  # fmt: skip
    announce(plan.choice, plan.choice.problem)
    dh, dweight, _ = plan.run(grad, stream_grad, h, weight, None, None, rstd)
    assert dh is not None
    return dh, h.new_empty(0) if dweight is None else dweight


def _fake_backward(
    grad: Tensor, stream_grad: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor,
    needs_weight: bool, config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del grad, stream_grad, rstd, config
    if weight is None or not needs_weight:
        return torch.empty_like(h), h.new_empty(0)
    return torch.empty_like(h), weight.new_empty(h.shape[-1])


rms_norm_bwd = _op.register(
    "rms_norm_bwd(Tensor grad, Tensor? stream_grad, Tensor h, Tensor? weight, Tensor rstd, "
    "bool needs_weight, str config) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
    no_gradient=NO_GRADIENT,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, residual, _, ctx.config = inputs
    _, stream, rstd = output
    ctx.has_residual = residual is not None
    ctx.save_for_backward(stream if ctx.has_residual else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad: Tensor | None, stream_grad: Tensor | None, _: object
) -> tuple[Tensor | None, ...]:
    h, weight, rstd = ctx.saved_tensors
    if not ctx.has_residual:
        stream_grad = None
    if grad is None and stream_grad is None:
        return (None,) * 5
    needs_weight = weight is not None and ctx.needs_input_grad[1]
    dh, dweight = rms_norm_bwd(
        torch.zeros_like(h) if grad is None else grad,
        stream_grad, h, weight, rstd, needs_weight, ctx.config,
    )  # fmt: skip
    return (
        dh if ctx.needs_input_grad[0] else None,
        dweight if needs_weight else None,
        dh if ctx.needs_input_grad[2] else None,
        None,
        None,
    )


rms_norm_fwd = _op.register(
    "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? residual, float eps, str config) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_gradients,
)
