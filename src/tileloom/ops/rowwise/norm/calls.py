"""How a call of `rms_norm` or `layer_norm` goes: checks, the kept plan, the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileloom.errors import OptionError, shown_value
from tileloom.ops._op import is_eager
from tileloom.ops.rowwise.checks import check_config, check_no_tangent, check_norm
from tileloom.ops.rowwise.config import CONFIGS, RowConfig, announce
from tileloom.ops.rowwise.norm.plans import (
    Results,
    forward_key,
    forward_plan,
    forward_plans,
)

Tensor = torch.Tensor

_LARGEST = torch.finfo(torch.float64).max


def check(
    op: str, x: object, weight: object, bias: object, residual: object, eps: object, config: object
) -> None:
    """Refuse a wrong call with a sentence about the argument."""
    check_norm(op, x, weight, bias, residual)
    check_config(op, config)
    if isinstance(eps, torch.SymFloat):  # under torch.compile: known when it runs
        return
    # Compared, not asked of `math`: torch.compile follows that with a number it holds open.
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= _LARGEST:
        raise OptionError(
            f"{op}: eps is {shown_value(eps)}; it must be a finite Python number, not negative. "
            "Try: eps=1e-5."
        )


def call(
    op: str,
    operator: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    config: RowConfig | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call: without gradients straight from its plan, else through the operator.

    A call for which there is a plan has passed the checks before.

    Args:
        op: The public function's name.
        operator: `(x, weight, bias, residual, eps, config text)`; its first results are the output
            and the stream.
        x: As the user gave it, unchecked; so are the others.
        weight: `[n]` or None.
        bias: `[n]` or None.
        residual: x's shape, or None.
        eps: Added to the mean square.
        config: What the user forces, or None.

    Returns:
        The output; with a residual the stream as well.
    """
    tensors = (x, weight, bias, residual)
    key = plan = None
    saves = False
    text: Any = "" if config is None else config.encode() if isinstance(config, CONFIGS) else None
    if isinstance(x, torch.Tensor) and is_eager(tensors):
        saves = torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
        key = forward_key(op, x, weight, bias, residual, eps, text, saves)
        plan = forward_plans.get(key)
    if plan is None:
        check(op, *tensors, eps, config)
        check_no_tangent(op, *tensors)
        if key is not None and not saves:
            plan = forward_plan(op, *tensors, float(eps), text, saves=False)
            announce(plan.choice, plan.choice.problem)
            forward_plans.put(key, plan)
    if plan is None or saves:
        results: Any = operator(*tensors, eps, text)
    else:
        results = plan.run(x, weight, bias, residual)
    return results[0] if residual is None else (results[0], results[1])


def run_forward(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, config: str,
) -> Results:  # fmt: skip
    """Run the operator's forward: its plan is found or made, and the decision announced."""
    plan = key = None
    if x.is_cuda:
        key = forward_key(op, x, weight, bias, residual, eps, config, True)
        plan = forward_plans.get(key)
    if plan is None:
        plan = forward_plan(op, x, weight, bias, residual, eps, config, saves=True)
        if x.is_cuda:
            forward_plans.put(key, plan)
    announce(plan.choice, plan.choice.problem)
    return plan.run(x, weight, bias, residual)
