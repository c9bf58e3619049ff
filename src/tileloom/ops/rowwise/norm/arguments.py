"""The arguments that a plan fixes for each kernel: what follows from a problem and a tile alone.

Each function gives the number of programs and the kernel's arguments after its tensors, in order:
plans launch with them, and `kernels.py` compiles with them.
"""

from __future__ import annotations

from typing import Any

from tileloom.ops.rowwise.config import Tile, groups_of, padded, parts_of
from tileloom.ops.rowwise.norm.config import HELD
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.target import Target

# Shares that `norm_vectors_kernel` adds up side by side, and its columns.
_SHARES, _COLUMNS = 256, 32

# Rows and columns that a program of `norm_bwd_few_kernel` adds up at a time.
_FEW_ROWS, _FEW_COLUMNS = 64, 32

Fixed = tuple[int, tuple[Any, ...]]


def _is_even(problem: NormProblem, tile: Tile) -> bool:
    """Whether tiles of whole rows cover the rows without a rest."""
    rows = problem.rows
    return tile.block == rows.width and rows.count % tile.rows == 0


def _form(problem: NormProblem) -> tuple[int, int, bool]:
    """The constants GROUPS, VECTOR, CENTRED."""
    return problem.rows.groups, problem.rows.vector, problem.is_centred


def _form_of_parts(problem: NormProblem, tile: Tile) -> tuple[int, int, bool, bool]:
    """The constants GROUPS, VECTOR, EVEN, CENTRED of rows that programs share."""
    rows = problem.rows
    return rows.groups, rows.vector, rows.width % tile.block == 0, problem.is_centred


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
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float, sms: int
) -> Fixed:
    """Of `norm_fwd_split_kernel`."""
    rows = problem.rows
    parts, groups = parts_of(problem.rows.width, tile), groups_of(rows, tile, sms)
    strides = (s for t in range(3) for s in rows.stride_arguments(t))
    return groups * parts, (
        eps, rows.count, parts, groups, *_sizes(problem), *strides, *vectors,
        tile.block, padded(parts), *_form_of_parts(problem, tile),
    )  # fmt: skip


def forward_cluster(problem: NormProblem, tile: Tile, eps: float) -> Fixed:
    """Of `norm_fwd_cluster_kernel`."""
    rows = problem.rows
    strides = (rows.stride_arguments(t)[2] for t in range(3))
    return -(-rows.count // tile.rows), (
        eps, rows.count, *strides, tile.block, tile.ctas, tile.num_warps, rows.vector, tile.rows,
        problem.is_centred,
    )  # fmt: skip


def _clusters(problem: NormProblem, most: int) -> int:
    """Clusters that walk: as many as run at a time, but none that would walk less than others."""
    count = problem.rows.count
    turns = -(-count // min(count, most))
    return -(-count // turns)


def forward_walk(problem: NormProblem, tile: Tile, eps: float, most: int) -> Fixed:
    """Of `norm_fwd_walk_kernel`; `most` clusters run at a time."""
    rows, clusters = problem.rows, _clusters(problem, most)
    strides = (rows.stride_arguments(t)[2] for t in (0, 2))
    return clusters, (
        eps, rows.count, clusters, *strides, tile.block, tile.ctas, tile.num_warps, tile.stages,
        problem.is_centred,
    )  # fmt: skip


def backward_walk(problem: NormProblem, tile: Tile, most: int, target: Target) -> Fixed:
    """Of `norm_bwd_walk_kernel`; `most` clusters run at a time."""
    rows, clusters = problem.rows, _clusters(problem, most)
    strides = (rows.stride_arguments(t)[2] for t in (0, 2, 3))
    return clusters, (
        rows.count, clusters, *strides, tile.block, tile.ctas, tile.num_warps, tile.stages,
        problem.has_weight, problem.has_bias, overlaps(target),
    )  # fmt: skip


def _backward_strides(problem: NormProblem) -> tuple[int | None, ...]:
    return tuple(s for t in range(4) for s in problem.rows.stride_arguments(t))


def overlaps(target: Target) -> bool:
    """Whether the kernel that adds up the shares starts as the one that writes them ends."""
    return target.capability >= (9, 0)


def backward(problem: NormProblem, tile: Tile, weight_d: int | None, target: Target) -> Fixed:
    """Of `norm_bwd_kernel`; `weight_d` is the weight's stride where it matters."""
    rows = problem.rows
    tiles = -(-rows.count // tile.rows)
    most = min(tiles, target.sms * tile.per_sm)
    turns = -(-tiles // most)
    return -(-tiles // turns), (
        rows.count, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.rows, tile.block, _is_even(problem, tile), *_form(problem),
        problem.has_weight, problem.has_bias, tile.block <= HELD, tile.stages, overlaps(target),
    )  # fmt: skip


def backward_ring(problem: NormProblem, tile: Tile, target: Target) -> Fixed:
    """Of `norm_bwd_ring_kernel`."""
    rows = problem.rows
    pieces = -(-rows.width // tile.block)
    turns = -(-rows.count // min(rows.count, target.sms * tile.per_sm))
    strides = (rows.stride_arguments(t)[2] for t in range(4))
    return -(-rows.count // turns), (
        rows.count, rows.width_units, *strides,
        tile.block, pieces, tile.stages, tile.num_warps, pieces * tile.block == rows.width,
        problem.has_weight, problem.has_bias, overlaps(target),
    )  # fmt: skip


def backward_few(problem: NormProblem, tile: Tile, weight_d: int | None) -> Fixed:
    """Of `norm_bwd_few_kernel`."""
    rows = problem.rows
    return rows.count + -(-rows.width // _FEW_COLUMNS), (
        rows.count, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.block, min(_FEW_ROWS, padded(rows.count)), _FEW_COLUMNS, *_form(problem),
    )  # fmt: skip


def backward_split(problem: NormProblem, tile: Tile, weight_d: int | None, target: Target) -> Fixed:
    """Of `norm_bwd_split_kernel`."""
    rows = problem.rows
    parts, groups = parts_of(rows.width, tile), groups_of(rows, tile, target.sms)
    return groups * parts, (
        rows.count, parts, groups, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.block, padded(parts), *_form_of_parts(problem, tile),
        problem.has_weight, problem.has_bias, tile.stages > 1, overlaps(target),
    )  # fmt: skip


def vectors(problem: NormProblem, programs: int, target: Target, *, halves: bool) -> Fixed:
    """Of `norm_vectors_kernel` for the shares of so many programs or groups."""
    width = problem.rows.width
    kinds = problem.has_weight + problem.has_bias
    shares = min(_SHARES, padded(programs))
    return -(-width // _COLUMNS) * kinds, (
        programs, width, shares, _COLUMNS, halves, overlaps(target),
    )  # fmt: skip
