"""`tileloom::softmax_fwd` and `tileloom::softmax_bwd`: schemas, fakes, dispatch and gradient."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops._plans import plan_key
from tileloom.ops.rowwise.config import announce
from tileloom.ops.rowwise.softmax.plans import (
    backward_plan,
    forward_plan,
    forward_plans,
)

NO_SECOND_GRADIENT = (
    "softmax: a gradient of its gradient is asked for, and there is none. Try: "
    "tileloom.ops.rowwise.softmax.softmax_reference, which is differentiable to any order."
)


def _forward(x: torch.Tensor, mask: torch.Tensor | None, config: str) -> torch.Tensor:
    plan = key = None
    if x.is_cuda:
        key = plan_key((x, mask), config)
        plan = forward_plans.get(key)
    if plan is None:
        plan = forward_plan(x, mask, config)
        if x.is_cuda:
            forward_plans.put(key, plan)
    announce(plan.choice, plan.choice.problem)
    return plan.run(x, mask)


def _backward(y: torch.Tensor, dy: torch.Tensor, config: str) -> torch.Tensor:
    plan = backward_plan(y, dy, config)
    announce(plan.choice, plan.choice.problem)
    return plan.run(y, dy)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    del rest
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.config = inputs[2]


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return softmax_bwd(y, dy, ctx.config), None, None


softmax_bwd = _op.register(
    "softmax_bwd(Tensor y, Tensor dy, str config) -> Tensor",
    _backward,
    _fake,
    no_gradient=NO_SECOND_GRADIENT,
)
softmax_fwd = _op.register(
    "softmax_fwd(Tensor x, Tensor? mask, str config) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_gradient,
)
