"""Which backend of cross entropy runs, and with what tiles: the rule, and the choice."""

from __future__ import annotations

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.cross_entropy.problem import CrossEntropyProblem
from tileloom.target import Target


def cross_entropy_rule(problem: CrossEntropyProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: blocks of a row, of as many columns as a row has if few."""
    del target
    whole = max(16, 1 << max(problem.rows.width - 1, 0).bit_length())
    forward, backward = min(whole, 8192), min(whole, 4096)
    return TritonConfig(
        forward=Tile(forward, 1, max(1, min(8, forward // 1024))),
        backward=Tile(backward, 1, max(1, min(8, backward // 512))),
    )


def choose(problem: CrossEntropyProblem, target: Target, config: RowConfig | None = None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose("cross_entropy", problem, target, config, cross_entropy_rule)
