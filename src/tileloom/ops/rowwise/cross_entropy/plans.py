"""From the arguments of cross entropy to its launches; what was decided is kept as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops._op import Choice
from tileloom.ops._plans import Launch, Plans, plan_key
from tileloom.ops.rowwise.config import Tile, TritonConfig, decode
from tileloom.ops.rowwise.cross_entropy.checks import check_options, check_tensors
from tileloom.ops.rowwise.cross_entropy.config import choose
from tileloom.ops.rowwise.cross_entropy.problem import (
    CrossEntropyProblem,
    Options,
    backward_problem,
    forward_problem,
)
from tileloom.ops.rowwise.cross_entropy.reference import (
    cross_entropy_backward_reference,
    cross_entropy_reference,
)
from tileloom.ops.rowwise.tuned import tuned
from tileloom.target import target_of

Tensor = torch.Tensor

# Losses that the one program of `cross_entropy_sum_kernel` adds up side by side, and its warps.
SUM_BLOCK, SUM_WARPS = 2048, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one: the choice, and the function that runs them."""

    choice: Choice
    run: Callable[..., Any]


forward_plans: Plans[Plan] = Plans()
_backward_plans: Plans[Plan] = Plans()


def state_size(rows: int) -> int:
    """Entries of the state: each row's maximum, each row's log-sum, and how many rows count."""
    return 2 * rows + 1


def empty_results(logits: Tensor, labels: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Allocate the loss and the state, in float32 (float64 for float64 logits)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = labels.shape if reduction == "none" else ()
    loss = logits.new_empty(shape, dtype=wide)
    return loss, logits.new_empty(state_size(labels.numel()), dtype=wide)


def forward_plan(logits: Tensor, labels: Tensor, options: Options, config: str) -> Plan:
    """Decide how a forward call runs; `run(logits, labels)` gives the loss and the state.

    Args:
        logits: `[..., V]`, checked.
        labels: `[...]`, checked.
        options: What changes the loss.
        config: The config's text; "" chooses.
    """
    check_tensors(logits, labels)
    cap = options.soft_cap or None
    check_options(options.label_smoothing, options.ignore_index, cap, options.reduction)
    problem = forward_problem(logits, labels, options)
    choice = choose(problem, target_of(logits), decode("cross_entropy", config))
    tensors = (logits, labels)
    choice = tuned(
        choice, "forward", lambda text: forward_plan(*tensors, options, text).run, tensors
    )
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        return Plan(choice, _reference_forward(options))
    assert choice.config.forward is not None, "choose fills it"
    return Plan(choice, _forward(problem, choice.config.forward))


def backward_plan(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    state: Tensor,
    numbers: tuple[float, int, float, str],
    config: str,
    *,
    inplace: bool,
) -> Plan:
    """Decide how a backward call runs, or find what was decided.

    Args:
        grad: Gradient of the loss: a scalar, or `[...]` without a reduction.
        logits: `[..., V]`.
        labels: `[...]`.
        state: What the forward kept.
        numbers: The fields of `Options`.
        config: The config's text; "" chooses.
        inplace: Whether the gradient is written over the logits.

    Returns:
        The plan. `run(grad, logits, labels, state)` gives the gradient of the logits.
    """
    key = plan_key((grad, logits, labels, state), *numbers, config, inplace)
    found = _backward_plans.get(key) if logits.is_cuda else None
    if found is not None:
        return found
    check_tensors(logits, labels)
    options = Options.of(*numbers)
    like = logits if inplace else torch.empty_like(logits, device="meta")
    problem = backward_problem(grad, logits, labels, like.stride(), options)
    choice = choose(problem, target_of(logits), decode("cross_entropy", config))
    tensors = (grad, logits, labels, state)

    def decide(text: str) -> Callable[..., Any]:
        return backward_plan(*tensors, numbers, text, inplace=inplace).run

    choice = tuned(choice, "backward", decide, tensors, changed=(logits,) if inplace else ())
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        plan = Plan(choice, _reference_backward(options, inplace))
    else:
        assert choice.config.backward is not None, "choose fills it"
        plan = Plan(choice, _backward(problem, choice.config.backward, inplace))
    return _backward_plans.put(key, plan) if logits.is_cuda else plan


def _reference_options(options: Options) -> dict[str, Any]:
    return {
        "label_smoothing": options.label_smoothing,
        "ignore_index": options.ignore_index,
        "soft_cap": options.soft_cap or None,
        "reduction": options.reduction,
    }


def _reference_forward(options: Options) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The reference; its backward computes anew what the state would hold."""

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, state = empty_results(logits, labels, options.reduction)
        with torch.autocast(logits.device.type, enabled=False):
            loss.copy_(cross_entropy_reference(logits, labels, **_reference_options(options)))
        return loss, state.zero_()

    return run


def _reference_backward(options: Options, inplace: bool) -> Callable[..., Tensor]:
    def run(grad: Tensor, logits: Tensor, labels: Tensor, state: Tensor) -> Tensor:
        del state
        out = logits if inplace else torch.empty_like(logits)
        with torch.autocast(logits.device.type, enabled=False):
            found = cross_entropy_backward_reference(
                grad, logits, labels, **_reference_options(options)
            )
        return out.copy_(found)

    return run


@dataclass(frozen=True)
class Step:
    """One launch: the kernel, its programs, its warps, and the arguments after its tensors.

    `registers` is what a thread may have, None for what the compiler likes.
    """

    kernel: Any
    programs: int
    num_warps: int
    fixed: tuple[Any, ...]
    registers: int | None = None

    def launch(self) -> Launch:
        """Make it ready to be launched."""
        return Launch(self.kernel, self.programs, self.num_warps, self.fixed, self.registers)


def forward_step(problem: CrossEntropyProblem, tile: Tile) -> Step:
    """Make the launch of the forward kernel: logits, labels, losses, state."""
    from tileloom.ops.rowwise.cross_entropy import kernel_triton as kernels

    rows = problem.rows
    fixed = (
        *(rows.count, rows.width_units, *rows.size_arguments(), *rows.stride_arguments(0)),
        *(*rows.loose_arguments(0, 1)[:3], *_numbers(problem.options), *_form(problem), tile.block),
    )
    kernel, programs = kernels.cross_entropy_fwd_kernel, rows.count
    return Step(kernel, programs, tile.num_warps, fixed, tile.register_bound)


def sum_step(problem: CrossEntropyProblem) -> Step:
    """Make the launch that adds the losses up: losses, labels, loss, state."""
    from tileloom.ops.rowwise.cross_entropy import kernel_triton as kernels

    rows, options = problem.rows, problem.options
    fixed = (
        *(rows.count, *rows.size_arguments(), *rows.loose_arguments(0, 1)[:3]),
        *(options.ignore_index, rows.groups, options.reduction == "mean", SUM_BLOCK),
    )
    return Step(kernels.cross_entropy_sum_kernel, 1, SUM_WARPS, fixed)


def backward_step(problem: CrossEntropyProblem, tile: Tile) -> Step:
    """Make the launch of the backward kernel: grad, logits, labels, state, their gradient."""
    from tileloom.ops.rowwise.cross_entropy import kernel_triton as kernels

    rows = problem.rows
    # Rows that start anywhere may have a lane more at their begin.
    blocks = -(
        -(rows.width + (16 // problem.dtype.itemsize - 1 if rows.vector == 1 else 0)) // tile.block
    )
    fixed = (
        *(rows.count, rows.width_units, *rows.size_arguments()),
        *(*rows.stride_arguments(0), *rows.stride_arguments(1)),
        *(*rows.loose_arguments(0, 1)[:3], *rows.loose_arguments(1, 1)[:3]),
        *(blocks, *_numbers(problem.options), *_form(problem)),
        *(problem.options.reduction == "mean", rows.strides[0] == rows.strides[1], tile.block),
    )
    return Step(kernels.cross_entropy_bwd_kernel, rows.count * blocks, tile.num_warps, fixed)


def _numbers(options: Options) -> tuple[int | float, ...]:
    inverse = 1.0 / options.soft_cap if options.soft_cap else 0.0
    return options.ignore_index, options.soft_cap, inverse, options.label_smoothing


def _form(problem: CrossEntropyProblem) -> tuple[int | bool, ...]:
    """The constants GROUPS, VECTOR, CAPPED, SMOOTHED."""
    rows, options = problem.rows, problem.options
    return rows.groups, rows.vector, options.soft_cap != 0.0, options.label_smoothing != 0.0


def _forward(problem: CrossEntropyProblem, tile: Tile) -> Callable[..., tuple[Tensor, Tensor]]:
    launch, add_up = forward_step(problem, tile).launch(), sum_step(problem).launch()
    count, reduction = problem.rows.count, problem.options.reduction

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, state = empty_results(logits, labels, reduction)
        if reduction == "none":
            launch(logits, labels, loss, state)
        else:
            losses = logits.new_empty(count, dtype=torch.float32)
            launch(logits, labels, losses, state)
            add_up(losses, labels, loss, state)
        return loss, state

    return run


def _backward(problem: CrossEntropyProblem, tile: Tile, inplace: bool) -> Callable[..., Tensor]:
    launch = backward_step(problem, tile).launch()

    def run(grad: Tensor, logits: Tensor, labels: Tensor, state: Tensor) -> Tensor:
        out = logits if inplace else torch.empty_like(logits)
        launch(grad, logits, labels, state, out)
        return out

    return run
