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

_EXAMPLE = "tileloom explain gemm 4096 4096 4096"


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "explain",
        help="say which backend takes a problem, and why not the others",
        example=_EXAMPLE,
    )
    operators = parser.add_subparsers(dest="operator", metavar="OPERATOR", required=True)
    gemm = operators.add_parser(
        "gemm",
        example=_EXAMPLE,
        help="the schedule of a matrix product",
        description=(
            "Config and schedule of tileloom.matmul for bfloat16 matrices on a Hopper card; with "
            "chunks, a pivot or arrivals, of tileloom.async_input_matmul."
        ),
    )
    for name, text in (("m", "rows of A"), ("n", "columns of B"), ("k", "the summed dimension")):
        gemm.add_argument(name, type=_size, help=text)
    gemm.add_argument("--tile", help="rows x columns, such as 128x256; default: the rule's")
    gemm.add_argument("--sms", type=_count, default=132, help="multiprocessors (default 132)")
    gemm.add_argument("--chunks", type=_count, help="even chunks that A arrives in")
    gemm.add_argument("--chunk-offsets", help="first row of each chunk and M: 0,100,300")
    gemm.add_argument("--pivot", type=int, default=0, help="the chunk that is visited first")
    gemm.add_argument(
        "--dynamic",
        action="store_true",
        help="a counter deals the tiles; else as the config says",
    )
    gemm.add_argument(
        "--arrivals", help="when each chunk is there, in microseconds: 0,40,inf (default: at once)"
    )
    gemm.add_argument(
        "--tile-us", type=float, help="microseconds of a tile (default: from 700 TFLOP/s)"
    )
    gemm.add_argument("--svg", type=Path, help="write a picture of tiles by block and time")


def run(args: argparse.Namespace) -> int:
    """Print the schedule; 1 if a block waits for a chunk that never comes."""
    from tileloom.ops.gemm.config import GluonSm90Config
    from tileloom.ops.gemm.schedule import schedule_of, unscheduled
    from tileloom.report.schedule import picture, summary
    from tileloom.scheduling import StaticPersistentScheduler, simulate

    asked = GluonSm90Config(*_tile(args.tile)) if args.tile else None
    offsets = _offsets(args)
    config, params = schedule_of(
        args.m, args.n, args.k, args.sms, config=asked, offsets=offsets, pivot=args.pivot
    )
    is_dynamic = args.dynamic or config.scheduler == "dynamic"
    grid = StaticPersistentScheduler.get_grid_shape(params, args.sms)
    arrivals = None
    if args.arrivals is not None:
        arrivals = [us * 1e-6 for us in _numbers("--arrivals", args.arrivals)]
    if args.tile_us is not None and not 0 < args.tile_us < math.inf:
        raise OptionError(
            f"--tile-us is {args.tile_us}; it must be finite and above 0, in microseconds."
        )
    if args.svg and args.svg.suffix != ".svg":
        raise OptionError(f"--svg is {args.svg}; the picture is an SVG. Try: plan.svg.")
    seconds = args.tile_us * 1e-6 if args.tile_us else _seconds_of(params, args.sms)
    played = simulate(params, grid, arrivals=arrivals, tile_seconds=seconds, is_dynamic=is_dynamic)
    other = None if asked or offsets else unscheduled(args.m, args.n, args.k)
    if other:
        print(f"config     {other.encode()}, by the rule: programs of its own, without a schedule")
        print(f"           what follows is the Hopper kernel by config= {config.encode()}")
    else:
        print(f"config     {config.encode()}, {'by --tile' if asked else 'by the rule'}")
    if config.swap_ab:
        print("           operands exchanged: what follows is the product of C transposed")
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


def _offsets(args: argparse.Namespace) -> tuple[int, ...] | None:
    """First row of each chunk and M, or None where nothing is said of chunks: A is there."""
    from tileloom.ops.gemm.async_input import even_offsets

    if args.chunk_offsets is not None and args.chunks is not None:
        raise OptionError("--chunks and --chunk-offsets both say where chunks begin; give one.")
    if args.chunk_offsets is not None:
        parts = args.chunk_offsets.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise OptionError(
                f"--chunk-offsets is {args.chunk_offsets!r}; it must be whole numbers with commas: "
                "the first row of each chunk, then M."
            )
        return tuple(map(int, parts))
    if args.chunks is None and args.arrivals is None and args.pivot == 0:
        return None
    return even_offsets(args.m, args.chunks or 1)


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
