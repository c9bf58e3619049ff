"""The arguments that a plan fixes for each kernel: what follows from a problem and a tile alone.

Each function gives the number of programs and the kernel's arguments after its tensors, in order:
plans launch with them, and `kernels.py` compiles with them.
"""

from __future__ import annotations

from typing import Any

from tileloom.ops.rowwise.config import Tile, padded, parts_of
from tileloom.ops.rowwise.norm.config import HELD
from tileloom.ops.rowwise.norm.problem import NormProblem

# Shares that `norm_vectors_kernel` adds up side by side, and its columns.
_SHARES, _COLUMNS = 128, 32

Fixed = tuple[int, tuple[Any, ...]]


def _is_even(problem: NormProblem, tile: Tile) -> bool:
    """Whether tiles of whole rows cover the rows without a rest."""
    rows = problem.rows
    return tile.block == rows.width and rows.count % tile.rows == 0


def _form(problem: NormProblem) -> tuple[int, int, bool]:
    """The constants GROUPS, VECTOR, CENTRED."""
    return problem.rows.groups, problem.rows.vector, problem.is_centred


def _sizes(problem: NormProblem) -> tuple[int | None, ...]:
    """The arguments `width_units, size_1, size_2`."""
    return problem.rows.width_units, *problem.rows.size_arguments()


def forward(
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float
) -> Fixed:
    """Of `norm_fwd_kernel`; `vectors` are the strides of weight and bias where they matter."""
    rows = problem.rows
    strides = (s for t in range(3) for s in rows.stride_arguments(t))
    return -(-rows.count // tile.rows), (
        eps, rows.count, *_sizes(problem), *strides, *vectors,
        tile.rows, tile.block, _is_even(problem, tile), *_form(problem),
    )  # fmt: skip


def forward_split(
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float
) -> Fixed:
    """Of `norm_fwd_split_kernel`."""
    rows = problem.rows
    parts = parts_of(problem.rows.width, tile)
    strides = (s for t in range(3) for s in rows.stride_arguments(t))
    return rows.count * parts, (
        eps, parts, *_sizes(problem), *strides, *vectors,
        tile.block, padded(parts), *_form(problem),
    )  # fmt: skip


def _backward_strides(problem: NormProblem) -> tuple[int | None, ...]:
    return tuple(s for t in range(4) for s in problem.rows.stride_arguments(t))


def backward(problem: NormProblem, tile: Tile, weight_d: int | None, sms: int) -> Fixed:
    """Of `norm_bwd_kernel`; `weight_d` is the weight's stride where it matters."""
    rows = problem.rows
    return min(-(-rows.count // tile.rows), sms * tile.per_sm), (
        rows.count, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.rows, tile.block, _is_even(problem, tile), *_form(problem),
        problem.has_weight, problem.has_bias, tile.block * tile.rows <= HELD, tile.stages,
    )  # fmt: skip


def groups_of(problem: NormProblem, tile: Tile, sms: int) -> int:
    """Groups of rows of `norm_bwd_split_kernel`: as many as the GPU takes at a time."""
    most = sms * tile.per_sm // parts_of(problem.rows.width, tile)
    return max(1, min(problem.rows.count, most))


def backward_split(problem: NormProblem, tile: Tile, weight_d: int | None, sms: int) -> Fixed:
    """Of `norm_bwd_split_kernel`."""
    parts, groups = parts_of(problem.rows.width, tile), groups_of(problem, tile, sms)
    return groups * parts, (
        problem.rows.count, parts, groups, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.block, padded(parts), *_form(problem), problem.has_weight, problem.has_bias,
        tile.stages > 1,
    )  # fmt: skip


def vectors(problem: NormProblem, programs: int) -> Fixed:
    """Of `norm_vectors_kernel` for the shares of so many programs or groups."""
    width = problem.rows.width
    return -(-width // _COLUMNS), (programs, width, _SHARES, _COLUMNS)
