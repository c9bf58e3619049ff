"""Plans of the Triton kernels of softmax: everything about a launch but the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.plans import launcher
from tileloom.ops.rowwise.softmax import kernel_triton as kernels
from tileloom.ops.rowwise.softmax.problem import SoftmaxProblem

_MASK_VECTOR = 16


def forward_constants(problem: SoftmaxProblem, tile: Tile) -> dict[str, Any]:
    """Return the forward kernel's constants that follow from a problem and a tile."""
    rows = problem.rows
    mask_vector = rows.loose_vector(0, _MASK_VECTOR) if problem.has_mask else 0
    found = {"GROUPS": rows.groups, "VECTOR": rows.vector, "MASK_VECTOR": mask_vector}
    return found | _tile_constants(problem, tile)


def backward_constants(problem: SoftmaxProblem, tile: Tile) -> dict[str, Any]:
    """Return the backward kernel's constants that follow from a problem and a tile."""
    rows = problem.rows
    return {"GROUPS": rows.groups, "VECTOR": rows.vector} | _tile_constants(problem, tile)


def is_walked(problem: SoftmaxProblem, tile: Tile) -> bool:
    """Whether the tile does not hold a whole row."""
    return problem.rows.width > tile.block


def _tile_constants(problem: SoftmaxProblem, tile: Tile) -> dict[str, Any]:
    walked = is_walked(problem, tile)
    return {"BLOCK": tile.block} if walked else {"BLOCK": tile.block, "ROWS": tile.rows}


def plan_forward(problem: SoftmaxProblem, config: TritonConfig) -> Callable[..., None]:
    """Make the launch of the forward kernel; it takes x, the mask or None, and y."""
    tile, rows = config.forward, problem.rows
    assert tile is not None, "choose fills it"
    constants = forward_constants(problem, tile)
    walked = is_walked(problem, tile)
    kernel = kernels.softmax_fwd_walk_kernel if walked else kernels.softmax_fwd_kernel
    launch = launcher(kernel, tile.num_warps)[_grid(problem, tile)]
    numbers = (
        *(rows.count, rows.width_units, *rows.size_arguments(), *rows.stride_arguments(0)),
        *rows.loose_arguments(0, constants["MASK_VECTOR"]),
    )

    def run(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor) -> None:
        seen = None if mask is None else mask.view(torch.uint8)
        launch(x, seen, y, *numbers, **constants)

    return run


def plan_backward(problem: SoftmaxProblem, config: TritonConfig) -> Callable[..., None]:
    """Make the launch of the backward kernel; it takes y, dy and dx."""
    tile, rows = config.backward, problem.rows
    assert tile is not None, "choose fills it"
    constants = backward_constants(problem, tile)
    walked = is_walked(problem, tile)
    kernel = kernels.softmax_bwd_walk_kernel if walked else kernels.softmax_bwd_kernel
    launch = launcher(kernel, tile.num_warps)[_grid(problem, tile)]
    numbers = (
        *(rows.count, rows.width_units, *rows.size_arguments()),
        *(*rows.stride_arguments(0), *rows.stride_arguments(1)),
    )

    def run(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
        launch(y, dy, dx, *numbers, **constants)

    return run


def _grid(problem: SoftmaxProblem, tile: Tile) -> tuple[int]:
    return (
        problem.rows.count if is_walked(problem, tile) else -(-problem.rows.count // tile.rows),
    )
