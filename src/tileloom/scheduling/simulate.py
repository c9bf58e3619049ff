"""A schedule against the clock: when each tile starts, waits and ends, and who waits for ever.

A discrete-event simulation with one program an SM: a program takes a tile, waits until the tile's
chunks are there, works for `tile_seconds`, and takes the next.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tileloom.errors import OptionError, known_keywords, shown_value
from tileloom.scheduling.host import (
    AsyncInputScheduler,
    DynamicPersistentScheduler,
    WorkTileInfo,
)
from tileloom.scheduling.params import TileSchedulerParams, is_whole


@dataclass(frozen=True)
class Span:
    """One tile on one program: taken at `taken`, worked on from `start` to `end` (seconds)."""

    cta: int
    work: WorkTileInfo
    taken: float
    start: float
    end: float

    @property
    def waited(self) -> float:
        """Seconds between taking the tile and starting on it."""
        return self.start - self.taken


@dataclass(frozen=True)
class Simulation:
    """What happened.

    Attributes:
        spans: Every tile that was finished, in the order of their ends.
        stuck: (cta, chunk) of each program that waits for a chunk that never comes.
    """

    grid: int
    spans: tuple[Span, ...]
    stuck: tuple[tuple[int, int], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the launch to the last tile's end; infinite if a program is stuck."""
        if self.stuck:
            return math.inf
        return max((span.end for span in self.spans), default=0.0)

    @property
    def waited(self) -> float:
        """Seconds of waiting, of all programs together."""
        return sum(span.waited for span in self.spans)


@known_keywords
def simulate(
    params: TileSchedulerParams,
    grid: int,
    *,
    arrivals: Sequence[float] | None = None,
    tile_seconds: float | Callable[[WorkTileInfo], float] = 1.0,
    is_dynamic: bool = False,
) -> Simulation:
    """Play a schedule.

    Args:
        params: The schedule.
        grid: Programs, 1 or more.
        arrivals: For each chunk, when its rows are there (seconds after the launch; `math.inf`:
            never). None: all at once.
        tile_seconds: How long a tile takes, or a function of the tile.
        is_dynamic: Whether a counter deals the tiles instead of turns.

    Raises:
        OptionError: If `arrivals` has not one entry for each chunk, the grid is empty, or a time is
            no number of 0 or more; a tile that takes for ever is none, only a chunk may be.
    """
    times = _times(params, arrivals)
    if not is_whole(grid, 1):
        raise OptionError(
            f"simulate: grid is {shown_value(grid)}; it must be a whole number of 1 or more."
        )
    if not callable(tile_seconds):
        _check_seconds("tile_seconds", tile_seconds)
    tickets = itertools.count(grid)
    programs = [
        DynamicPersistentScheduler(params, grid, cta, tickets)
        if is_dynamic
        else AsyncInputScheduler(params, grid, cta)
        for cta in range(grid)
    ]
    free = [(0.0, cta) for cta in range(grid)]
    has_begun = [False] * grid
    spans: list[Span] = []
    stuck: list[tuple[int, int]] = []
    while free:
        now, cta = heapq.heappop(free)
        program = programs[cta]
        work = program.fetch_next_work() if has_begun[cta] else program.initial_work_tile_info()
        has_begun[cta] = True
        if not work.is_valid_tile:
            continue
        last = max(params.chunks_of(work.row), key=times.__getitem__)
        start = max(now, times[last])
        if math.isinf(start):
            stuck.append((cta, last))
            continue
        seconds = tile_seconds
        if callable(seconds):
            seconds = _check_seconds("tile_seconds of a tile", seconds(work))
        end = start + seconds
        spans.append(Span(cta, work, now, start, end))
        heapq.heappush(free, (end, cta))
    spans.sort(key=lambda span: (span.end, span.cta))
    return Simulation(grid, tuple(spans), tuple(stuck))


def _times(params: TileSchedulerParams, arrivals: Any) -> list[float]:
    """When each chunk is there, checked."""
    if not isinstance(params, TileSchedulerParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"simulate: params is a {type(params).__name__}; it must be a TileSchedulerParams. "
            "Try: TileSchedulerParams.to_underlying_arguments(...)."
        )
    if arrivals is None:
        return [0.0] * params.chunks
    if not isinstance(arrivals, Sequence) or len(arrivals) != params.chunks:  # pyright: ignore[reportUnknownArgumentType]
        found: Any = arrivals
        has = (
            f"has {len(found)} entries"
            if isinstance(found, Sequence)
            else f"is {shown_value(found)}"
        )
        raise OptionError(
            f"simulate: arrivals {has}; it must have one for each of the {params.chunks} chunks."
        )
    given: list[Any] = [*arrivals]
    return [_check_seconds("an entry of arrivals", time, most=math.inf) for time in given]


def _check_seconds(name: str, seconds: Any, most: float = sys.float_info.max) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= most:
        raise OptionError(
            f"simulate: {name} is {shown_value(seconds)}; it must be a number of seconds, 0 or more"
            f"{'' if most == math.inf else ' and finite'}."
        )
    return seconds
