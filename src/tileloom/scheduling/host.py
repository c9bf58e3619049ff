"""The schedulers in Python: what each program works on, step by step, without a GPU.

They have the interface of CUTLASS's tile schedulers, and the methods of `device.py`'s have the same
names; both rest on `decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tileloom.errors import OptionError, shown_value
from tileloom.scheduling import decode
from tileloom.scheduling.params import TileSchedulerParams, is_whole


@dataclass(frozen=True)
class WorkTileInfo:
    """One tile of the output.

    Attributes:
        linear: Its place in the order of work. m_idx: Row of tiles among those of its chunk. n_idx:
            Column of tiles. l_idx: Batch. chunk: The chunk that it is visited with, the last of
            those that have rows in it. row: Its first row in A. rows: Rows of it that exist, at
            most `block_m`. is_valid_tile: False past the end.
    """

    linear: int
    m_idx: int
    n_idx: int
    l_idx: int
    chunk: int
    row: int
    rows: int
    is_valid_tile: bool

    @staticmethod
    def invalid_work_tile(linear: int = -1) -> WorkTileInfo:
        """Return the tile that says: no more work."""
        return WorkTileInfo(linear, -1, -1, -1, -1, -1, 0, is_valid_tile=False)


def _check_count(advance_count: int) -> None:
    if not is_whole(advance_count):
        raise OptionError(
            f"scheduling: advance_count is {shown_value(advance_count)}; it must be a whole number "
            "of 0 or more."
        )


def _entry(table: Sequence[int], index: int) -> int:
    return table[index]


class StaticPersistentScheduler:
    """Program `cta` of `grid` works on tiles `cta`, `cta + grid`, `cta + 2 grid` and so on.

    Args:
        params: The schedule. grid: Programs, 1 or more. cta: This program, `0 .. grid - 1`.

    Source: CUTLASS `PersistentTileSchedulerSm90`, without its padding tiles.
    """

    name: ClassVar[str] = "static"

    def __init__(self, params: TileSchedulerParams, grid: int, cta: int) -> None:
        if not isinstance(params, TileSchedulerParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                f"scheduling: params is a {type(params).__name__}; it must be a "
                "TileSchedulerParams. Try: TileSchedulerParams.to_underlying_arguments(...)."
            )
        reasons = self.can_implement(params)
        if reasons:
            raise OptionError(f"scheduling: {type(self).__name__} cannot: {'; '.join(reasons)}.")
        if not is_whole(grid, 1):
            raise OptionError(
                f"scheduling: grid is {shown_value(grid)}; it must be a whole number of 1 or more. "
                "Try: get_grid_shape(params, sms)."
            )
        if not is_whole(cta) or cta >= grid:
            raise OptionError(
                f"scheduling: cta is {shown_value(cta)}; it must be in 0 .. grid - 1 = {grid - 1}."
            )
        self.params = params
        self.grid = grid
        self.current_work_linear_idx = cta

    @classmethod
    def can_implement(cls, params: TileSchedulerParams) -> tuple[str, ...]:
        """Return why this scheduler cannot take the problem; nothing when it can."""
        reasons: list[str] = []
        if params.chunks != 1 and not issubclass(cls, AsyncInputScheduler):
            reasons.append(f"A comes in {params.chunks} chunks, and it does not wait")
        if params.blocks_per_problem >= 2**31 - 2**16:
            reasons.append(f"there are {params.blocks_per_problem} tiles, and 32 bits count them")
        group = params.swizzle_size * max(params.get_tiled_cta_shape_mnl()[:2])
        if group >= 2**31:
            reasons.append(f"a group of the raster has {group} tiles, and 32 bits count them")
        return tuple(reasons)

    @staticmethod
    def get_grid_shape(params: TileSchedulerParams, sms: int, reserved_sms: int = 0) -> int:
        """Return how many programs to launch: one an SM, no more than tiles, at least one.

        Args:
            params: The schedule.
            sms: Streaming multiprocessors of the card.
            reserved_sms: How many of them to leave to the kernels that bring the input.
        """
        return max(1, min(sms - reserved_sms, params.blocks_per_problem))

    @staticmethod
    def get_workspace_size(params: TileSchedulerParams) -> int:
        """Return the bytes of device memory that the scheduler needs."""
        return 0 if params.chunks == 1 else 4 * len(params.to_device())

    def initial_work_tile_info(self) -> WorkTileInfo:
        """Return the first tile of this program."""
        return self.get_current_work()

    def get_current_work(self) -> WorkTileInfo:
        """Return the current tile; nothing moves and nothing waits."""
        return self.get_current_work_for_linear_idx(self.current_work_linear_idx)

    def get_current_work_for_linear_idx(self, linear: int) -> WorkTileInfo:
        """Return the tile of a linear index, or the invalid one past the end."""
        p = self.params
        if linear < 0:
            raise OptionError(f"scheduling: the linear index is {linear}; it must be 0 or more.")
        if linear >= p.blocks_per_problem:
            return WorkTileInfo.invalid_work_tile(linear)
        batch, rest = divmod(linear, p.first_tiles[-1])
        position = decode.position_of(rest, p.first_tiles, p.chunks, _entry)
        chunk = decode.chunk_at(position, p.chunk_pivot, p.chunks)
        rest -= p.first_tiles[position]
        tiles_m = p.tiles_m_of(chunk)
        if p.raster_order == "along_n":
            m_idx, n_idx = decode.tile_of(rest, tiles_m, p.tiles_n, p.swizzle_size)
        else:
            n_idx, m_idx = decode.tile_of(rest, p.tiles_n, tiles_m, p.swizzle_size)
        first, end = p.tile_edges[chunk]
        row = first + m_idx * p.block_m
        rows = min(p.block_m, end - row)
        return WorkTileInfo(linear, m_idx, n_idx, batch, chunk, row, rows, is_valid_tile=True)

    def get_linear_idx_from_m_and_n(
        self, m_idx: int, n_idx: int, l_idx: int = 0, chunk: int = 0
    ) -> int:
        """Return the linear index of a tile: the inverse of `get_current_work_for_linear_idx`."""
        p = self.params
        tiles_m = p.tiles_m_of(chunk) if chunk in range(p.chunks) else 0
        sizes = ((m_idx, tiles_m), (n_idx, p.tiles_n), (l_idx, p.l))
        if not all(index in range(size) for index, size in sizes):
            raise OptionError(
                f"scheduling: there is no tile m_idx {m_idx}, n_idx {n_idx}, l_idx {l_idx} of "
                f"chunk {shown_value(chunk)}; the tiles of a chunk are {tiles_m} x {p.tiles_n}, in "
                f"{p.l} batches, and chunks are in 0 .. {p.chunks - 1}."
            )
        first = p.first_tiles[p.order.index(chunk)] + l_idx * p.first_tiles[-1]
        if p.raster_order == "along_n":
            return first + decode.linear_of(m_idx, n_idx, tiles_m, p.tiles_n, p.swizzle_size)
        return first + decode.linear_of(n_idx, m_idx, p.tiles_n, tiles_m, p.swizzle_size)

    def advance_to_next_work(self, advance_count: int = 1) -> None:
        """Move on by `advance_count` tiles of this program, 0 or more."""
        _check_count(advance_count)
        self.current_work_linear_idx += self.grid * advance_count

    def fetch_next_work(self) -> WorkTileInfo:
        """Move on and return the tile that is then current."""
        self.advance_to_next_work()
        return self.get_current_work()

    def is_last_tile(self) -> bool:
        """Whether no tile follows the current one; it neither moves nor waits."""
        return self.current_work_linear_idx + self.grid >= self.params.blocks_per_problem

    def get_work_k_tile_start(self, work: WorkTileInfo) -> int:
        """Return the first step along k of this tile: 0, no scheduler here splits k."""
        del work
        return 0

    def get_work_k_tile_count(self, work: WorkTileInfo) -> int:
        """Return the steps along k of this tile."""
        return self.params.k_tiles if work.is_valid_tile else 0


class AsyncInputScheduler(StaticPersistentScheduler):
    """The static order over chunks of A that may still be arriving.

    All tiles of a chunk come before those of the next in the ring, and one with rows of several
    comes with the last of them. Only `wait_signal` waits, for the chunks of a tile but that one of
    which the tile before was.

    Args:
        params: The schedule, with its chunks. grid: Programs. cta: This program.
        wait: Called with a chunk's number; returns when its rows are there.

    Source: PyTorch's `PersistentAsyncInputScheduler`; uneven chunks and the missing padding tiles
        are new (its faults B1 to B3).
    """

    name: ClassVar[str] = "async-input"

    def __init__(
        self,
        params: TileSchedulerParams,
        grid: int,
        cta: int,
        wait: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        super().__init__(params, grid, cta)
        self._wait = wait
        self._last_seen = -1

    @classmethod
    def can_implement(cls, params: TileSchedulerParams) -> tuple[str, ...]:
        """Return why this scheduler cannot take the problem; nothing when it can."""
        reasons = list(super().can_implement(params))
        if params.l != 1 and params.chunks != 1:
            reasons.append(f"A has {params.l} batches, and chunks are rows of one matrix")
        return tuple(reasons)

    def wait_signal(self, work: WorkTileInfo) -> None:
        """Return when the rows of a valid tile are there."""
        if not work.is_valid_tile:
            return
        for chunk in self.params.chunks_of(work.row):
            if chunk != self._last_seen:
                self._wait(chunk)
        self._last_seen = work.chunk


class DynamicPersistentScheduler(AsyncInputScheduler):
    """The static order, dealt by a counter: whoever is free takes the next tile.

    Args:
        params: The schedule. grid: Programs. cta: This program; its first tile is number `cta`.
        tickets: Yields `grid`, `grid + 1` and so on, and is shared by all programs.
        wait: As in `AsyncInputScheduler`: tickets follow the ring, so chunks may be arriving.
    """

    name: ClassVar[str] = "dynamic"

    def __init__(
        self,
        params: TileSchedulerParams,
        grid: int,
        cta: int,
        tickets: Iterator[int],
        wait: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        super().__init__(params, grid, cta, wait)
        self._tickets = tickets

    @staticmethod
    def get_workspace_size(params: TileSchedulerParams) -> int:
        """Return the bytes of device memory that the scheduler needs: its counter, and chunks."""
        return 4 + AsyncInputScheduler.get_workspace_size(params)

    def advance_to_next_work(self, advance_count: int = 1) -> None:
        """Take `advance_count` tickets; the last one is the current tile."""
        _check_count(advance_count)
        for _ in range(advance_count):
            self.current_work_linear_idx = next(self._tickets)

    def is_last_tile(self) -> bool:
        """Whether no tile is left for anybody at all; a ticket decides, so none is taken here."""
        return self.current_work_linear_idx + 1 >= self.params.blocks_per_problem
