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
    whole = max(16, 1 << max(problem.rows.width - 1, 0).bit_length())
    if problem.rows.vector > 1:
        block = min(whole, 4096)
        warps = max(1, block // 512)
        return TritonConfig(Tile(block, 1, warps if block > 1024 else 1), Tile(block, 1, warps))
    # Without vectors a thread takes fewer elements, which need more registers each.
    forward, backward = min(whole, 2048 if problem.rows.vector else 1024), min(whole, 1024)
    return TritonConfig(
        Tile(forward, 1, max(1, forward // 256)), Tile(backward, 1, max(1, backward // 256))
    )


def choose(problem: CrossEntropyProblem, target: Target, config: RowConfig | None = None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose("cross_entropy", problem, target, config, cross_entropy_rule)
