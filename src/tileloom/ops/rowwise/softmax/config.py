"""Which backend of softmax runs, and with what tiles: the rule, and the choice."""

from __future__ import annotations

from dataclasses import replace

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig, padded, parts_of
from tileloom.ops.rowwise.softmax.problem import SoftmaxProblem
from tileloom.target import Target

# The most columns of a row that a program keeps in registers: float32, 1024 threads.
_WHOLE_FORWARD, _WHOLE_BACKWARD = 32768, 16384


def softmax_rule(problem: SoftmaxProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: whole rows in registers while they fit, else shared rows.

    As measured on an H100 on 2026-11-28; see `benchmarks/results`. On an H200 of 1.4 times the
    bandwidth, bfloat16, shares of a copy's: rows of 131072 forward by a cluster 0.92, shared 0.81
    (two exponentials an element and masks 0.77), backward shared 0.94; of 32768 by a cluster 0.96,
    shared 0.87, whole 0.74. Clusters that meet by `barrier.cluster`: 0.73; of 16 warps a CTA 0.82.
    """
    whole = padded(problem.rows.width)
    is_half = problem.dtype.itemsize == 2
    cluster = None
    if whole > 16384 and not problem.has_mask:
        cluster = shared.cluster_of(problem.rows, problem.dtype, target)
    if cluster is not None:
        forward = cluster
    elif whole <= _WHOLE_FORWARD:
        # Rows that fill 16384 columns, whose loads have no mask: 0.94 of a copy, with 32 0.90.
        is_full = is_half and problem.rows.width == 16384
        forward = _whole(whole, elements=64 if is_full else 32)
    else:
        forward = _shared(problem, target, Tile(8192, 1, 4 if is_half else 8, split=True))
    if whole <= _WHOLE_BACKWARD:
        # 16 warps leave room for a second program: 0.99 of a copy, 32 warps 0.95.
        backward = _whole(whole, elements=32 if is_half and problem.rows.width == 16384 else 16)
    else:
        tile = Tile(8192, 1, 4, split=True) if is_half else Tile(4096, 1, 8, split=True)
        backward = _shared(problem, target, tile)
    return TritonConfig(forward, backward)


def _whole(whole: int, *, elements: int) -> Tile:
    """A tile of whole rows with so many elements a thread."""
    rows = max(1, 32 * elements // whole)
    return Tile(whole, rows, max(1, min(32, whole * rows // (32 * elements))))


def _shared(problem: SoftmaxProblem, target: Target, tile: Tile) -> Tile:
    """The tile, widened until its programs may meet; where that cannot be, one that walks."""
    wide = tile
    while split_reasons(problem, TritonConfig(wide), target):
        if wide.num_warps == 32:
            return replace(tile, split=False)
        wide = replace(wide, block=2 * wide.block, num_warps=2 * wide.num_warps)
    return wide


def split_reasons(problem: SoftmaxProblem, config: TritonConfig, target: Target) -> tuple[str, ...]:
    """Why the programs of the config's tiles may not meet; see `pieces_split` for the first."""
    why: list[str] = []
    for name, tile in (("forward", config.forward), ("backward", config.backward)):
        if tile is None or not tile.split or tile.block >= problem.rows.width:
            continue
        parts = parts_of(problem.rows.width, tile)
        if 2 * parts > target.sms:
            why.append(
                f"{name}.split lets {parts} programs wait for each other, more than half of the "
                f"{target.sms} multiprocessors of {target.name}"
            )
        programs = parts * problem.rows.count
        if programs > 2**31 - 1:
            why.append(f"{name}.split takes {programs} programs, more than 2^31 - 1")
    return tuple(why)


def _own_reasons(problem: SoftmaxProblem, config: TritonConfig, target: Target) -> tuple[str, ...]:
    why = list(split_reasons(problem, config, target))
    forward, backward = config.forward, config.backward
    if forward is not None:
        why += shared.cluster_reasons("forward", problem.rows, forward, target)
        if forward.ctas > 1 and problem.has_mask:
            why.append("forward.ctas takes no mask")
    if backward is not None and backward.ctas > 1:
        why.append(f"backward.ctas is {backward.ctas}, and only the forward takes clusters")
    return tuple(why)


def choose(problem: SoftmaxProblem, target: Target, config: RowConfig | None = None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose("softmax", problem, target, config, softmax_rule, _own_reasons)
