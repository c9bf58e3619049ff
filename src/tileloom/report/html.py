"""The demo's page: one HTML file with everything in it, readable in light and dark."""

from __future__ import annotations

import math
from pathlib import Path

from tileloom.report.findings import WHEN, Contest, Findings
from tileloom.report.svg import Bar, bars, timeline


def render(findings: Findings) -> str:
    """Write the page.

    Args:
        findings: What the demo found.

    Returns:
        A whole HTML document; it refers to no other file. Every text is escaped.
    """
    import jinja2

    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sci"] = sci
    environment.filters["kib"] = kib
    played = findings.played
    return environment.get_template("demo.html.j2").render(
        f=findings,
        when=WHEN,
        picture=_safe(timeline(played.tracks, "The first steps of one program") if played else ""),
        contest_bars=[_safe(contest_bars(contest)) for contest in findings.contests],
    )


def _safe(svg: str) -> object:
    """Mark an SVG of ours as HTML; `svg` has escaped the texts in it."""
    import markupsafe

    return markupsafe.Markup(svg)


def kib(size: int) -> str:
    """Write a number of bytes in KiB."""
    return f"{size / 1024:.1f} KiB"


def sci(value: float) -> str:
    """Write a small number: ``"1.9e-07"``, and plainly ``"0"`` or ``"NaN"``."""
    return "NaN" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def contest_bars(contest: Contest) -> str:
    """Draw the times of a contest; shorter is faster."""
    rows = [
        Bar(
            row.name,
            row.median_us,
            f"{row.median_us:,.1f} µs" if row.median_us is not None else f"{row.status}",
            row.low_us,
            row.high_us,
            "bar own" if row.name.startswith("tileloom") else "bar",
        )
        for row in contest.rows
    ]
    return bars(rows, contest.title)


def write_page(findings: Findings, folder: Path) -> Path:
    """Write the page into a folder, which is made if it is not there.

    Args:
        findings: What the demo found.
        folder: Where to.

    Returns:
        The file, ``report.html`` in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(render(findings), encoding="utf-8")
    return path
