"""Which tiles run a normalisation: the rule. The kernels refuse only what all row-wise ones do."""

from __future__ import annotations

from dataclasses import replace

from tileloom.ops._op import Choice
from tileloom.ops.rowwise import config as shared
from tileloom.ops.rowwise.config import RowConfig, Tile, TritonConfig, padded, parts_of
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.target import Target

# The most columns of a row that a program keeps in registers: float32, 1024 threads; the backward
# has the shares of dweight and dbias there as well.
_WHOLE_FORWARD = 32768
_WHOLE_BACKWARD = 16384
_WHOLE_BACKWARD_CENTRED = 8192
# The largest tile beside which the backward keeps the weight in registers.
HELD = 8192


# Rows up to which the backward is one launch that reads them twice, not two launches.
_FEW = 256


def smem_bytes(problem: NormProblem, tile: Tile) -> int:
    """Shared memory that the backward's pipeline takes, in bytes."""
    row = problem.dtype.itemsize * (3 if problem.has_residual else 2)
    weight = 4 if tile.block > HELD else 0
    return (tile.stages - 1) * tile.block * tile.rows * (row + weight) + 4096


def _shared(problem: NormProblem, target: Target, tile: Tile) -> Tile:
    """The tile, widened until no more than half of the multiprocessors share a row."""
    while 2 * parts_of(problem.rows.width, tile) > target.sms and tile.block < 65536:
        tile = replace(
            tile, block=2 * tile.block, num_warps=min(32, 2 * tile.num_warps),
            per_sm=max(1, tile.per_sm // 2),
        )  # fmt: skip
    return tile


def _forward(problem: NormProblem, target: Target) -> Tile:
    width, is_half = padded(problem.rows.width), problem.dtype.itemsize == 2
    if width > _WHOLE_FORWARD:
        if not is_half:
            return _shared(problem, target, Tile(2048, 1, 8, 3))
        tile = Tile(8192, 1, 8, 2) if problem.is_centred else Tile(4096, 1, 4, 4)
        return _shared(problem, target, tile)
    if width > 4096:
        # Layer norm of 16384 with float32 vectors: 0.76 of copy bandwidth with 16 warps, not 0.98.
        few = problem.is_centred and width == 16384
        return Tile(width, 1, 8 if few else 16 if is_half or width < 32768 else 32)
    rows = max(1, 2048 // width)
    return Tile(width, rows, max(1, width * rows // 512))


def _backward(problem: NormProblem, target: Target) -> Tile:
    width, is_half = padded(problem.rows.width), problem.dtype.itemsize == 2
    if width > (_WHOLE_BACKWARD_CENTRED if problem.is_centred else _WHOLE_BACKWARD):
        tile = Tile(4096, 1, 4, 2, 2) if is_half else Tile(2048, 1, 8, 2, 2)
        tile = _shared(problem, target, tile)
        return tile if tile.block < 16384 else replace(tile, stages=1)
    if problem.rows.count <= _FEW:
        return Tile(width, 1, max(4, width // 512), split=True)
    if width == 16384:
        return Tile(width, 1, 32 if is_half else 16)
    if width == 8192 and is_half:  # rows that fill the tile leave less time to load ahead
        return Tile(width, 1, 8, 1, 3 if width == problem.rows.width else 4)
    if width == 4096 and is_half and not problem.is_centred:
        return Tile(width, 2, 8, 1, 3)
    rows = 2048 // width if width <= 512 else 1
    warps = max(1, width * rows // 512)
    per_sm = 4 if warps <= 2 else 2 if warps <= 8 else 1
    tile = Tile(width, rows, warps, per_sm, 3)
    while tile.stages > 1 and per_sm * smem_bytes(problem, tile) > target.smem:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def rule(problem: NormProblem, target: Target) -> TritonConfig:
    """Give the tiles for a problem: whole rows in registers while they fit, else shared rows.

    Measured on an H200 on 2026-11-28 (Triton 3.6.0, bfloat16, 2^26 elements), as a share of the
    bandwidth of a copy, 4.2 TB/s. Whole rows, rms norm: forward 0.94 (4096), 0.94 (8192), 0.95
    (16384), 0.88 (32768); backward 0.93 (4096), 0.91 (5120), 0.87 (16384). Layer norm: forward 0.93
    (4096), 0.89 (16384); backward 0.90 (4096), 0.83 (5120), 0.89 (8192). Shared rows of 131072:
    forward 0.81 (rms), 0.66 (layer), backward 0.68 and 0.50, of layer norm of 16384 0.56; of 2^20:
    0.60 forward, 0.41 and 0.19 backward. An H100 has 0.71 of that bandwidth: its shares are higher.
    """
    return TritonConfig(_forward(problem, target), _backward(problem, target))


def _own_reasons(problem: NormProblem, config: TritonConfig, target: Target) -> list[str]:
    why: list[str] = []
    for name, tile in (("forward", config.forward), ("backward", config.backward)):
        if tile is None:
            continue
        parts = parts_of(problem.rows.width, tile)
        if parts > 1 and 2 * parts > target.sms:
            why.append(
                f"{name}.block is {tile.block}, so that {parts} programs share a row and wait for "
                f"each other, more than half of the {target.sms} multiprocessors of {target.name}"
            )
    tile = config.backward
    if tile is None or tile.split or parts_of(problem.rows.width, tile) > 1:
        return why
    needs = smem_bytes(problem, tile)
    if needs > target.smem:
        why.append(
            f"backward.stages is {tile.stages}, which needs {needs} bytes of shared memory, and "
            f"{target.name} has {target.smem}"
        )
    return why


def choose(op: str, problem: NormProblem, target: Target, config: RowConfig | None) -> Choice:
    """Choose backend and tiles; see `tileloom.ops.rowwise.config.choose`."""
    return shared.choose(op, problem, target, config, rule, _own_reasons)
