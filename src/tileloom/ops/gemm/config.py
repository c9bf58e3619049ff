"""What each backend of the matrix product supports: the only statement of it. `rule.py` chooses.

`reasons_against(problem, target)` of a config is used by dispatch, tests, documentation and error
texts alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch

from tileloom.errors import ConfigError, check_fields, shown_value
from tileloom.launch.layout import Layout, tma_faults
from tileloom.ops import _op
from tileloom.ops.gemm.config_matvec import MatvecConfig
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.scheduling.params import TABLE_INTS
from tileloom.target import Target

_HALF = (torch.float16, torch.bfloat16)
_MAX_INT32 = 2**31 - 1
_MANY_ROWS = 512
_SMEM_BYTES = 232448
"""Shared memory of a block on Hopper (227 KiB)."""
_BARRIER_BYTES = 1024


@dataclass(frozen=True)
class ReferenceConfig:
    """The formula in plain torch; see `reference.py`. Runs everywhere."""

    backend = "reference"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "reference"

    def reasons_against(self, problem: MatmulProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        del target
        if problem.chunks:
            return ("it waits for no chunk",)
        return ()


@dataclass(frozen=True)
class TritonConfig:
    """The portable kernel: one program for each tile, any strides.

    Attributes:
        block_m: Rows of a tile. block_n: Its columns. block_k: Elements of k in a step; powers of
            two. num_warps: Warps. num_stages: Depth of Triton's pipeline. swizzle_size: Tiles of a
            group of the raster.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 1
    swizzle_size: int = 8
    backend = "triton"

    def __post_init__(self) -> None:
        """Refuse a field of a wrong type."""
        check_fields(self)

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "triton:" + ",".join(str(getattr(self, f.name)) for f in fields(self))

    def reasons_against(self, problem: MatmulProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = _op.portable_reasons(target)
        if problem.dtype not in (*_HALF, torch.float32):
            why.append(f"dtype {problem.dtype} is not float16, bfloat16 or float32")
        if problem.out_dtype not in (*_HALF, torch.float32):
            why.append(f"out_dtype {problem.out_dtype} is not float16, bfloat16 or float32")
        if problem.chunks:
            why.append("it waits for no chunk")
        if problem.k == 0:
            why.append("K is 0")
        why += _size_reasons(problem, self.block_m, self.block_n, self.swizzle_size)
        ranges = (("block_m", 16, 256), ("block_n", 16, 256), ("block_k", 16, 128))
        for name, least, most in (*ranges, ("num_warps", 1, 16)):
            value: int = getattr(self, name)
            if value & (value - 1) or not least <= value <= most:
                why.append(f"{name} is {value}, not a power of two in {least}..{most}")
        if self.num_stages < 1:
            why.append(f"num_stages is {self.num_stages}, not at least 1")
        elif self.num_stages > 1:
            why += _op.pipeline_reasons(target)
        if self.swizzle_size < 1:
            why.append(f"swizzle_size is {self.swizzle_size}, not at least 1")
        return (*why, *_op.tf32_reasons("block_m", self.block_m, problem.dtype, target))


@dataclass(frozen=True)
class GluonSm90Config:
    """The Hopper kernel: TMA, a ring of stages, two consumer warpgroups.

    Attributes:
        block_m: Rows of a tile: 64 (the warpgroups share the columns), 128, 192 or 256 (the
            rows).
        block_n: Columns of a tile; see `TILES`. Those that are no power of two are two
            accumulators: 320 of a warpgroup are 256 and 64.
        stages: Slots of the ring, each 64 of k; 0: as many as fit.
        swizzle_size: Tiles of a group of the raster.
        scheduler: `"static"`, or `"dynamic"`: a counter deals the tiles.
        splits: Blocks that share a tile, each a part of k (split-K), 1 to 16.
        block_k: Elements of k in a slot: 64, 128 or 256. More is fewer waits for small tiles.
        swap_ab: Whether C^T = B^T A^T is computed instead: B's columns are then the tile's rows,
            and the rows of A its columns; see `SWAP_TILES`.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 0
    swizzle_size: int = 8
    scheduler: Literal["static", "dynamic"] = "static"
    splits: int = 1
    block_k: int = 64
    swap_ab: bool = False
    backend = "gluon_sm90"

    def __post_init__(self) -> None:
        """Refuse a field of a wrong type."""
        check_fields(self)

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        return "gluon_sm90:" + ",".join(str(getattr(self, f.name)) for f in fields(self))

    def seen(self, problem: MatmulProblem) -> MatmulProblem:
        """The product that the kernel is given: with `swap_ab` that of C transposed."""
        return problem.exchanged() if self.swap_ab else problem

    def slice_columns(self, problem: MatmulProblem) -> int:
        """Columns of the slices by which a tile's output leaves: 128 bytes a row.

        64 bytes where a warpgroup has 128 rows: twice as large, they would cost the ring a stage.
        """
        if self.swap_ab:
            return min(self.warpgroup_tile()[1], 64)
        columns = (64 if self.warpgroup_tile()[0] == 128 else 128) // problem.out_dtype.itemsize
        return min(columns, self.tail) if self.tail else columns

    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns of one consumer warpgroup."""
        if self.block_m == 64:
            return 64, self.block_n // 2
        return self.block_m // self.consumers, self.block_n

    @property
    def tail(self) -> int:
        """Columns of a warpgroup beyond a power of two: an accumulator of their own."""
        columns = self.warpgroup_tile()[1]
        return columns - (1 << columns.bit_length() - 1)

    @property
    def consumers(self) -> int:
        """Warpgroups that share a tile."""
        return 3 if self.block_m == 192 else 2

    def buffers(self, problem: MatmulProblem) -> int:
        """Slices in shared memory of each warpgroup: two, or all of them with a residual."""
        slices = max(1, self.warpgroup_tile()[1] // self.slice_columns(problem))
        if problem.residual is not None:
            return slices
        return min(2, slices)

    def smem_bytes(self, problem: MatmulProblem, stages: int) -> int:
        """Shared memory of a block with so many stages."""
        rows, columns = self.warpgroup_tile()
        line = self.slice_columns(problem) * problem.out_dtype.itemsize
        slices = self.consumers * self.buffers(problem) * rows * line
        bias = 0
        if problem.bias_dtype is not None:
            length = rows if self.swap_ab else 1 << (columns - 1).bit_length()
            bias = self.consumers * length * problem.bias_dtype.itemsize
        return stages * self._stage_bytes() + slices + bias + _BARRIER_BYTES

    def _stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * 2

    def stages_of(self, problem: MatmulProblem) -> int:
        """The stages that the kernel gets: as many as fit where `stages` is 0, at most 8."""
        if self.stages:
            return self.stages
        free = _SMEM_BYTES - self.smem_bytes(problem, 0)
        return min(8, free // self._stage_bytes())

    def edge_rows(self, problem: MatmulProblem) -> int:
        """Rows of a that are loaded for the last of several tiles, or the only one; 0: all.

        Zeros for rows that are not there take the TMA unit longer than rows to read, up to twice
        as long for a tile. A kernel is compiled for each such number, so there are at most seven,
        and with many rows, where it is one tile of many, none.
        """
        rows = self.block_n if self.swap_ab else self.block_m
        if problem.m > _MANY_ROWS or problem.a_is_transposed or problem.chunks:
            return 0
        unit = 16 if rows <= 128 else 32
        return -(-(problem.m % rows) // unit) * unit % rows

    def edge_box(self, problem: MatmulProblem) -> int:
        """Rows of the boxes that a part of a warpgroup's rows is loaded by."""
        return math.gcd(self.edge_rows(problem), self.warpgroup_tile()[1 if self.swap_ab else 0])

    def stores_early(self, problem: MatmulProblem) -> bool:
        """Whether the next tile is begun before one is stored: see `pieces_early_sm90.py`.

        By what was measured: faster where several waves have few steps of k each. It needs the
        registers of 16-bit outputs that nothing else is done to.
        """
        is_plain = problem.bias_dtype is None and not problem.activation
        is_simple = is_plain and problem.residual is None and not self.tail
        is_short = problem.out_dtype.itemsize == 2 and problem.k <= 8192
        return self.scheduler == "dynamic" and is_simple and is_short

    def reasons_against(self, problem: MatmulProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = _op.hopper_reasons(target)
        if problem.dtype not in _HALF:
            why.append(f"dtype {problem.dtype} is not float16 or bfloat16")
        if problem.out_dtype not in (*_HALF, torch.float32):
            why.append(f"out_dtype {problem.out_dtype} is not float16, bfloat16 or float32")
        if problem.k == 0:
            why.append("K is 0")
        sizes = (self.block_m, self.block_n, self.swizzle_size, self.splits)
        why += _size_reasons(self.seen(problem), *sizes)
        if not why:
            why += _layout_reasons(problem)
        return (*why, *self._faults(problem))

    def _faults(self, problem: MatmulProblem) -> list[str]:
        """What is wrong with the config's own numbers."""
        why: list[str] = []
        tiles = SWAP_TILES if self.swap_ab else TILES
        if (self.block_m, self.block_n) not in tiles:
            shapes = ", ".join(f"{m}x{n}" for m, n in tiles)
            why.append(f"the tile is {self.block_m}x{self.block_n}, not one of {shapes}")
        if self.swap_ab and problem.chunks:
            why.append("swap_ab is True, and chunks are rows of a")
        if self.swap_ab and problem.a_is_transposed and self.warpgroup_tile()[1] < 16:
            why.append("a lies by columns, of which a warpgroup would load 8, fewer than 16")
        if 0 < self.tail < 16 and not problem.b_is_transposed:
            why.append("b lies by rows, and a box of the last 8 columns would have fewer than 16")
        if self.tail and (self.splits > 1 or problem.chunks):
            why.append(
                f"the tile is {self.block_m}x{self.block_n}, whose columns are no power of "
                "two, which goes with neither splits nor chunks"
            )
        if self.block_k not in (64, 128, 256):
            why.append(f"block_k is {self.block_k}, not 64, 128 or 256")
        if self.stages < 0 or self.stages == 1:
            why.append(f"stages is {self.stages}, not 0 or at least 2")
        if self.swizzle_size < 1:
            why.append(f"swizzle_size is {self.swizzle_size}, not at least 1")
        if self.scheduler not in ("static", "dynamic"):
            why.append(f"scheduler is {shown_value(self.scheduler)}, not 'static' or 'dynamic'")
        elif self.scheduler == "dynamic" and problem.chunks and not self.stores_early(problem):
            why.append(
                "scheduler is 'dynamic', and chunks are dealt by turns but for products alone, "
                "of 16 bits and K of 8192 at most"
            )
        why += self._split_faults(problem)
        if not why:
            needed = self.smem_bytes(problem, max(2, self.stages_of(problem)))
            if needed > _SMEM_BYTES:
                why.append(
                    f"{max(2, self.stages_of(problem))} stages take {needed} bytes of shared "
                    f"memory, and a block has {_SMEM_BYTES}"
                )
        return why

    def _split_faults(self, problem: MatmulProblem) -> list[str]:
        """What is wrong with sharing tiles."""
        if self.splits == 1:
            return []
        if not 1 <= self.splits <= 16:
            return [f"splits is {self.splits}, not in 1..16"]
        why: list[str] = []
        steps = -(-problem.k // self.block_k)
        if self.splits > steps:
            why.append(
                f"splits is {self.splits}, and k has {steps} steps of {self.block_k} to share"
            )
        if problem.l > 1:
            why.append(f"splits is {self.splits}, and there are {problem.l} batches")
        if problem.chunks or self.scheduler == "dynamic":
            why.append(f"splits is {self.splits}, which goes only with whole tiles dealt by turns")
        return why


MatmulConfig = ReferenceConfig | TritonConfig | MatvecConfig | GluonSm90Config
TILES = (
    (128, 256), (256, 128), (192, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64),
    (64, 32), (128, 320), (64, 80), (64, 48),
)  # fmt: skip
SWAP_TILES = (
    (128, 256), (192, 128), (128, 128), (128, 64), (128, 32), (128, 16), (64, 128), (64, 64),
    (64, 32), (64, 16),
)  # fmt: skip
"""Columns of B and rows of A in a tile with `swap_ab`."""
BACKENDS = ("gluon_sm90", "matvec", "triton", "reference")


def _size_reasons(
    problem: MatmulProblem, block_m: int, block_n: int, swizzle_size: int, splits: int = 1
) -> list[str]:
    """What the kernels' 32-bit numbers of rows, columns and tiles ask for."""
    limit = _MAX_INT32 - 512
    sizes = (("M", problem.m), ("N", problem.n), ("K", problem.k))
    why = [f"{name} is {size}, more than {limit}" for name, size in sizes if size > limit]
    tiles_m, tiles_n = -(-problem.m // max(1, block_m)), -(-problem.n // max(1, block_n))
    tiles = tiles_m * tiles_n * problem.l * max(1, splits)
    if tiles > limit:
        why.append(f"there are {tiles} tiles of {block_m} x {block_n}, more than {limit}")
    group = swizzle_size * max(tiles_m, tiles_n)  # as the kernels multiply it, with tiles or not
    if group > limit:
        why.append(f"swizzle_size is {swizzle_size}: a group has {group} tiles, more than {limit}")
    if problem.chunks > limit // (TABLE_INTS + 1):
        why.append(f"there are {problem.chunks} chunks, more than {limit // (TABLE_INTS + 1)}")
    return why


def _layout_reasons(problem: MatmulProblem) -> list[str]:
    """What the TMA unit asks of the tensors."""
    p = problem
    why: list[str] = []
    for name, layout, is_transposed, rows, columns in (
        ("a", p.a, p.a_is_transposed, p.m, p.k),
        ("b", p.b, p.b_is_transposed, p.k, p.n),
    ):
        sizes = (p.l, rows, columns)
        if is_transposed:  # seen from its contiguous dimension
            batch, row, column = layout.strides
            layout, sizes = Layout((batch, column, row), layout.is_aligned), (p.l, columns, rows)
        why += tma_faults(name, layout, sizes)
    size = p.out_dtype.itemsize
    why += tma_faults("out", p.out, (p.l, p.m, p.n), size)
    if p.residual is not None:
        why += tma_faults("residual", p.residual, (p.l, p.m, p.n), size)
        if p.residual_dtype != p.out_dtype:
            why.append(f"residual has dtype {p.residual_dtype}, the output {p.out_dtype}")
    return why


def decode(text: str) -> MatmulConfig | None:
    """Read a config from the text that the operator's schema carries; "" means: choose.

    What is missing at the end of a text has its default.

    Raises:
        ConfigError: If no config writes such a text.
    """
    return _op.read_config("matmul", "config", text, _read)


def _read(text: str) -> MatmulConfig | None:
    backend, _, rest = text.partition(":")
    parts = rest.split(",")
    if backend == "triton":
        return TritonConfig(*(int(part) for part in parts))
    if backend == "matvec":
        return MatvecConfig(*(int(part) for part in parts))
    if backend == "gluon_sm90":
        defaults = GluonSm90Config().encode().partition(":")[2].split(",")
        parts += defaults[len(parts) :]
        block_m, block_n, stages, swizzle_size, scheduler, splits, block_k, swap_ab = parts
        if scheduler not in ("static", "dynamic"):
            raise ConfigError(
                f"matmul: config {text!r} has scheduler {scheduler!r}; it must be 'static' or "
                "'dynamic'. Try: config=None."
            )
        chosen: Literal["static", "dynamic"] = "static" if scheduler == "static" else "dynamic"
        numbers = (int(block_m), int(block_n), int(stages), int(swizzle_size))
        return GluonSm90Config(*numbers, chosen, int(splits), int(block_k), swap_ab == "True")
    if text not in ("reference", ""):
        raise ValueError(text)
    return ReferenceConfig() if text else None
