"""The integer functions of every scheduler, for Python and for kernels alike.

Each is plain Python over non-negative integers and calls nothing but `min` and its own arguments,
so that `triton.jit` and `gluon.jit` compile the very same source (`device.py`): the host's model
and the device's schedule cannot disagree.

Words. *Linear index*: the number of a tile in the order of work. *Minor*: the direction in which
the linear index runs fastest inside a group of `swizzle_size`; the other one is *major*.
*Position*: the number of a chunk of rows in the order of visits, a ring that begins at the pivot.

Source: CUTLASS 3.x, `static_tile_scheduler.hpp`; the ring and the uneven chunks are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reader = Callable[[Any, int], int]


def tile_of(linear: int, minor_tiles: int, major_tiles: int, swizzle_size: int) -> tuple[int, int]:
    """Return (minor, major) of a tile: groups of `swizzle_size` along minor, the last ragged."""
    group = swizzle_size * major_tiles
    first = linear // group * swizzle_size
    rest = linear % group
    height = min(minor_tiles - first, swizzle_size)
    return first + rest % height, rest // height


def linear_of(minor: int, major: int, minor_tiles: int, major_tiles: int, swizzle_size: int) -> int:
    """Return the linear index of a tile: the inverse of `tile_of`."""
    first = minor // swizzle_size * swizzle_size
    height = min(minor_tiles - first, swizzle_size)
    return first * major_tiles + major * height + minor - first


def chunk_at(position: int, pivot: int, chunks: int) -> int:
    """Return the chunk that is visited at `position`: the ring from `pivot`."""
    return (pivot + position) % chunks


def position_of(linear: int, table: "Any", chunks: int, read: "Reader") -> int:  # noqa: UP037
    """Return the last position whose first tile is at or before `linear`, by bisection.

    `table` holds `chunks + 1` entries, the first tile of each position and the number of all tiles;
    `read(table, i)` reads one. A position without a tile is never returned for a tile that exists.
    (Triton evaluates annotations: those of names that are no types of its own are texts.)
    """
    low = 0
    high = chunks
    while high - low > 1:
        middle = (low + high) // 2
        is_before = read(table, middle) <= linear
        low = middle * is_before + low * (1 - is_before)
        high = high * is_before + middle * (1 - is_before)
    return low


def is_signalled(flag: int, epoch: int) -> bool:
    """Whether a 32-bit flag has reached `epoch`, both counted modulo 2^32.

    True for a flag up to 2^31 - 1 ahead of the epoch: epochs grow by one for each use of the flags
    and may wrap around.
    """
    return ((flag - epoch) >> 31) & 1 == 0
