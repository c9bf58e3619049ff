"""What each backend of attention supports, and which one runs: the only statement of both.

`reasons_against(problem, target)` of a config is used by dispatch, tests, documentation and error
texts alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tileloom.errors import ConfigError, UnsupportedError, bullet_list
from tileloom.ops._op import Choice, has_triton
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import Target

_HALF = (torch.float16, torch.bfloat16)
_MAX_INT32 = 2**31 - 1


def _padded(head_dim: int) -> int:
    """The power of two that a tile's columns are rounded up to; at least one wgmma K step."""
    return max(16, 1 << max(head_dim - 1, 0).bit_length())


@dataclass(frozen=True)
class ReferenceConfig:
    """The formula in plain torch; see `reference.py`. Runs everywhere, needs O(Lq * Lk) memory."""

    backend = "reference"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "reference"

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        del problem, target
        return ()


@dataclass(frozen=True)
class TritonConfig:
    """The portable kernel; see `kernel_triton.py`.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys of a step.
        num_warps: Warps of a block.
        num_stages: Depth of the software pipeline.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    backend = "triton"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return f"triton:{self.block_m},{self.block_n},{self.num_warps},{self.num_stages}"

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why: list[str] = []
        if target.kind == "cpu":
            why.append("it needs a GPU (or the emulator), and the tensors are on the CPU")
        elif target.capability < (8, 0):
            why.append(
                f"it needs compute capability 8.0 or later, and {target.name} has "
                f"{target.capability[0]}.{target.capability[1]}"
            )
        if not has_triton():
            why.append("Triton is not installed")
        if problem.dtype not in (*_HALF, torch.float32):
            why.append(f"dtype {problem.dtype} is not float16, bfloat16 or float32")
        if max(problem.head_dim, problem.head_dim_v) > 512:
            why.append(f"head dims {problem.head_dim} and {problem.head_dim_v} exceed 512")
        if problem.len_q + problem.len_k > _MAX_INT32:
            why.append("Lq + Lk exceeds 2^31 - 1")
        return tuple(why)


@dataclass(frozen=True)
class GluonSm90Config:
    """The Hopper kernel; see `kernel_gluon_sm90_fwd.py`.

    Attributes:
        consumers: Consumer warpgroups of 64 query rows each, 2 or 3.
        block_n: Keys of a step: 32, 64 or 128.
        stages: Depth of the K and V rings in shared memory.
        store: ``"tma"`` writes O through Q's shared memory, ``"registers"`` straight from
            registers (frees nothing, but needs no shared memory and no TMA descriptor).
        registers: Registers of a consumer thread.
    """

    consumers: int = 2
    block_n: int = 128
    stages: int = 2
    store: Literal["tma", "registers"] = "tma"
    registers: int = 240
    backend = "gluon_sm90"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return (
            f"gluon_sm90:{self.consumers},{self.block_n},{self.stages},{self.store},"
            f"{self.registers}"
        )

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, in bytes, barriers included."""
        d = _padded(head_dim)
        tiles = self.block_m * d + 2 * self.stages * self.block_n * d
        return 2 * tiles + 1024

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why: list[str] = []
        if target.kind == "cpu":
            why.append("it needs a Hopper GPU (or the emulator), and the tensors are on the CPU")
        elif target.capability != (9, 0):
            why.append(
                f"it needs compute capability 9.0, and {target.name} has "
                f"{target.capability[0]}.{target.capability[1]}"
            )
        if not has_triton():
            why.append("Triton is not installed")
        if problem.dtype not in _HALF:
            why.append(f"dtype {problem.dtype} is not float16 or bfloat16")
        if problem.head_dim != problem.head_dim_v:
            why.append(f"v has head dim {problem.head_dim_v}, q and k {problem.head_dim}")
        if problem.head_dim % 8 or not 8 <= problem.head_dim <= 256:
            why.append(f"head dim {problem.head_dim} is not a multiple of 8 in 8..256")
        if problem.has_mask:
            why.append("a bool mask tensor is given")
        if problem.has_bias:
            why.append("a bias is given")
        if not problem.scale > 0:
            why.append(f"scale {problem.scale} is not positive")
        if problem.len_q + problem.len_k > _MAX_INT32 - 256:
            why.append("Lq + Lk exceeds 2^31 - 257")
        why += _tma_reasons(problem)
        if target.kind != "cpu" and self.smem_bytes(problem.head_dim) > target.smem:
            why.append(
                f"it needs {self.smem_bytes(problem.head_dim)} bytes of shared memory, and "
                f"{target.name} has {target.smem}"
            )
        return tuple(why)


AttentionConfig = ReferenceConfig | TritonConfig | GluonSm90Config
BACKENDS = ("gluon_sm90", "triton", "reference")


def _tma_reasons(problem: AttentionProblem) -> list[str]:
    """What the TMA unit asks of q, k and v (CUDA driver API, cuTensorMapEncodeTiled)."""
    why: list[str] = []
    sizes_q = (problem.batch, problem.heads_q, problem.len_q)
    sizes_k = (problem.batch, problem.heads_kv, problem.len_k)
    each = (("q", problem.q, sizes_q), ("k", problem.k, sizes_k), ("v", problem.v, sizes_k))
    for name, layout, sizes in each:
        if not layout.is_aligned:
            why.append(f"{name} does not start at a multiple of 16 bytes")
        if layout.strides[3] != 1 and problem.head_dim > 1:
            why.append(f"{name}'s last dimension has stride {layout.strides[3]}, not 1")
        bad = [s for s, n in zip(layout.strides, sizes) if n > 1 and s % 8]
        if bad:
            why.append(f"{name} has a stride of {bad[0]} elements, not a multiple of 16 bytes")
        if any(s * 2 >= 2**40 for s in layout.strides):
            why.append(f"{name} has a stride of 2^40 bytes or more")
    return why


def decode(text: str) -> AttentionConfig | None:
    """Read a config from the text that the operator's schema carries; "" means: choose."""
    backend, _, rest = text.partition(":")
    fields = rest.split(",")
    if backend == "triton":
        return TritonConfig(*(int(f) for f in fields))
    if backend == "gluon_sm90":
        store: Literal["tma", "registers"] = "tma" if fields[3] == "tma" else "registers"
        return GluonSm90Config(
            int(fields[0]), int(fields[1]), int(fields[2]), store, int(fields[4])
        )
    return ReferenceConfig() if backend == "reference" else None


def gluon_rule(problem: AttentionProblem) -> GluonSm90Config:
    """Give the Hopper config for a problem (H100: benchmarks/results/attention_fwd*.json)."""
    d = _padded(problem.head_dim)
    if d == 256:
        return GluonSm90Config(2, 64, 2, "registers", 240)
    return GluonSm90Config(2, 128, 2, "tma", 240)


def triton_rule(problem: AttentionProblem, target: Target) -> TritonConfig:
    """The portable config for a problem: tiles that fit the registers and shared memory."""
    del target
    widest = max(_padded(problem.head_dim), _padded(problem.head_dim_v))
    size = 4 if problem.dtype == torch.float32 else 2
    if widest * size <= 128:
        return TritonConfig(128, 64, 4, 1)
    if widest * size <= 512:
        return TritonConfig(64, 64, 4, 1)
    return TritonConfig(32 if size == 4 else 64, 32, 4 if size == 4 else 8, 1)


def choose(
    problem: AttentionProblem, target: Target, config: AttentionConfig | None = None
) -> Choice:
    """Choose backend and config: an explicit config, else the first backend that takes the problem.

    Args:
        problem: What is to be computed.
        target: Where.
        config: Forces its backend.

    Returns:
        The decision with its source, and the reasons of every backend that refused.

    Raises:
        ConfigError: If an explicit config cannot run the problem.
        UnsupportedError: If no backend can.
    """
    if config is not None:
        reasons = config.reasons_against(problem, target)
        if reasons:
            raise ConfigError(
                f"attention: config={config} cannot run this problem: {'; '.join(reasons)}. "
                "Try: config=None, which chooses a backend that can."
            )
        return Choice("attention", config.backend, config, "explicit", {}, problem)
    candidates: tuple[AttentionConfig, ...] = (ReferenceConfig(),)
    if target.kind != "cpu":
        candidates = (gluon_rule(problem), triton_rule(problem, target), ReferenceConfig())
    refused: dict[str, tuple[str, ...]] = {}
    for candidate in candidates:
        reasons = candidate.reasons_against(problem, target)
        if not reasons:
            return Choice("attention", candidate.backend, candidate, "rule", refused, problem)
        refused[candidate.backend] = reasons
    raise UnsupportedError(f"attention: no backend takes this problem.\n{bullet_list(refused)}")
