"""Bars and timelines as inline SVG. Their colours come from the CSS of the page around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from tileloom.report.findings import Span, Track

WIDTH = 720
ROW = 26
LABEL = 168
VALUE = 116


@dataclass(frozen=True)
class Bar:
    """A bar: its label, its length, the text beside it, a thin range around its end, its class."""

    label: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    kind: str = "bar"


def bars(rows: Sequence[Bar], title: str) -> str:
    """Draw horizontal bars from 0.

    Args:
        rows: The bars; one without a value shows its text in place of the bar.
        title: What a screen reader says.

    Returns:
        An `svg` element. It uses the CSS classes of its rows' kinds, `range`, `label` and `value`.
    """
    ends = [end for row in rows for end in (row.value, row.high) if end is not None]
    most = max(ends, default=0.0) or 1.0
    room = WIDTH - LABEL - VALUE
    parts: list[str] = []
    for i, row in enumerate(rows):
        y = i * ROW
        middle = y + ROW / 2
        parts.append(_text(LABEL - 10, middle, row.label, "label", "end"))
        if row.value is None:
            parts.append(_text(LABEL, middle, row.text, "note", "start"))
            continue
        length = max(room * row.value / most, 1.0)
        parts.append(
            f'<rect class={quoteattr(row.kind)} x="{LABEL}" y="{y + 5}" rx="2" '
            f'width="{length:.1f}" height="{ROW - 10}"/>'
        )
        end = length
        if row.low is not None and row.high is not None:
            left, right = (room * edge / most for edge in (row.low, row.high))
            end = max(length, right)
            parts.append(
                f'<path class="range" d="M{LABEL + left:.1f} {middle}H{LABEL + right:.1f}"/>'
            )
        parts.append(_text(LABEL + end + 8, middle, row.text, "value", "start"))
    return _svg(WIDTH, len(rows) * ROW, title, parts)


def timeline(tracks: Sequence[Track], title: str) -> str:
    """Draw what runs, waits and is in flight, one line of bars a track; time runs to the right.

    Args:
        tracks: The tracks; spans that overlap stand above each other.
        title: What a screen reader says.

    Returns:
        An `svg` element. It uses the CSS classes of the spans' kinds, `rule` and `label`; a span's
        text appears under the mouse.
    """
    ends = [span.end for track in tracks for span in track.spans]
    most = max(ends, default=1)
    room = WIDTH - LABEL
    parts: list[str] = []
    y = 0.0
    for track in tracks:
        lanes = _lanes(track.spans)
        height = ROW - 10 if len(lanes) < 2 else max(6.0, (ROW - 10) / len(lanes))
        bottom = y + max(ROW, len(lanes) * height + 10)
        parts.append(f'<path class="rule" d="M0 {bottom:.1f}H{WIDTH}"/>')
        parts.append(_text(LABEL - 10, (y + bottom) / 2, track.name, "label", "end"))
        for i, lane in enumerate(lanes):
            for span in lane:
                x = LABEL + room * span.start / most
                width = max(room * (span.end - span.start) / most - 0.5, 1.0)
                parts.append(
                    f'<rect class={quoteattr(span.kind)} x="{x:.1f}" y="{y + 5 + i * height:.1f}" '
                    f'width="{width:.1f}" height="{height - 1:.1f}">'
                    f"<title>{escape(span.text)}</title></rect>"
                )
        y = bottom
    return _svg(WIDTH, y, title, parts)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Share spans out to as few lines as hold them without overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{escape(text)}</text>'
    )


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label={quoteattr(title)}>'
        f"{''.join(parts)}</svg>"
    )
