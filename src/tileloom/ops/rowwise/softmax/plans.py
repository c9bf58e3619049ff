"""From the arguments of softmax to its launch; what was decided is kept as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.ops._op import Choice
from tileloom.ops._plans import Launch, Plans, plan_key
from tileloom.ops.rowwise.checks import check_alike, check_rows
from tileloom.ops.rowwise.config import FIRST_WORD, Tile, TritonConfig, decode, padded, parts_of
from tileloom.ops.rowwise.softmax.checks import check_mask
from tileloom.ops.rowwise.softmax.config import choose
from tileloom.ops.rowwise.softmax.problem import (
    SoftmaxProblem,
    backward_problem,
    forward_problem,
)
from tileloom.ops.rowwise.softmax.reference import softmax_backward_reference, softmax_reference
from tileloom.ops.rowwise.tuned import tuned
from tileloom.target import target_of

_MASK_VECTOR = 16

Run = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for calls like one: the choice, and the function that runs them."""

    choice: Choice
    run: Run


forward_plans: Plans[Plan] = Plans()
_backward_plans: Plans[Plan] = Plans()


def forward_plan(x: torch.Tensor, mask: torch.Tensor | None, config: str) -> Plan:
    """Decide how a forward call runs; `run(x, mask)` gives y.

    Args:
        x: `[..., N]`, checked.
        mask: Bool, broadcasts to x, or None.
        config: The config's text; "" chooses.
    """
    check_rows("softmax", "x", x)
    check_mask(mask, x)
    problem = forward_problem(x, mask)
    choice = choose(problem, target_of(x), decode("softmax", config))
    choice = tuned(choice, "forward", lambda text: forward_plan(x, mask, text).run, (x, mask))
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        return Plan(choice, _reference_forward)
    assert choice.config.forward is not None, "choose fills it"
    return Plan(choice, _forward(problem, choice.config.forward))


def backward_plan(y: torch.Tensor, dy: torch.Tensor, config: str) -> Plan:
    """Decide how a backward call runs, or find what was decided; `run(y, dy)` gives dx.

    Args:
        y: What the forward gave.
        dy: Its gradient.
        config: The config's text; "" chooses.
    """
    key = plan_key((y, dy), config)
    found = _backward_plans.get(key) if y.is_cuda else None
    if found is not None:
        return found
    check_rows("softmax", "y", y)
    check_alike("softmax", "dy", dy, y, "y")
    problem = backward_problem(y, dy)
    choice = choose(problem, target_of(y), decode("softmax", config))
    choice = tuned(choice, "backward", lambda text: backward_plan(y, dy, text).run, (y, dy))
    if problem.is_empty or not isinstance(choice.config, TritonConfig):
        plan = Plan(choice, _reference_backward)
    else:
        assert choice.config.backward is not None, "choose fills it"
        plan = Plan(choice, _backward(problem, choice.config.backward))
    return _backward_plans.put(key, plan) if y.is_cuda else plan


def _reference_forward(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.empty_like(x).copy_(softmax_reference(x, mask=mask))


def _reference_backward(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    with torch.autocast(y.device.type, enabled=False):
        return torch.empty_like(y).copy_(softmax_backward_reference(y, dy))


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes:
        kernel: The kernel.
        programs: How many.
        fixed: Its arguments after the tensors and, if it has them, the words.
        words: int32 entries, -1 at the launch, by which the programs of a row meet; 0 for none.
        ctas: CTAs of each program, a cluster; 1 for none.
    """

    kernel: Any
    programs: int
    fixed: tuple[Any, ...]
    words: int = 0
    ctas: int = 1

    def launch(self, tile: Tile) -> Callable[..., None]:
        """Make it ready to be launched on its tensors, on the current device."""
        go = Launch(
            self.kernel, self.programs, tile.num_warps, self.fixed, tile.register_bound,
            ctas=self.ctas,
        )  # fmt: skip
        if not self.words:
            return go

        def launch_with_words(*tensors: torch.Tensor | None) -> None:
            like = tensors[-1]
            assert like is not None, "the result"
            words = torch.full((self.words,), -1, dtype=torch.int32, device=like.device)
            go(*tensors, words)

        return launch_with_words


def forward_step(problem: SoftmaxProblem, tile: Tile) -> Step:
    """Make the launch of a forward call.

    Its tensors are x, the mask as uint8 or None, and y; of a cluster x and y.
    """
    if tile.ctas > 1:
        return _cluster_step(problem, tile)
    from tileloom.ops.rowwise.softmax import kernel_triton, kernel_triton_split

    rows = problem.rows
    mask_vector = rows.loose_vector(0, _MASK_VECTOR) if problem.has_mask else 0
    strides = (
        *(*rows.stride_arguments(0), *rows.stride_arguments(1)),
        *rows.loose_arguments(0, mask_vector),
    )
    kernels = (
        kernel_triton.softmax_fwd_kernel,
        kernel_triton.softmax_fwd_walk_kernel,
        kernel_triton_split.softmax_fwd_split_kernel,
    )
    return _step(problem, tile, kernels, strides, (rows.groups, rows.vector, mask_vector), 2)


def _cluster_step(problem: SoftmaxProblem, tile: Tile) -> Step:
    from tileloom.ops.rowwise.softmax.kernel_gluon_sm90 import softmax_fwd_cluster_kernel

    rows = problem.rows
    strides = (rows.stride_arguments(t)[2] for t in range(2))
    fixed = (
        *strides, tile.block, tile.ctas, tile.num_warps, rows.vector,
        problem.dtype.itemsize == 2 and tile.per_sm > 1,
    )  # fmt: skip
    return Step(softmax_fwd_cluster_kernel, rows.count, fixed, ctas=tile.ctas)


def backward_step(problem: SoftmaxProblem, tile: Tile) -> Step:
    """Make the launch of a backward call; its tensors are y, dy and dx."""
    from tileloom.ops.rowwise.softmax import kernel_triton, kernel_triton_split

    rows = problem.rows
    strides = tuple(s for tensor in range(3) for s in rows.stride_arguments(tensor))
    kernels = (
        kernel_triton.softmax_bwd_kernel,
        kernel_triton.softmax_bwd_walk_kernel,
        kernel_triton_split.softmax_bwd_split_kernel,
    )
    return _step(problem, tile, kernels, strides, (rows.groups, rows.vector), 1)


def _step(
    problem: SoftmaxProblem, tile: Tile, kernels: tuple[Any, Any, Any], strides: tuple[Any, ...],
    form: tuple[int, ...], results: int,
) -> Step:  # fmt: skip
    """Take the kernel of whole rows, of rows that are walked, or of rows that are shared.

    `results` is how many numbers a part of a shared row gives.
    """
    rows, (whole, walked, split) = problem.rows, kernels
    fixed = (rows.count, rows.width_units, *rows.size_arguments(), *strides)
    if rows.width <= tile.block:
        is_even = rows.width == tile.block and rows.count % tile.rows == 0
        form = (*form, tile.rows, tile.block, is_even)
        return Step(whole, -(-rows.count // tile.rows), (*fixed, *form))
    if not tile.split:
        return Step(walked, rows.count, (*fixed, *form, tile.block))
    parts = parts_of(rows.width, tile)
    fixed = (*fixed, parts, *form, padded(parts), tile.block, rows.width % tile.block == 0)
    words = FIRST_WORD + rows.count * parts * results
    return Step(split, rows.count * parts, fixed, words)


def _forward(problem: SoftmaxProblem, tile: Tile) -> Run:
    launch = forward_step(problem, tile).launch(tile)

    def run_cluster(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        del mask
        y = torch.empty_like(x)
        launch(x, y)
        return y

    def run(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(x, None if mask is None else mask.view(torch.uint8), y)
        return y

    return run_cluster if tile.ctas > 1 else run


def _backward(problem: SoftmaxProblem, tile: Tile) -> Run:
    launch = backward_step(problem, tile).launch(tile)

    def run(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        dx = torch.empty_like(y)
        launch(y, dy, dx)
        return dx

    return run
