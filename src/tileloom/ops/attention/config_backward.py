"""What each backend of attention's backward supports, and which one runs.

Every forward saves the same, O and LSE, so any backward follows any forward. A forward that was
forced to the reference has the reference's backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.attention.config import (
    ReferenceConfig,
    padded_head_dim,
    portable_reasons,
    tile_faults,
)
from tileloom.ops.attention.config_backward_sm90 import (
    GluonSm90BackwardConfig,
    gluon_backward_rule,
)
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import Target

_HALF = (torch.float16, torch.bfloat16)
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """Sizes of one kernel of the portable backward.

    Attributes:
        block_m: Query rows of a tile, or of a step: a power of two, at least 16.
        block_n: Keys of a step, or of a tile: a power of two, at least 16.
        num_warps: Warps of a block: a power of two.
        num_stages: Depth of the software pipeline.
        chunk_d: Columns that one product of S or dP takes, a power of two, at least 16; 0 for all
            of them. Below the head dim, blocks are read again in every step instead of kept.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    chunk_d: int = 0

    def encode(self) -> str:
        """Return the tile as text."""
        fields = (self.block_m, self.block_n, self.num_warps, self.num_stages, self.chunk_d)
        return ",".join(map(str, fields))

    @staticmethod
    def decode(text: str) -> Tile:
        """Read a tile from its text."""
        return Tile(*(int(f) for f in text.split(",")))


@dataclass(frozen=True)
class TritonBackwardConfig:
    """The portable backward; see `kernel_triton_bwd.py`.

    Attributes:
        dkv: The kernel that computes dK and dV.
        dq: The kernel that computes dQ; also the sizes of those that only a bias needs.
    """

    dkv: Tile = field(default_factory=Tile)
    dq: Tile = field(default_factory=Tile)
    backend = "triton"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return f"triton:{self.dkv.encode()};{self.dq.encode()}"

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        blocks = max(tile.block_m + tile.block_n for tile in (self.dkv, self.dq))
        why = portable_reasons(problem, target, blocks)
        keys, rows = problem.blocks_k(self.dkv.block_n), problem.blocks_q(self.dq.block_m)
        tiles = (
            ("B * Hkv * ceil(Lk / dkv.block_n)", problem.heads_kv * keys),
            ("B * Hq * ceil(Lq / dq.block_m)", problem.heads_q * rows),
        )
        for text, programs in tiles:
            if programs > _MAX_INT32:
                why.append(f"{text} is {programs}, more than 2^31 - 1")
        why += [*tile_faults(self.dkv, "dkv."), *tile_faults(self.dq, "dq.")]
        if max(self.dkv.num_stages, self.dq.num_stages) > 1:
            if problem.dtype in _HALF:
                why += _op.pipeline_reasons(target)
            if problem.has_mask or problem.has_bias:
                why.append(
                    "num_stages is above 1 with a mask or bias, of which Triton's pipeline then "
                    "reads entries past the last key (seen on the emulator with 3.7.1)"
                )
        for name, rows in (("dkv.block_n", self.dkv.block_n), ("dq.block_m", self.dq.block_m)):
            why += _op.tf32_reasons(name, rows, problem.dtype, target)
        return tuple(why)


AttentionBackwardConfig = ReferenceConfig | TritonBackwardConfig | GluonSm90BackwardConfig


def decode_backward(text: str) -> AttentionBackwardConfig | None:
    """Read a config from the text that the operator's schema carries; "" means: choose.

    Raises:
        ConfigError: If no config writes such a text.
    """
    return _op.read_config("attention", "backward_config", text, _read)


def _read(text: str) -> AttentionBackwardConfig | None:
    backend, _, rest = text.partition(":")
    if backend == "triton":
        dkv, _, dq = rest.partition(";")
        return TritonBackwardConfig(Tile.decode(dkv), Tile.decode(dq))
    if backend == "gluon_sm90":
        return GluonSm90BackwardConfig.decode(rest)
    if text not in ("", "reference"):
        raise ValueError(text)
    return ReferenceConfig() if text else None


def triton_backward_rule(problem: AttentionProblem, target: Target) -> TritonBackwardConfig:
    """Give the portable config for a problem.

    For Hopper the fastest tiles of 180 that were measured (H200, 2026-11-28, Triton 3.6.0; head
    dims 64, 128, 256; no dropout) and spill little; where nothing was measured, and for the other
    architectures, the largest tiles that spill no register, found by compiling. There is one
    stage: from sm_90 on a pipeline would have to be fenced, see `pipeline_reasons`.
    """
    widest = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    capability = target.capability[0]
    if capability == 9 and not problem.dropout_p:
        measured = _hopper_rule(problem, widest)
        if measured is not None:
            return measured
    if problem.dtype == torch.float32:
        return _float32_rule(widest, capability)
    if widest > 256:
        chunk = 32 if capability == 10 else 64
        return TritonBackwardConfig(Tile(16, 16, 8, 1, chunk), Tile(16, 16, 8, 1, 64))
    has_tensors = problem.has_mask or problem.has_bias
    if problem.dropout_p and not has_tensors and capability == 9 and widest in (64, 128):
        # H200, L 4096, ms of dK dV and of dQ: 14.6 and 13.4 (14.6 by 32 keys) at head dim 64; 16.3
        # (20.7 by 16 rows) and 17.6 (20.5 by 8 warps) at 128.
        is_wide = widest == 128
        return TritonBackwardConfig(
            Tile(32, 64, 8 if is_wide else 4), Tile(64, 32 if is_wide else 64, 4)
        )
    if has_tensors or problem.dropout_p:
        if widest <= 64:
            rows = 16 if capability == 8 and widest == 64 else 32
            has_all = problem.dropout_p and has_tensors
            return TritonBackwardConfig(Tile(rows, 64, 8 if has_all else 4), Tile(64, 32, 4))
        if widest == 128:
            rows = 32 if capability == 10 else 16
            return TritonBackwardConfig(Tile(rows, 64, 8), Tile(64, 32, 8))
        return TritonBackwardConfig(Tile(16, 32, 8, 1, 32), Tile(64, 32, 8, 1, 64))
    if widest <= 64:
        rows = 32 if capability == 8 and widest == 64 else 64
        return TritonBackwardConfig(Tile(rows, 128, 8), Tile(128, 64, 8))
    if widest == 128:
        is_hopper = capability == 9
        return TritonBackwardConfig(
            Tile(32 if is_hopper else 64, 64, 8), Tile(128 if is_hopper else 64, 64, 8)
        )
    return TritonBackwardConfig(Tile(32, 32, 8), Tile(64, 32, 8))


def _hopper_rule(problem: AttentionProblem, widest: int) -> TritonBackwardConfig | None:
    """Give the portable config for Hopper, None where none was measured."""
    has_scores = problem.has_mask or problem.has_bias
    if problem.dtype == torch.float32:
        if has_scores or widest > 128:
            return None
        if widest == 128:
            return TritonBackwardConfig(Tile(16, 32, 8, 1, 16), Tile(64, 32, 4, 1, 16))
        return TritonBackwardConfig(Tile(32, 32, 4, 1, 32), Tile(64, 64, 4, 1, 16))
    if has_scores:
        return TritonBackwardConfig(Tile(32, 64, 8), Tile(64, 32, 4)) if widest == 128 else None
    if widest <= 64:
        return TritonBackwardConfig(Tile(64, 128, 8), Tile(64, 32, 4))
    if widest == 128:
        return TritonBackwardConfig(Tile(32, 64, 4), Tile(128, 64, 8))
    return TritonBackwardConfig(Tile(64, 32, 8), Tile(64, 64, 8)) if widest == 256 else None


def _float32_rule(widest: int, capability: int) -> TritonBackwardConfig:
    """Give the portable config for float32."""
    if widest <= 64:
        rows = 16 if capability == 10 and widest == 64 else 32
        return TritonBackwardConfig(Tile(rows, 32, 8, 1, 16), Tile(32, 32, 8, 1, 16))
    if widest == 128:
        rows = 16 if capability == 10 else 32
        return TritonBackwardConfig(Tile(16, 32, 8, 1, 16), Tile(rows, 16, 8, 1, 16))
    return TritonBackwardConfig(Tile(16, 16, 8, 1, 16), Tile(16, 16, 8, 1, 16))


def choose_backward(
    problem: AttentionProblem, target: Target, config: AttentionBackwardConfig | None = None
) -> Choice:
    """Choose backend and config: an explicit config, else the first backend that takes the problem.

    Args:
        problem: The forward's problem.
        target: Where.
        config: Forces its backend.

    Returns:
        The decision with its source, and the reasons of every backend that refused.

    Raises:
        ConfigError: If an explicit config cannot run the problem.
        UnsupportedError: If no backend can.
    """
    candidates: tuple[AttentionBackwardConfig, ...] = (ReferenceConfig(),)
    if target.kind != "cpu":
        portable = triton_backward_rule(problem, target)
        candidates = (gluon_backward_rule(problem, target.sms), portable, ReferenceConfig())
    return _op.choose(
        *(f"{problem.name}_bwd", problem, target, config, candidates),
        option="backward_config",
        what="this problem's backward",
    )
