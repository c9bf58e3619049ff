"""`tileloom::softmax_fwd` and `tileloom::softmax_bwd`: schemas, fakes, dispatch and gradient."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tileloom.ops import _op
from tileloom.ops.rowwise.config import TritonConfig, decode
from tileloom.ops.rowwise.plans import Plans, is_current_device, layout_key
from tileloom.ops.rowwise.softmax.config import choose
from tileloom.ops.rowwise.softmax.problem import backward_problem, forward_problem
from tileloom.ops.rowwise.softmax.reference import softmax_backward_reference, softmax_reference
from tileloom.target import target_of

NO_SECOND_GRADIENT = (
    "softmax: a gradient of its gradient is asked for, and there is none. Try: "
    "tileloom.ops.rowwise.softmax.softmax_reference, which is differentiable to any order."
)

Plan = Callable[..., None]
_plans: Plans[Plan] = Plans()


def _forward(x: torch.Tensor, mask: torch.Tensor | None, config: str) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key = ("fwd", layout_key(x), layout_key(mask), config)
    plan = _plans.get(key) if x.is_cuda and not _op.is_watched() else None
    _run(plan or _plan_forward(x, mask, config, key), x, mask, y)
    return y


def _backward(y: torch.Tensor, dy: torch.Tensor, config: str) -> torch.Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    key = ("bwd", layout_key(y), layout_key(dy), config)
    plan = _plans.get(key) if y.is_cuda and not _op.is_watched() else None
    _run(plan or _plan_backward(y, dy, config, key), y, dy, dx)
    return dx


def _run(plan: Plan, first: torch.Tensor, *rest: Any) -> None:
    if not first.is_cuda or is_current_device(first):
        plan(first, *rest)
    else:
        with _op.device_guard(first):
            plan(first, *rest)


def _plan_forward(x: torch.Tensor, mask: torch.Tensor | None, config: str, key: Hashable) -> Plan:
    problem = forward_problem(x, mask)
    choice = choose(problem, target_of(x), decode(config))
    _op.announce(choice)
    if problem.is_empty:
        plan = _nothing
    elif isinstance(choice.config, TritonConfig):
        from tileloom.ops.rowwise.softmax.launch_triton import plan_forward

        plan = plan_forward(problem, choice.config)
    else:
        plan = _reference_forward
    return _plans.put(key, plan) if x.is_cuda else plan


def _plan_backward(y: torch.Tensor, dy: torch.Tensor, config: str, key: Hashable) -> Plan:
    problem = backward_problem(y, dy)
    choice = choose(problem, target_of(y), decode(config))
    _op.announce(choice)
    if problem.is_empty:
        plan = _nothing
    elif isinstance(choice.config, TritonConfig):
        from tileloom.ops.rowwise.softmax.launch_triton import plan_backward

        plan = plan_backward(problem, choice.config)
    else:
        plan = _reference_backward
    return _plans.put(key, plan) if y.is_cuda else plan


def _nothing(*tensors: Any) -> None:
    del tensors


def _reference_forward(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor) -> None:
    y.copy_(softmax_reference(x, mask=mask))


def _reference_backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
    dx.copy_(softmax_backward_reference(y, dy))


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    del rest
    return x.new_empty(x.shape)


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
