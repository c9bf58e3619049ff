"""What a tile scheduler is asked for, as integers: the problem, the tile, the order, the chunks."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tileloom.errors import OptionError, ShapeError, known_keywords, shown_value

RasterOrder = Literal["along_m", "along_n"]
TABLE_INTS = 4
"""Integers of each position in `TileSchedulerParams.to_device`."""


@dataclass(frozen=True)
class TileSchedulerParams:
    """A GEMM's tiles and the order in which they are worked on; hashable, made once for a shape.

    Attributes:
        m: Rows of A and C. n: Columns of B and C. k: The summed dimension. l: Batches.
        block_m: Rows of a tile. block_n: Its columns. block_k: Elements of k in a step.
        raster_order: `"along_n"`: inside a group the row of tiles changes fastest, and groups
            follow each other along M (CUTLASS's AlongN); `"along_m"` with both exchanged.
        swizzle_size: Tiles of a group in the fast direction; the last group may have fewer.
        chunk_offsets: First row of each chunk of A, and M: `n + 1` integers that do not fall. Tiles
            lie as if A came whole: one may hold rows of several chunks.
        chunk_pivot: The chunk that is visited first; the others follow as a ring.
    """

    m: int
    n: int
    k: int
    l: int  # noqa: E741  (CUTLASS's name)
    block_m: int
    block_n: int
    block_k: int
    raster_order: RasterOrder
    swizzle_size: int
    chunk_offsets: tuple[int, ...]
    chunk_pivot: int

    @staticmethod
    @known_keywords
    def to_underlying_arguments(
        m: int,
        n: int,
        k: int,
        l: int = 1,  # noqa: E741
        *,
        block: tuple[int, int, int],
        raster_order: RasterOrder | Literal["heuristic"] = "heuristic",
        max_swizzle_size: int = 8,
        chunk_offsets: Sequence[int] | None = None,
        chunk_pivot: int = 0,
    ) -> TileSchedulerParams:
        """Check the arguments of a GEMM's schedule and settle what they leave open.

        Args:
            m: Rows of C, 0 or more.
            n: Columns of C.
            k: The summed dimension.
            l: Batches.
            block: Rows, columns and k-step of a tile, each 1 or more.
            raster_order: `"heuristic"` takes `"along_m"` where there are more columns of tiles
                than rows and A arrives whole, as CUTLASS does, and `"along_n"` else.
            max_swizzle_size: Tiles of a group, 1 or more; a group ends where the tiles end.
            chunk_offsets: First row of each chunk, and `m`; None: one chunk.
            chunk_pivot: The chunk that is visited first.

        Raises:
            ShapeError: If a size is negative or the offsets do not cover `0 .. m`.
            OptionError: If a block, the swizzle or the pivot is out of range.
        """
        _check_sizes(m, n, k, l, block, max_swizzle_size)
        offsets = (0, m) if chunk_offsets is None else _read(chunk_offsets)
        check_chunks(offsets, m, chunk_pivot)
        if raster_order not in ("along_m", "along_n", "heuristic"):
            raise OptionError(
                f"scheduling: raster_order is {shown_value(raster_order)}; it must be 'along_m', "
                "'along_n' or 'heuristic'."
            )
        block_m, block_n, block_k = block
        tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
        if raster_order == "heuristic":
            is_whole = len(offsets) == 2
            raster_order = "along_m" if is_whole and tiles_n > tiles_m else "along_n"
        return TileSchedulerParams(
            *(m, n, k, l, block_m, block_n, block_k),
            raster_order=raster_order,
            swizzle_size=max_swizzle_size,
            chunk_offsets=offsets,
            chunk_pivot=chunk_pivot,
        )

    @property
    def tiles_n(self) -> int:
        """Columns of tiles."""
        return -(-self.n // self.block_n)

    @property
    def k_tiles(self) -> int:
        """Steps along k of a whole tile."""
        return -(-self.k // self.block_k)

    @property
    def chunks(self) -> int:
        """Chunks of A's rows; 1 when it arrives whole."""
        return len(self.chunk_offsets) - 1

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The chunks in the order of their visits."""
        return tuple((self.chunk_pivot + s) % self.chunks for s in range(self.chunks))

    @cached_property
    def tile_edges(self) -> tuple[tuple[int, int], ...]:
        """For each chunk the first row of its tiles and the row after the last of them.

        A tile with rows of several chunks is one of the chunk that is visited last of them.
        """
        size, pivot = self.block_m, self.chunk_pivot
        starts = [row if row == self.m else row // size * size for row in self.chunk_offsets]
        # What lies across the pivot's first row belongs to the chunk before it, the ring's last.
        first = min(self.m, -(-self.chunk_offsets[pivot] // size) * size)
        starts[pivot:] = [max(start, first) for start in starts[pivot:]]
        return tuple(itertools.pairwise(starts))

    def tiles_m_of(self, chunk: int) -> int:
        """Rows of tiles of one chunk."""
        first, end = self.tile_edges[chunk]
        return -(-(end - first) // self.block_m)

    def chunks_of(self, row: int) -> tuple[int, ...]:
        """The chunks that have rows in the tile that begins at `row`."""
        offsets, end = self.chunk_offsets, min(row + self.block_m, self.m)
        near = range(bisect_right(offsets, row) - 1, bisect_left(offsets, end))
        return tuple(chunk for chunk in near if offsets[chunk] < offsets[chunk + 1])

    @cached_property
    def first_tiles(self) -> tuple[int, ...]:
        """The linear index of the first tile of each position, and the number of all tiles."""
        sizes = (self.tiles_m_of(chunk) * self.tiles_n for chunk in self.order)
        return (0, *itertools.accumulate(sizes))

    @cached_property
    def rows_per_chunk(self) -> int:
        """Rows of every chunk if all have the same whole tiles, else 0: kernels read a table."""
        rows = {last - first for first, last in itertools.pairwise(self.chunk_offsets)}
        is_simple = len(rows) == 1 and (
            self.chunks == 1 or self.m // self.chunks % self.block_m == 0
        )
        return rows.pop() if is_simple else 0

    @property
    def blocks_per_problem(self) -> int:
        """All tiles of all batches; no padding tile exists."""
        return self.first_tiles[-1] * self.l

    def get_tiled_cta_shape_mnl(self) -> tuple[int, int, int]:
        """Return rows and columns of tiles, and batches."""
        return sum(self.tiles_m_of(chunk) for chunk in range(self.chunks)), self.tiles_n, self.l

    def to_device(self) -> tuple[int, ...]:
        """Return the integers of the kernels' chunk table: `TABLE_INTS` for each position.

        A kernel reads them as `torch.tensor(params.to_device(), dtype=torch.int32, device=...)`.

        First tile, the tiles' first row, the row after their last one, and the chunk's number; a
        closing entry has the number of tiles first. Behind them lie the chunks' offsets.
        """
        table: list[int] = []
        for first_tile, chunk in zip(self.first_tiles, self.order):
            table += (first_tile, *self.tile_edges[chunk], chunk)
        return (*table, self.first_tiles[-1], self.m, self.m, -1, *self.chunk_offsets)


def _check_sizes(
    m: int,
    n: int,
    k: int,
    l: int,  # noqa: E741
    block: tuple[int, int, int],
    max_swizzle_size: int,
) -> None:
    for name, size in (("m", m), ("n", n), ("k", k), ("l", l)):
        if not is_whole(size):
            raise ShapeError(
                f"scheduling: {name} is {shown_value(size)}; a size is a whole number of 0 or more."
            )
    is_block = isinstance(block, (tuple, list)) and len(block) == 3  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_block or not all(is_whole(size, 1) for size in block):
        raise OptionError(
            f"scheduling: block is {shown_value(block)}; it must be (rows, columns, k-step), each "
            "a whole number of 1 or more. Try: block=(128, 256, 64)."
        )
    if not is_whole(max_swizzle_size, 1):
        raise OptionError(
            f"scheduling: max_swizzle_size is {shown_value(max_swizzle_size)}; it must be a whole "
            "number of 1 or more. Try: max_swizzle_size=8."
        )


def is_whole(value: object, least: int = 0) -> bool:
    """Whether a value is an int, and at least so large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _read(offsets: Any) -> tuple[int, ...]:
    try:
        return tuple(offsets)
    except TypeError:
        raise ShapeError(
            f"scheduling: chunk_offsets is {shown_value(offsets)}; it must be a sequence: the "
            "first row of each chunk, then M."
        ) from None


def check_chunks(offsets: Sequence[int], m: int, pivot: int) -> None:
    """Refuse chunk offsets that do not cover `0 .. m` without falling, or a pivot out of range.

    Raises:
        ShapeError: For the offsets. OptionError: For the pivot.
    """
    if not all(map(is_whole, offsets)):
        raise ShapeError(
            f"scheduling: chunk_offsets is {shown_value(offsets)}; it must be whole numbers of 0 "
            "or more."
        )
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != m:
        raise ShapeError(
            f"scheduling: chunk_offsets is {tuple(offsets)}; it must begin with 0 and end with "
            f"M = {m}."
        )
    for index, (first, last) in enumerate(itertools.pairwise(offsets)):
        if last < first:
            raise ShapeError(
                f"scheduling: chunk_offsets falls from {first} to {last} at entry {index + 1}; "
                "each chunk must begin where the one before it ends."
            )
    if not is_whole(pivot) or pivot >= len(offsets) - 1:
        raise OptionError(
            f"scheduling: chunk_pivot is {shown_value(pivot)}; it must be in 0 .. "
            f"{len(offsets) - 2}, the number of a chunk."
        )
