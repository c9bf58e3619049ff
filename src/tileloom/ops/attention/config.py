"""What each backend of attention supports, and which one runs: the only statement of both.

`reasons_against(problem, target)` of a config is used by dispatch, tests, documentation and error
texts alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tileloom.errors import ConfigError, shown_value
from tileloom.launch.layout import tma_faults
from tileloom.ops import _op
from tileloom.ops._op import Choice
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import SMEM_BYTES, Target

_HALF = (torch.float16, torch.bfloat16)
_MAX_INT32 = 2**31 - 1


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a tile's columns are rounded up to; at least one wgmma K step."""
    return max(16, 1 << max(head_dim - 1, 0).bit_length())


def head_tiles(head_dim: int, head_dim_v: int) -> tuple[int, int, int]:
    """Say how the Hopper forward cuts rows of q and k, and of v.

    Args:
        head_dim: Columns of q and k.
        head_dim_v: Columns of v.

    Returns:
        Columns of a tile of q and k, how many such tiles a row has, columns of v's one tile.
    """
    width, width_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if width == width_v:
        return width, 1, width_v
    width_v = max(32, width_v)  # O leaves from registers
    return (64, 3, width_v) if 128 < head_dim <= 192 else (width, 1, width_v)


def is_bare(problem: AttentionProblem) -> bool:
    """Whether nothing is between scores and softmax, but maybe a right bound."""
    if problem.has_mask or problem.has_bias or problem.has_key_lengths or problem.packed:
        return False
    return not (problem.dropout_p or problem.band.has_left)


def is_diagonal(problem: AttentionProblem) -> bool:
    """Whether nothing is there but that bound."""
    return problem.band.has_right and is_bare(problem)


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
        block_m: Query rows of a tile: a power of two, at least 16.
        block_n: Keys of a step: a power of two, at least 16.
        num_warps: Warps of a block: a power of two.
        num_stages: Depth of the software pipeline.
        chunk_d: Columns of q and k that one product takes, a power of two, at least 16; 0 for all
            of them. Below the head dim, q is read again in every step instead of kept.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    chunk_d: int = 0
    backend = "triton"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        fields = (self.block_m, self.block_n, self.num_warps, self.num_stages, self.chunk_d)
        return f"triton:{','.join(map(str, fields))}"

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = portable_reasons(problem, target, self.block_m + self.block_n)
        tiles = problem.heads_q * problem.blocks_q(self.block_m)
        if tiles > _MAX_INT32:
            why.append(f"B * Hq * ceil(Lq / block_m) is {tiles}, more than 2^31 - 1")
        why += tile_faults(self)
        if self.num_stages > 1 and problem.dtype in _HALF:
            why += _op.pipeline_reasons(target)
        return (*why, *_op.tf32_reasons("block_m", self.block_m, problem.dtype, target))


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
        pin: Hold the wait for P V behind the softmax; see `tileloom.device.order.pin`.
        ride_stages: Blocks of a bias or mask in shared memory, for one that the TMA unit can read;
            0: none, each thread loads what it needs.
        turns: Let the warpgroups take turns at the tensor cores.
        held: Columns of Q that are held in registers, and not read again from shared memory: 0, a
            quarter, half or all of them.
        lazy: Multiply O only when a maximum has grown by 8, and by branching around it.
    """

    consumers: int = 2
    block_n: int = 128
    stages: int = 2
    store: Literal["tma", "registers"] = "tma"
    registers: int = 240
    pin: bool = False
    ride_stages: int = 0
    turns: bool = True
    held: int = 0
    lazy: bool = False
    backend = "gluon_sm90"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return (
            f"gluon_sm90:{self.consumers},{self.block_n},{self.stages},{self.store},"
            f"{self.registers},{int(self.pin)},{self.ride_stages},{int(self.turns)},{self.held},"
            f"{int(self.lazy)}"
        )

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    def smem_bytes(self, head_dim: int, head_dim_v: int, *, is_ridden: bool = False) -> int:
        """Shared memory of a block, in bytes, barriers included; with a bias or mask if one is."""
        width, tiles, width_v = head_tiles(head_dim, head_dim_v)
        width *= tiles
        q_rows = self.block_m * (2 if self.store == "tma" else 1)
        ride = 2 * self.ride_stages * self.block_m * self.block_n if is_ridden else 0
        scratch = 4096 if self.store == "registers" else 0
        ring = self.stages * self.block_n * (width + width_v)
        return 2 * (width * q_rows + ring) + ride + scratch + 1024

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        width, tiles, width_v = head_tiles(problem.head_dim, problem.head_dim_v)
        why = self._faults(width_v)
        if self.held and (tiles > 1 or self.held not in (width // 4, width // 2, width)):
            why.append(
                f"held is {self.held}, not 0, a quarter, half or all of the {width * tiles} columns"
                " that q has in one tile"
            )
        elif self.held % 64 and self.held != width:
            why.append(f"held is {self.held}, not a multiple of 64 or all {width} columns")
        if self.store == "tma" and (tiles > 1 or width != width_v):
            why.append(
                f"store is 'tma', which takes v as wide as q, and their head dims are "
                f"{problem.head_dim_v} and {problem.head_dim}"
            )
        why += hopper_reasons(problem, target)
        if not problem.scale > 0:
            why.append(f"scale {problem.scale} is not positive")
        if problem.packed and width_v <= 16:
            why.append(f"head dim {problem.head_dim_v} of packed sequences is not above 16")
        if problem.len_q + problem.len_k > 2**30:
            why.append("Lq + Lk exceeds 2^30")
        if problem.heads_q * problem.blocks_q(self.block_m) > 2**30:
            why.append("there are more than 2^30 tiles")
        why += tma_reasons(problem)
        if problem.has_bias and problem.bias_dtype not in (*_HALF, torch.float32):
            why.append(f"bias has dtype {problem.bias_dtype}")
        has_scores = problem.has_bias or problem.has_mask
        if has_scores and self.stages < 2:
            why.append("stages is 1, and a bias or mask needs 2")
        smem = self.smem_bytes(problem.head_dim, problem.head_dim_v, is_ridden=has_scores)
        if target.kind != "cpu" and smem > target.smem:
            why.append(
                f"it needs {smem} bytes of shared memory, and {target.name} has {target.smem}"
            )
        return tuple(why)

    def _faults(self, width: int) -> list[str]:
        """What is wrong with the config itself, for tiles of `width` columns."""
        why: list[str] = []
        if self.consumers not in (2, 3):
            why.append(f"consumers is {self.consumers}, not 2 or 3")
        if self.block_n not in (32, 64, 128):
            why.append(f"block_n is {self.block_n}, not 32, 64 or 128")
        if self.stages < 1:
            why.append(f"stages is {self.stages}, not at least 1")
        if self.ride_stages < 0:
            why.append(f"ride_stages is {self.ride_stages}, not at least 0")
        if self.store not in ("tma", "registers"):
            why.append(f"store is {shown_value(self.store)}, not 'tma' or 'registers'")
        elif self.store == "registers" and width < 32:
            why.append(f"store is 'registers', which needs 32 columns, and the tile has {width}")
        most = 480 // max(self.consumers, 2) // 8 * 8  # of 512 a lane of the SM, 32 the producer's
        if self.registers % 8 or not 24 <= self.registers <= most:
            why.append(f"registers is {self.registers}, not a multiple of 8 in 24..{most}")
        return why


AttentionConfig = ReferenceConfig | TritonConfig | GluonSm90Config
BACKENDS = ("gluon_sm90", "triton", "reference")


def outpaced_by(choice: Choice, problem: AttentionProblem, target: Target) -> str | None:
    """Name the backend that would be more than 20 % faster, had it not refused; else None.

    The reference in a kernel's place is that much slower on every GPU. For float64 there is none.
    """
    if "gluon_sm90" in choice.refused and target.capability == (9, 0) and problem.dtype in _HALF:
        return "gluon_sm90"
    is_reference = choice.backend == "reference" and "triton" in choice.refused
    return "triton" if is_reference and problem.dtype != torch.float64 else None


def tile_faults(tile: Any, name: str = "") -> list[str]:
    """Say what is wrong with the sizes of a portable kernel.

    Args:
        tile: What has `block_m`, `block_n`, `num_warps`, `num_stages` and `chunk_d`.
        name: What the config calls the tile, with a dot; "" where it is the config itself.
    """
    why: list[str] = []
    ranges = (("block_m", 16, 256), ("block_n", 16, 256), ("num_warps", 1, 32))
    for part, least, most in ranges:
        value: int = getattr(tile, part)
        if value & (value - 1) or not least <= value <= most:
            why.append(f"{name}{part} is {value}, not a power of two in {least}..{most}")
    chunk: int = tile.chunk_d
    if chunk and (chunk & (chunk - 1) or not 16 <= chunk <= 512):
        why.append(f"{name}chunk_d is {chunk}, not 0 or a power of two in 16..512")
    if tile.num_stages < 1:
        why.append(f"{name}num_stages is {tile.num_stages}, not at least 1")
    return why


def hopper_reasons(problem: AttentionProblem, target: Target) -> list[str]:
    """Why no Hopper kernel, forward or backward, takes a problem."""
    why = _op.hopper_reasons(target)
    if problem.packed and sum(problem.packed.totals) + problem.batch > 2**30:
        why.append("Tq + Tk + S exceeds 2^30")
    if problem.dtype not in _HALF:
        why.append(f"dtype {problem.dtype} is not float16 or bfloat16")
    for head_dim in sorted({problem.head_dim, problem.head_dim_v}):
        if head_dim % 8 or not 8 <= head_dim <= 256:
            why.append(f"head dim {head_dim} is not a multiple of 8 in 8..256")
    return why


def portable_reasons(problem: AttentionProblem, target: Target, blocks: int) -> list[str]:
    """Why no portable kernel, with tiles of `blocks` rows and keys together, takes a problem."""
    why = _op.portable_reasons(target)
    if problem.dtype not in (*_HALF, torch.float32):
        why.append(f"dtype {problem.dtype} is not float16, bfloat16 or float32")
    if max(problem.head_dim, problem.head_dim_v) > 512:
        why.append(f"head dims {problem.head_dim} and {problem.head_dim_v} exceed 512")
    limit = _MAX_INT32 - blocks
    if problem.len_q + problem.len_k > limit:
        why.append(f"Lq + Lk is {problem.len_q + problem.len_k}, more than {limit}")
    if problem.packed and sum(problem.packed.totals) + problem.batch > limit:
        why.append(
            f"Tq + Tk + S is {sum(problem.packed.totals) + problem.batch}, more than {limit}"
        )
    return why


def tma_reasons(problem: AttentionProblem) -> list[str]:
    """What the TMA unit asks of q, k and v (CUDA driver API, cuTensorMapEncodeTiled)."""
    sizes_q = (problem.batch, problem.heads_q, problem.len_q, problem.head_dim)
    sizes_k = (problem.batch, problem.heads_kv, problem.len_k, problem.head_dim)
    sizes_v = (*sizes_k[:3], problem.head_dim_v)
    each = (("q", problem.q, sizes_q), ("k", problem.k, sizes_k), ("v", problem.v, sizes_v))
    return [fault for name, layout, sizes in each for fault in tma_faults(name, layout, sizes)]


def decode(text: str) -> AttentionConfig | None:
    """Read a config from the text that the operator's schema carries; "" means: choose.

    Raises:
        ConfigError: If no config writes such a text.
    """
    return _op.read_config("attention", "config", text, _read)


def _read(text: str) -> AttentionConfig | None:
    backend, _, rest = text.partition(":")
    fields = rest.split(",")
    if backend == "triton":
        return TritonConfig(*(int(f) for f in fields))
    if backend == "gluon_sm90":
        if fields[3] not in ("tma", "registers"):
            raise ConfigError(
                f"attention: config {text!r} has store {fields[3]!r}; it must be 'tma' or "
                "'registers'. Try: config=None."
            )
        store: Literal["tma", "registers"] = "tma" if fields[3] == "tma" else "registers"
        consumers, block_n, stages = (int(f) for f in fields[:3])
        rest = (
            fields[6:] + ["0", "1", "0", "0"][len(fields) - 6 :]
        )  # what an older text does not have
        ride_stages, turns, held, lazy = (int(f) for f in rest)
        return GluonSm90Config(
            consumers, block_n, stages, store, int(fields[4]), fields[5] == "1", ride_stages,
            turns == 1, held, lazy == 1,
        )  # fmt: skip
    if text not in ("", "reference"):
        raise ValueError
    return ReferenceConfig() if text else None


def gluon_rule(problem: AttentionProblem) -> GluonSm90Config:
    """Give the Hopper config for a problem, as measured on an H200 on 2026-11-28."""
    width, tiles, d = head_tiles(problem.head_dim, problem.head_dim_v)
    if tiles > 1 or width != d:
        return _uneven_rule(problem)
    if problem.has_mask or problem.has_bias:
        if d == 256:
            return GluonSm90Config(2, 64, 2, "registers", 240, True, 1)
        if d == 128:
            return GluonSm90Config(2, 128, 2, "tma", 240, False, 1, lazy=True)
        is_crowded = problem.has_mask or problem.dropout_p > 0 or problem.band.has_right
        if is_crowded or not _may_ride(problem):
            return GluonSm90Config(2, 128, 4, "tma", 240, False, 2)
        return GluonSm90Config(3, 128, 2, "tma", 160, False, 2, lazy=True)
    if d == 256:
        return GluonSm90Config(2, 64, 2, "registers", 240, pin=True, lazy=True)
    if problem.dropout_p:  # Philox needs the registers
        return GluonSm90Config(2, 128, 2 if d == 128 else 4, "tma", 240, lazy=d == 128)
    is_causal = problem.band.has_right
    if d == 128:
        held = 128 if problem.len_k >= 2048 else 0  # 1k causal: 505 against 500 TFLOP/s
        return GluonSm90Config(2, 128, 2, "tma", 240, not is_causal, held=held, lazy=True)
    rows = [-(-problem.len_q // tile) * tile for tile in (128, 192)]
    if rows[1] > 1.2 * rows[0] or (is_causal and problem.len_q < 8192):
        # Causal at 4k: 488 against 454 TFLOP/s; at 16k 525 against 558.
        return GluonSm90Config(2, 128, 2, "tma", 240, held=64 if d == 64 else 0)
    return GluonSm90Config(3, 128, 2, "tma", 160, lazy=not is_causal or is_diagonal(problem))


def _may_ride(problem: AttentionProblem) -> bool:
    """Whether sizes and type of a bias let the TMA unit read it; else threads load it themselves.

    They have too few registers for that where there are three consumers: of packed sequences 8.0 ms
    against 3.1 (H200, L 4096, head dim 64).
    """
    if problem.packed or problem.has_key_lengths or problem.len_k % 8:
        return False
    return problem.bias_dtype is not None and problem.bias_dtype.itemsize == 2


def _uneven_rule(problem: AttentionProblem) -> GluonSm90Config:
    """Give the Hopper config where q and v have tiles of other widths; O has that of v's.

    Pinned: a sweep on an H200 on 2026-11-28 (4k) had it 6 to 14 % ahead, but always timed the form
    that is not pinned first; a later run beside cuDNN gave 685 and 584 TFLOP/s pinned at 192 and
    128, full and causal, where 663 and 585 had been without. So the gain is not established.
    """
    _, _, width_v = head_tiles(problem.head_dim, problem.head_dim_v)
    has_scores = problem.has_mask or problem.has_bias
    is_plain = not (has_scores or problem.dropout_p)
    is_crowded = problem.has_mask or problem.dropout_p > 0 or problem.band.has_right
    is_crowded |= problem.has_bias and not _may_ride(problem)
    consumers, registers = (3, 160) if width_v <= 64 and not is_crowded else (2, 240)
    sizes = [(64, 4), (64, 3)]
    if width_v < 256:
        sizes = [(128, 4), (128, 3), (128, 2), *sizes]
    fixed = ("registers", registers, is_plain, int(has_scores))
    for block_n, stages in sizes:
        config = GluonSm90Config(consumers, block_n, stages, *fixed)
        needed = config.smem_bytes(problem.head_dim, problem.head_dim_v, is_ridden=has_scores)
        if needed <= SMEM_BYTES[9, 0]:
            return config
    return GluonSm90Config(consumers, 64, 2, *fixed)


def triton_rule(problem: AttentionProblem, target: Target) -> TritonConfig:
    """Give the portable config for a problem: the largest tiles that spill no register.

    Found by compiling for sm_80, sm_90 and sm_100 without a GPU; not tuned on one. From sm_90 on
    there is one stage: see `pipeline_reasons`, and with two stages ptxas serialises every wgmma
    (C7515, Triton 3.6.0 to 3.9.0).
    """
    widest = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    is_new = target.capability[0] in (9, 10)
    is_crowded = problem.has_mask or problem.has_bias or problem.dropout_p > 0
    if problem.dtype == torch.float32:
        if widest <= 64:
            if target.capability[0] == 10:
                return TritonConfig(32, 32 if widest <= 32 else 16, 4 if widest <= 32 else 8, 1, 16)
            is_light = widest <= 32 and not (problem.dropout_p and problem.has_bias)
            return TritonConfig(64, 32, 4 if is_light else 8, 1, 16)
        if widest == 128:
            return TritonConfig(32, 32, 8, 1, 16)
        return TritonConfig(32, 16, 8, 1, 16) if widest == 256 else TritonConfig(16, 16, 8, 1, 16)
    if widest > 256:
        if is_crowded or not is_new:
            return TritonConfig(64 if is_new else 32, 16, 8, 1, 64)
        return TritonConfig(64, 32, 8, 1, 64)
    if is_crowded:
        if not (problem.has_mask or problem.has_bias or widest > 128) and target.capability[0] == 9:
            return TritonConfig(64, 32, 4, 1)  # H200, p 0.1, L 4096, d 64: 6.1 ms, by 8 warps 7.5
        return TritonConfig(64, 32, 8, 1, 64 if widest == 256 else 0)
    if widest <= 64:
        if not is_new:
            return TritonConfig(128, 64, 4 if widest <= 32 else 8, 3)
        is_hopper = target.capability[0] == 9
        return TritonConfig(64 if is_hopper and widest == 64 else 128, 64, 4, 1)
    if widest == 128:
        if not is_new:
            return TritonConfig(128, 32, 8, 3)
        return TritonConfig(64, 64 if target.capability[0] == 9 else 32, 4, 1)
    return TritonConfig(64, 32, 8, 1 if is_new else 2)


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
    candidates: tuple[AttentionConfig, ...] = (ReferenceConfig(),)
    if target.kind != "cpu":
        candidates = (gluon_rule(problem), triton_rule(problem, target), ReferenceConfig())
    return _op.choose(problem.name, problem, target, config, candidates)
