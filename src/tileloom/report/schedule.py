"""A tile schedule as text, and as a picture: blocks downwards, time to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tileloom.scheduling import Simulation, Span, TileSchedulerParams

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_WIDTH, _LEFT, _TOP = 1000, 60, 40
_MOST_ROWS = 400


def summary(
    params: TileSchedulerParams,
    played: Simulation,
    tile_seconds: float,
    arrivals: Sequence[float] | None,
) -> str:
    """Describe a schedule and how it went.

    Args:
        params: The schedule.
        played: What `simulate` made of it.
        tile_seconds: Seconds of one tile.
        arrivals: When each chunk was there, or None for at once.
    """
    tiles_m, tiles_n, batches = params.get_tiled_cta_shape_mnl()
    total = params.blocks_per_problem
    waves = total / played.grid
    lines = [
        f"problem    {params.m} x {params.n} x {params.k}" + f", {batches} batches" * (batches > 1),
        f"tile       {params.block_m} x {params.block_n} x {params.block_k}, {params.k_tiles} "
        "steps along k",
        f"tiles      {tiles_m} x {tiles_n} = {total}, raster {params.raster_order}, groups of "
        f"{params.swizzle_size}",
        f"grid       {played.grid} blocks, {waves:.2f} waves, the last one "
        f"{100 * _last_wave(total, played.grid):.0f} % full",
    ]
    if params.chunks > 1:
        lines.append(f"chunks     {params.chunks}, visited {_list(params.order)}")
        for position, chunk in enumerate(params.order):
            first, last = params.chunk_offsets[chunk], params.chunk_offsets[chunk + 1]
            there = 0.0 if arrivals is None else arrivals[chunk]
            tiles = params.first_tiles[position + 1] - params.first_tiles[position]
            lines.append(
                f"  chunk {chunk:<3d} rows {first}..{last - 1 if last > first else first} "
                f"({last - first}), {tiles} tiles, there after {_us(there)}"
            )
    lines.append(f"time       {_us(tile_seconds)} a tile, {_us(played.makespan)} in all")
    busy = len(played.spans) * tile_seconds
    if played.stuck:
        chunks = sorted({chunk for _, chunk in played.stuck})
        lines.append(
            f"STUCK      {len(played.stuck)} blocks wait for ever, for chunk {_list(chunks)}"
        )
    elif played.makespan:
        share = busy / (played.makespan * played.grid)
        lines.append(
            f"           {100 * share:.0f} % of the blocks' time is work, "
            f"{_us(played.waited)} of all blocks together is waiting for chunks"
        )
    return "\n".join(lines)


def _last_wave(total: int, grid: int) -> float:
    rest = total % grid
    return 1.0 if total and rest == 0 else rest / grid


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown + (", ..." if len(numbers) > 12 else "")


def _us(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds * 1e6:.1f} us"


def picture(
    params: TileSchedulerParams, played: Simulation, arrivals: Sequence[float] | None = None
) -> str:
    """Draw a schedule as SVG: one line for each block, one box for each tile, its chunk's colour.

    Waiting is a grey box before the tile; a dashed line marks a chunk's arrival.

    Args:
        params: The schedule.
        played: What `simulate` made of it.
        arrivals: When each chunk was there (seconds), or None.
    """
    rows = min(played.grid, _MOST_ROWS)
    height = max(3, min(14, 900 // max(rows, 1)))
    finite = [t for t in arrivals or () if not math.isinf(t)]
    end = max([span.end for span in played.spans] + finite, default=0.0) or 1.0
    scale = _WIDTH / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" '
        f'height="{_TOP + rows * height + 30}" font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="16">{escape(_title(params, played))}</text>',
    ]
    for span in played.spans:
        if span.cta < rows:
            parts += _boxes(span, params, scale, height)
    for cta, chunk in played.stuck:
        if cta < rows:
            parts.append(_text_at(cta, height, f"waits for chunk {chunk} for ever", scale * end))
    for chunk, time in enumerate(arrivals or ()):
        if not math.isinf(time):
            x = _LEFT + time * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{_TOP + rows * height}" '
                f'stroke="{_colour(chunk)}" stroke-dasharray="3 2"/>'
                f'<text x="{x + 2:.1f}" y="{_TOP - 10}">chunk {chunk}</text>'
            )
    parts.append(
        f'<text x="{_LEFT}" y="{_TOP + rows * height + 18}">0</text>'
        f'<text x="{_LEFT + _WIDTH - 60}" y="{_TOP + rows * height + 18}">{_us(end)}</text>'
        f'<text x="4" y="{_TOP + 10}">block 0</text></svg>'
    )
    return "\n".join(parts)


def _title(params: TileSchedulerParams, played: Simulation) -> str:
    return (
        f"{params.m} x {params.n} x {params.k}, tiles {params.block_m} x {params.block_n}, "
        f"{played.grid} blocks, {_us(played.makespan)}"
    )


def _colour(chunk: int) -> str:
    return _COLOURS[chunk % len(_COLOURS)]


def _boxes(span: Span, params: TileSchedulerParams, scale: float, height: int) -> list[str]:
    y = _TOP + span.cta * height
    boxes: list[str] = []
    if span.waited > 0:
        boxes.append(_box(span.taken, span.waited, y, scale, height, "#d9d9d9", "waits"))
    work = span.work
    label = f"tile {work.linear}: row {work.m_idx}, column {work.n_idx}, chunk {work.chunk}"
    colour = _colour(work.chunk if params.chunks > 1 else work.m_idx)
    boxes.append(_box(span.start, span.end - span.start, y, scale, height, colour, label))
    return boxes


def _box(
    start: float, length: float, y: int, scale: float, height: int, colour: str, label: str
) -> str:
    return (
        f'<rect x="{_LEFT + start * scale:.2f}" y="{y}" width="{max(length * scale, 0.3):.2f}" '
        f'height="{height - 1}" fill="{colour}" stroke="white" stroke-width="0.3">'
        f"<title>{escape(label)}</title></rect>"
    )


def _text_at(cta: int, height: int, text: str, x: float) -> str:
    left = _LEFT + min(x, _WIDTH - 160)
    return f'<text x="{left:.1f}" y="{_TOP + cta * height + 9}">{text}</text>'
