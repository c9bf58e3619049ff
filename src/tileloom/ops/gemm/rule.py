"""Which backend and tile a matrix product gets: what was measured to be fastest."""

from __future__ import annotations

from dataclasses import replace

import torch

from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.gemm.config import (
    GluonSm90Config,
    MatmulConfig,
    ReferenceConfig,
    TritonConfig,
)
from tileloom.ops.gemm.config_matvec import matvec_rule
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.target import Target


def gluon_rule(problem: MatmulProblem, sms: int) -> GluonSm90Config:
    """Give the Hopper config for a problem, by what was measured (docs/matmul_measurements.md).

    * At most 64 rows: the operands exchanged, so that a tile is as wide as A has rows, and 128 of
      k to a slot. The product is bound by memory, and a slot of 64 rows too small to hide it. A
      counter deals the tiles of more than one wave: whoever is served first takes the next one.
    * Up to 128 rows the same with tiles of 128 x 128, of more than one wave; what is one wave of
      64 x 128, exchanged, is that up to 256 rows.
    * Otherwise the tile whose waves take the least time, by what it reaches of the card's speed.
      Up to 1,024 rows also with the operands exchanged and no groups, by turns: faster there.
    * From 4 waves of 128 x 256 on a counter deals the tiles: dealt by turns, blocks drift
      apart and no longer read the same rows at about the same time. Groups of 12 rows of tiles
      make about a square of the 132 that run together. With chunks only products alone, whose
      tiles are stored early.
    """
    if problem.m <= _FEW_ROWS and not problem.chunks:
        return _few_rows(problem, sms)
    is_some = problem.m <= 128 and problem.k >= 1024 and not problem.chunks
    if is_some and _waves(problem, sms, _SOME) > 1:
        return _SOME
    speeds = dict(_SPEED)
    if problem.chunks:
        speeds = _inside(problem, speeds)
    if problem.m <= _MIDDLE_ROWS < problem.n and not problem.chunks:
        speeds |= _SPEED_EXCHANGED
        if problem.m <= _SOME_ROWS and problem.k >= 1024:
            speeds |= _SPEED_SOME
        if problem.residual is None:  # beside one there is room for two stages
            speeds |= _SPEED_LARGE
    best = min(speeds, key=lambda config: _cost(problem, sms, config) / speeds[config])
    is_wide = (best.block_m, best.block_n) == (128, 256)
    if not is_wide or _waves(problem, sms, best) < _MANY_WAVES:
        return best
    if problem.chunks:
        dealt = replace(best, scheduler="dynamic")
        return dealt if dealt.stores_early(problem) else best
    return replace(best, scheduler="dynamic", swizzle_size=12, swap_ab=False)


_FEW_ROWS, _SOME_ROWS, _MIDDLE_ROWS, _MANY_WAVES, _LONG = 64, 256, 1024, 4, 2048
_SOME = GluonSm90Config(128, 128, swizzle_size=1, scheduler="dynamic", swap_ab=True)
_SPEED = {
    GluonSm90Config(128, 256): 1.0,
    GluonSm90Config(256, 128): 0.99,
    GluonSm90Config(192, 128): 0.97,
    GluonSm90Config(128, 128): 0.95,
    GluonSm90Config(64, 256): 0.80,
    GluonSm90Config(64, 128): 0.65,
    GluonSm90Config(128, 64): 0.62,
    GluonSm90Config(64, 64): 0.4,
    GluonSm90Config(64, 32): 0.2,
}
_SPEED_EXCHANGED = {
    GluonSm90Config(128, 256, swizzle_size=1, swap_ab=True): 1.01,
    GluonSm90Config(192, 128, swizzle_size=1, swap_ab=True): 0.98,
    GluonSm90Config(128, 128, swizzle_size=1, swap_ab=True): 0.97,
}


_SPEED_SOME = {GluonSm90Config(64, 128, block_k=128, swap_ab=True): 0.7}
_SPEED_LARGE = {GluonSm90Config(128, 320): 0.98}


def _inside(
    problem: MatmulProblem, speeds: dict[GluonSm90Config, float]
) -> dict[GluonSm90Config, float]:
    """Of equal chunks the tiles that lie inside one, so that no tile waits for two."""
    rows, rest = divmod(problem.m, problem.chunks)
    found = {config: speed for config, speed in speeds.items() if rows % config.block_m == 0}
    return speeds if rest or not found else found


def _few_rows(problem: MatmulProblem, sms: int) -> GluonSm90Config:
    if problem.m > 32 and problem.b_is_transposed and problem.k > 64 and problem.l == 1:
        for columns in (48, 80):  # where 64 leave a wave a quarter empty, and these do not
            if _fill(problem.n, 64, sms) < 0.75 and _fill(problem.n, columns, sms) > 0.9:
                return GluonSm90Config(64, columns, block_k=128)
    columns = next(size for size in (16, 32, 64) if size >= problem.m)
    rows = 128 if columns == 16 and problem.a_is_transposed else 64  # see `_faults`
    block_k = 64 if problem.k <= 64 else 128
    config = GluonSm90Config(rows, columns, block_k=block_k, swap_ab=True)
    waves = _waves(problem, sms, config)
    if waves == 1 or problem.k <= _LONG:
        return config
    rows = 128 if columns == 64 and waves > 3 else rows
    return replace(config, block_m=rows, scheduler="dynamic")


def _fill(columns: int, width: int, sms: int) -> float:
    """How full tiles of such a width make their waves."""
    tiles = -(-columns // width)
    return tiles / (-(-tiles // sms) * sms)


def _waves(problem: MatmulProblem, sms: int, config: GluonSm90Config) -> int:
    seen = config.seen(problem)
    tiles = -(-seen.m // config.block_m) * -(-seen.n // config.block_n) * problem.l
    return -(-tiles // sms)


def _cost(problem: MatmulProblem, sms: int, config: GluonSm90Config) -> float:
    fixed = 1024  # of k: what a tile costs beside its steps
    area = config.block_m * config.block_n
    return _waves(problem, sms, config) * area * (problem.k + fixed)


def triton_rule(problem: MatmulProblem, target: Target) -> TritonConfig:
    """Give the portable config for a problem; found by compiling without spills, not tuned."""
    is_fused = problem.residual is not None or problem.activation != ""
    if problem.dtype == torch.float32:
        if target.capability[0] == 10:
            return TritonConfig(32, 64, 16, 4)
        return TritonConfig(64, 64, 16, 8 if is_fused else 4)
    if problem.m <= 64:
        return TritonConfig(64, 64, 64, 4)
    if is_fused:
        return TritonConfig(128, 64, 32, 8)
    return TritonConfig(128, 128, 32, 8)


def choose(problem: MatmulProblem, target: Target, config: MatmulConfig | None = None) -> Choice:
    """Choose backend and config: an explicit config, else the first backend that takes the problem.

    Raises:
        ConfigError: If an explicit config cannot run the problem.
        UnsupportedError: If no backend can.
    """
    candidates: tuple[MatmulConfig, ...] = (ReferenceConfig(),)
    if target.kind != "cpu":
        hopper, portable = gluon_rule(problem, target.sms), triton_rule(problem, target)
        candidates = (hopper, portable, ReferenceConfig())
        one_row = matvec_rule(problem, target)
        if one_row is not None:
            candidates = (one_row, *candidates)
    return _op.choose("matmul", problem, target, config, candidates)
