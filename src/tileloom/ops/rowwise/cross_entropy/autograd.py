"""`tileloom::cross_entropy_fwd` and its two backwards: schemas, fakes, dispatch and gradient.

`cross_entropy_bwd` writes the gradient to a new tensor, `cross_entropy_bwd_` over the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from tileloom.errors import GradientError
from tileloom.ops import _op
from tileloom.ops._plans import plan_key
from tileloom.ops.rowwise.config import announce
from tileloom.ops.rowwise.cross_entropy.plans import (
    backward_plan,
    empty_results,
    forward_plan,
    forward_plans,
)
from tileloom.ops.rowwise.cross_entropy.problem import Options

Tensor = torch.Tensor

NO_SECOND_GRADIENT = (
    "cross_entropy: a gradient of its gradient is asked for, and there is none. Try: "
    "tileloom.ops.rowwise.cross_entropy.cross_entropy_reference, which is differentiable to any "
    "order."
)
CHANGED = (
    "cross_entropy: the logits have been changed since the forward, and the gradient needs them. "
    "An earlier backward with inplace_backward=True overwrites them. Try: inplace_backward=False, "
    "or logits.clone() before they are changed."
)


def _forward(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float,
    ignore_index: int,
    soft_cap: float,
    reduction: str,
    inplace_backward: bool,
    config: str,
) -> tuple[Tensor, Tensor]:
    del inplace_backward
    options = (label_smoothing, ignore_index, soft_cap or None, reduction)
    plan = key = None
    if logits.is_cuda:
        key = plan_key((logits, labels), *options, config)
        plan = forward_plans.get(key)
    if plan is None:
        plan = forward_plan(logits, labels, Options.of(*options), config)
        if logits.is_cuda:
            forward_plans.put(key, plan)
    announce(plan.choice, plan.choice.problem)
    return plan.run(logits, labels)


def _fake_forward(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float,
    ignore_index: int,
    soft_cap: float,
    reduction: str,
    inplace_backward: bool,
    config: str,
) -> tuple[Tensor, Tensor]:
    del label_smoothing, ignore_index, soft_cap, inplace_backward, config
    return empty_results(logits, labels, reduction)


def _backward(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    state: Tensor,
    label_smoothing: float,
    ignore_index: int,
    soft_cap: float,
    reduction: str,
    config: str,
) -> Tensor:
    options = (label_smoothing, ignore_index, soft_cap, reduction)
    plan = backward_plan(grad, logits, labels, state, options, config, inplace=False)
    announce(plan.choice, plan.choice.problem)
    return plan.run(grad, logits, labels, state)


def _backward_inplace(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    state: Tensor,
    label_smoothing: float,
    ignore_index: int,
    soft_cap: float,
    reduction: str,
    config: str,
) -> None:
    options = (label_smoothing, ignore_index, soft_cap, reduction)
    plan = backward_plan(grad, logits, labels, state, options, config, inplace=True)
    announce(plan.choice, plan.choice.problem)
    plan.run(grad, logits, labels, state)


def _fake_backward(grad: Tensor, logits: Tensor, *rest: object) -> Tensor:
    del grad, rest
    return torch.empty_like(logits)


def _fake_backward_inplace(*args: object) -> None:
    del args


_BACKWARD_REST = (
    "Tensor labels, Tensor state, float label_smoothing, SymInt ignore_index, float soft_cap, "
    "str reduction, str config"
)

cross_entropy_bwd = _op.register(
    f"cross_entropy_bwd(Tensor grad, Tensor logits, {_BACKWARD_REST}) -> Tensor",
    _backward,
    _fake_backward,
    no_gradient=NO_SECOND_GRADIENT,
)
cross_entropy_bwd_ = _op.register(
    f"cross_entropy_bwd_(Tensor grad, Tensor(a!) logits, {_BACKWARD_REST}) -> ()",
    _backward_inplace,
    _fake_backward_inplace,
    no_gradient=NO_SECOND_GRADIENT,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, *ctx.options, ctx.inplace, ctx.config = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    try:
        logits, labels, state = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise GradientError(CHANGED) from error
    arguments = (grad, logits, labels, state, *ctx.options, ctx.config)
    if ctx.inplace and not _is_given(logits):
        cross_entropy_bwd_(*arguments)
        # Here, where torch.compile sees it too: who else kept the logits gets an error from both.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), *(None,) * 7
    return cross_entropy_bwd(*arguments), *(None,) * 7


def _is_given(logits: Tensor) -> bool:
    """Whether a function that is compiled was given these logits, or what they are a view of.

    The check for leaves cannot look behind them there, and to write over an argument a compiled
    function copies: they get a fresh gradient.
    """
    if not torch.compiler.is_compiling():
        return False
    made_by = (logits if logits._base is None else logits._base).grad_fn
    return made_by is None or not made_by.next_functions


cross_entropy_fwd = _op.register(
    "cross_entropy_fwd(Tensor logits, Tensor labels, float label_smoothing, SymInt ignore_index, "
    "float soft_cap, str reduction, bool inplace_backward, str config) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    setup_context=_setup_context,
    backward=_gradient,
)
