"""Which tiles run a normalisation: the rule. The kernels refuse only what all row-wise ones do."""

from __future__ import annotations

from dataclasses import replace

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.target import Target

# The most columns of a row that a program keeps in registers: float32, 1024 threads; the backward
# has the shares of dweight and dbias there as well.
_WHOLE_FORWARD = 32768
_WHOLE_BACKWARD = 16384
_WHOLE_BACKWARD_CENTRED = 8192
# The largest tile beside which the backward keeps the weight in registers.
HELD = 8192


def padded(width: int) -> int:
    """The power of two that a row's columns are rounded up to, at least 16."""
    return max(16, 1 << max(width - 1, 0).bit_length())


def smem_bytes(problem: NormProblem, tile: Tile) -> int:
    """Shared memory that the backward's pipeline takes, in bytes."""
    row = problem.dtype.itemsize * (3 if problem.has_residual else 2)
    weight = 4 if tile.block * tile.rows > HELD else 0
    return (tile.stages - 1) * tile.block * tile.rows * (row + weight) + 4096


def rule(problem: NormProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem."""
    width = padded(problem.rows.width)
    rows = max(1, 2048 // width)
    if width > _WHOLE_FORWARD:
        forward = Tile(8192, 1, 8)
    else:
        forward = Tile(width, rows, max(1, min(32, width * rows // 512)))
    if width > (_WHOLE_BACKWARD_CENTRED if problem.is_centred else _WHOLE_BACKWARD):
        backward = Tile(2048, 1, 8, 4)
    else:
        warps = max(1, min(32, width * rows // 512))
        backward = Tile(width, rows, warps, max(1, 16 // warps), 2)
        if smem_bytes(problem, backward) > target.smem:
            backward = replace(backward, stages=1)
    return TritonConfig(forward, backward)


def _own_reasons(problem: NormProblem, config: TritonConfig, target: Target) -> list[str]:
    tile = config.backward
    if tile is None or smem_bytes(problem, tile) <= target.smem:
        return []
    return [
        f"backward.stages is {tile.stages}, which needs {smem_bytes(problem, tile)} bytes of "
        f"shared memory, and {target.name} has {target.smem}"
    ]


def choose(op: str, problem: NormProblem, target: Target, config: RowConfig | None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose(op, problem, target, config, rule, _own_reasons)
