"""From the arguments of SwiGLU to its launch; what was decided is kept as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops._op import Choice
from tileloom.ops._plans import Launch, Plans, plan_key
from tileloom.ops.rowwise.checks import check_alike, check_rows
from tileloom.ops.rowwise.config import LARGEST_WIDTH, Tile, TritonConfig, announce, decode
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.swiglu.config import choose
from tileloom.ops.rowwise.swiglu.problem import SwigluProblem
from tileloom.ops.rowwise.swiglu.reference import swiglu_backward_reference, swiglu_reference
from tileloom.ops.rowwise.tuned import tuned
from tileloom.target import target_of

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one: the choice, and the function that runs them."""

    choice: Choice
    run: Callable[..., Any]


forward_plans: Plans[Plan] = Plans()
_backward_plans: Plans[Plan] = Plans()


def _choose(tensors: tuple[Tensor, ...], config: str) -> Choice:
    first = tensors[0]
    if first.numel() <= LARGEST_WIDTH and all(t.is_contiguous() for t in tensors):
        rows = rows_of((first.numel(),), [(1,)] * len(tensors), first.dtype.itemsize)
    else:
        rows = rows_of(first.shape, [t.stride() for t in tensors], first.dtype.itemsize)
    return choose(SwigluProblem(rows, first.dtype), target_of(first), decode("swiglu", config))


def arguments(problem: SwigluProblem, tile: Tile) -> tuple[int, tuple[Any, ...]]:
    """The number of programs, and a kernel's arguments after its tensors, in order."""
    rows = problem.rows
    splits = -(-rows.width // tile.block)
    strides = (s for t in range(len(rows.strides)) for s in rows.stride_arguments(t))
    return -(-rows.count // tile.rows) * splits, (
        rows.count, splits, rows.width_units, *rows.size_arguments(), *strides,
        tile.rows, tile.block, rows.groups, rows.vector,
    )  # fmt: skip


def _launch(kernel: Any, problem: SwigluProblem, tile: Tile) -> Launch:
    programs, fixed = arguments(problem, tile)
    return Launch(kernel, programs, tile.num_warps, fixed)


def forward_plan(gate: Tensor, up: Tensor, config: str) -> Plan:
    """Decide how a forward call runs, or find what was decided.

    Args:
        gate: `[..., n]`, checked.
        up: `[..., n]`, checked.
        config: The config's text; "" chooses.

    Returns:
        The plan; `run(gate, up)` gives the output.
    """
    key = plan_key((gate, up), config)
    found = forward_plans.get(key) if gate.is_cuda else None
    if found is not None:
        return found
    check_rows("swiglu", "gate", gate)
    check_alike("swiglu", "up", up, gate, "gate")
    choice = _choose((gate, up, torch.empty_like(gate)), config)
    choice = tuned(choice, "forward", lambda text: forward_plan(gate, up, text).run, (gate, up))
    tile = choice.config.forward if isinstance(choice.config, TritonConfig) else None
    if choice.problem.is_empty or tile is None:

        def run(gate: Tensor, up: Tensor) -> Tensor:
            with torch.autocast(gate.device.type, enabled=False):
                return torch.empty_like(gate).copy_(swiglu_reference(gate, up))

    else:
        from tileloom.ops.rowwise.swiglu.kernel_triton import swiglu_fwd_kernel

        launch = _launch(swiglu_fwd_kernel, choice.problem, tile)

        def run(gate: Tensor, up: Tensor) -> Tensor:
            out = torch.empty_like(gate)
            launch(gate, up, out)
            return out

    plan = Plan(choice, run)
    return forward_plans.put(key, plan) if gate.is_cuda else plan


def backward_plan(grad: Tensor, gate: Tensor, up: Tensor, config: str) -> Plan:
    """Decide how a backward call runs, or find what was decided.

    Args:
        grad: Gradient of the output, `[..., n]`.
        gate: `[..., n]`.
        up: `[..., n]`.
        config: The config's text; "" chooses.

    Returns:
        The plan; `run(grad, gate, up)` gives the gradients of gate and up.
    """
    key = plan_key((grad, gate, up), config)
    found = _backward_plans.get(key) if gate.is_cuda else None
    if found is not None:
        return found
    check_rows("swiglu", "gate", gate)
    check_alike("swiglu", "up", up, gate, "gate")
    check_alike("swiglu", "grad", grad, gate, "gate")
    results = (torch.empty_like(gate), torch.empty_like(up))
    choice = _choose((gate, up, grad, *results), config)
    tensors = (grad, gate, up)
    choice = tuned(choice, "backward", lambda text: backward_plan(*tensors, text).run, tensors)
    tile = choice.config.backward if isinstance(choice.config, TritonConfig) else None
    if choice.problem.is_empty or tile is None:

        def run(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(gate.device.type, enabled=False):
                dgate, dup = swiglu_backward_reference(grad, gate, up)
            return torch.empty_like(gate).copy_(dgate), torch.empty_like(up).copy_(dup)

    else:
        from tileloom.ops.rowwise.swiglu.kernel_triton import swiglu_bwd_kernel

        launch = _launch(swiglu_bwd_kernel, choice.problem, tile)

        def run(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
            dgate, dup = torch.empty_like(gate), torch.empty_like(up)
            launch(gate, up, grad, dgate, dup)
            return dgate, dup

    plan = Plan(choice, run)
    return _backward_plans.put(key, plan) if gate.is_cuda else plan


def run_announced(plan: Plan, *tensors: Tensor) -> Any:
    """Run a plan, and make its decision visible."""
    announce(plan.choice, plan.choice.problem)
    return plan.run(*tensors)
