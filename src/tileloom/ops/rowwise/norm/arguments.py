"""The arguments that a plan fixes for each kernel: what follows from a problem and a tile alone.

Each function gives the number of programs and the kernel's arguments after its tensors, in order:
plans launch with them, and `kernels.py` compiles with them.
"""

from __future__ import annotations

from typing import Any

from tileloom.ops.rowwise.config import Tile
from tileloom.ops.rowwise.norm.config import HELD, padded
from tileloom.ops.rowwise.norm.problem import NormProblem

# Bytes of rows that the two kernels of the long form take at a time, so that the second finds in L2
# what the first has read: half of an H100's.
_L2_BYTES = 24 * 2**20
# Shares that `norm_vectors_kernel` adds up side by side, and its columns.
_SHARES, _COLUMNS = 16, 64

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


def splits_of(problem: NormProblem, tile: Tile) -> int:
    """Tiles of a long row."""
    return -(-problem.rows.width // tile.block)


def chunks(problem: NormProblem) -> list[tuple[int, int]]:
    """First row and beyond of each pair of launches of the long form."""
    read = 2 if problem.has_residual or problem.is_backward else 1
    size = max(1, _L2_BYTES // (problem.rows.width * problem.dtype.itemsize * read))
    count = problem.rows.count
    return [(first, min(first + size, count)) for first in range(0, count, size)]


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


def forward_stats(problem: NormProblem, tile: Tile, first: int, beyond: int) -> Fixed:
    """Of `norm_stats_kernel` for the rows `first .. beyond`."""
    splits = splits_of(problem, tile)
    strides = (s for t in range(3) for s in problem.rows.stride_arguments(t))
    return (beyond - first) * splits, (
        first, splits, *_sizes(problem), *strides, tile.block, *_form(problem),
    )  # fmt: skip


def forward_apply(
    problem: NormProblem, tile: Tile, vectors: tuple[int | None, int | None], eps: float,
    first: int, beyond: int,
) -> Fixed:  # fmt: skip
    """Of `norm_apply_kernel` for the rows `first .. beyond`."""
    rows = problem.rows
    splits = splits_of(problem, tile)
    return (beyond - first) * splits, (
        eps, first, splits, *_sizes(problem),
        *rows.stride_arguments(2 if problem.has_residual else 0), *rows.stride_arguments(2),
        *vectors, tile.block, padded(splits), *_form(problem),
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


def backward_stats(
    problem: NormProblem, tile: Tile, weight_d: int | None, first: int, beyond: int
) -> Fixed:
    """Of `norm_bwd_stats_kernel` for the rows `first .. beyond`."""
    rows = problem.rows
    splits = splits_of(problem, tile)
    return (beyond - first) * splits, (
        first, splits, *_sizes(problem), *rows.stride_arguments(0), *rows.stride_arguments(2),
        weight_d, tile.block, *_form(problem),
    )  # fmt: skip


def groups_of(problem: NormProblem, tile: Tile, sms: int) -> int:
    """Groups of rows of `norm_bwd_apply_kernel`: as many as keep the GPU busy."""
    most = chunks(problem)[0][1]
    return max(1, min(most, sms * tile.per_sm // splits_of(problem, tile)))


def backward_apply(
    problem: NormProblem, tile: Tile, weight_d: int | None, groups: int, first: int, beyond: int
) -> Fixed:
    """Of `norm_bwd_apply_kernel` for the rows `first .. beyond`."""
    splits = splits_of(problem, tile)
    return groups * splits, (
        first, beyond, splits, groups, *_sizes(problem), *_backward_strides(problem), weight_d,
        tile.block, padded(splits), *_form(problem),
        problem.has_weight, problem.has_bias, first > 0, tile.stages,
    )  # fmt: skip


def vectors(problem: NormProblem, programs: int) -> Fixed:
    """Of `norm_vectors_kernel` for the shares of so many programs or groups."""
    width = problem.rows.width
    return -(-width // _COLUMNS), (programs, width, _SHARES, _COLUMNS)
