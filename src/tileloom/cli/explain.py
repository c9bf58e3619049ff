"""`tileloom explain`: say what an operator would do with a problem, with no GPU.

tileloom explain gemm 4096 4096 4096
tileloom explain gemm 2048 4096 8192 --chunks 4 --pivot 1 --arrivals 0,40,80,120 --svg plan.svg
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tileloom.errors import OptionError


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "explain", help="say which backend takes a problem, and why not the others"
    )
    operators = parser.add_subparsers(dest="operator", metavar="OPERATOR", required=True)
    gemm = operators.add_parser("gemm", help="the schedule of a matrix product")
    for name, text in (("m", "rows of A"), ("n", "columns of B"), ("k", "the summed dimension")):
        gemm.add_argument(name, type=_size, help=text)
    gemm.add_argument("--tile", help="rows x columns, such as 128x256; default: the rule's")
    gemm.add_argument("--sms", type=_count, default=132, help="multiprocessors (default 132)")
    gemm.add_argument("--chunks", type=_count, default=1, help="even chunks that A arrives in")
    gemm.add_argument("--chunk-offsets", help="first row of each chunk and M: 0,100,300")
    gemm.add_argument("--pivot", type=int, default=0, help="the chunk that is visited first")
    gemm.add_argument("--dynamic", action="store_true", help="a counter deals the tiles")
    gemm.add_argument(
        "--arrivals", help="when each chunk is there, in microseconds: 0,40,inf (default: at once)"
    )
    gemm.add_argument(
        "--tile-us", type=float, help="microseconds of a tile (default: from 700 TFLOP/s)"
    )
    gemm.add_argument("--svg", type=Path, help="write a picture of tiles by block and time")


def run(args: argparse.Namespace) -> int:
    """Print the schedule; 1 if a block waits for a chunk that never comes."""
    from tileloom.ops.gemm.async_input import even_offsets, schedule_of
    from tileloom.report.schedule import picture, summary
    from tileloom.scheduling import StaticPersistentScheduler, simulate

    offsets = even_offsets(args.m, args.chunks)
    if args.chunk_offsets:
        offsets = tuple(int(number) for number in _numbers("--chunk-offsets", args.chunk_offsets))
    tile = _tile(args.tile) if args.tile else None
    params = schedule_of(args.m, args.n, args.k, offsets, args.pivot, args.sms, tile)
    grid = StaticPersistentScheduler.get_grid_shape(params, args.sms)
    arrivals = None
    if args.arrivals:
        arrivals = [us * 1e-6 for us in _numbers("--arrivals", args.arrivals)]
    if args.tile_us is not None and not args.tile_us > 0:
        raise OptionError(f"--tile-us is {args.tile_us}; it must be above 0, in microseconds.")
    seconds = args.tile_us * 1e-6 if args.tile_us else _seconds_of(params, args.sms)
    played = simulate(
        params, grid, arrivals=arrivals, tile_seconds=seconds, is_dynamic=args.dynamic
    )
    print(summary(params, played, seconds, arrivals))
    if args.svg:
        try:
            args.svg.write_text(picture(params, played, arrivals))
        except OSError as error:
            raise OptionError(
                f"--svg {args.svg} cannot be written: {error.strerror}. Try: a file in a "
                "folder that is there."
            ) from None
        print(f"\npicture: {args.svg}")
    return 1 if played.stuck else 0


def _seconds_of(params: Any, sms: int) -> float:
    """A tile's time where the whole card reaches 700 TFLOP/s, about what an H100 does."""
    return 2 * params.block_m * params.block_n * max(params.k, 1) / (700e12 / sms)


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _tile(text: str) -> tuple[int, int]:
    from tileloom.ops.gemm.config import TILES

    rows, _, columns = text.partition("x")
    tile = (int(rows), int(columns)) if rows.isdecimal() and columns.isdecimal() else None
    if tile not in TILES:
        shapes = ", ".join(f"{m}x{n}" for m, n in TILES)
        raise OptionError(f"--tile is {text!r}; it must be one of {shapes}.")
    return tile


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if any(number < 0 or math.isnan(number) for number in found):
        raise OptionError(f"{option} is {text!r}; it must be numbers of 0 or more, with commas.")
    return found
