"""`tileloom::swiglu_fwd` and `swiglu_bwd`: schemas, fakes, and the gradient of the first."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.rowwise.swiglu.plans import backward_plan, forward_plan, run_announced

Tensor = torch.Tensor

NO_GRADIENT = (
    "swiglu: the gradient of its gradient is asked for, which is not there. Try: "
    "tileloom.ops.rowwise.swiglu.swiglu_reference, which is differentiable to any order."
)


def _forward(gate: Tensor, up: Tensor, config: str) -> Tensor:
    return run_announced(forward_plan(gate, up, config), gate, up)


def _fake_forward(gate: Tensor, up: Tensor, config: str) -> Tensor:
    del up, config
    return torch.empty_like(gate)


def _backward(grad: Tensor, gate: Tensor, up: Tensor, config: str) -> tuple[Tensor, Tensor]:
    return run_announced(backward_plan(grad, gate, up, config), grad, gate, up)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor, config: str) -> tuple[Tensor, Tensor]:
    del grad, config
    return torch.empty_like(gate), torch.empty_like(up)


swiglu_bwd = _op.register(
    "swiglu_bwd(Tensor grad, Tensor gate, Tensor up, str config) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
    no_gradient=NO_GRADIENT,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    gate, up, ctx.config = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = swiglu_bwd(grad, *ctx.saved_tensors, ctx.config)
    return *(g if n else None for g, n in zip(gradients, ctx.needs_input_grad)), None


swiglu_fwd = _op.register(
    "swiglu_fwd(Tensor gate, Tensor up, str config) -> Tensor",
    _forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_gradients,
)
