"""Which backend of softmax runs, and with what tiles: the rule, and the choice."""

from __future__ import annotations

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.softmax.problem import SoftmaxProblem
from tileloom.target import Target


def softmax_rule(problem: SoftmaxProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: whole rows in registers while they fit, else walked."""
    del target
    whole = max(16, 1 << max(problem.rows.width - 1, 0).bit_length())
    return TritonConfig(
        forward=_tile(whole, most=32768, walked=Tile(8192, 1, 8), elements=32),
        backward=_tile(whole, most=16384, walked=Tile(4096, 1, 8), elements=16),
    )


def _tile(whole: int, *, most: int, walked: Tile, elements: int) -> Tile:
    """A tile of whole rows with so many elements a thread, or `walked` if a row exceeds `most`."""
    if whole > most:
        return walked
    rows = max(1, 1024 // whole)
    return Tile(whole, rows, max(1, min(32, whole * rows // (32 * elements))))


def choose(problem: SoftmaxProblem, target: Target, config: RowConfig | None = None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose("softmax", problem, target, config, softmax_rule)
