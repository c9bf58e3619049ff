"""Bars: what the numbers must reach, from a file, and which of them a run meets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tileloom.bench.run import CellResult, Entry
from tileloom.errors import OptionError

Kind = Literal["tflops", "at_least", "faster_than"]
SCHEMA = 1


@dataclass(frozen=True)
class Bar:
    """One thing to reach.

    Attributes:
        cell: The case's name.
        contender: Who has to reach it.
        kind: ``"tflops"``: the median must be at least `value` TFLOP/s. ``"at_least"``: the median
            ratio to `other` must be at least `value`. ``"faster_than"``: the 95 % interval of the
            ratio to `other` must lie above 1.
        other: The peer, for the kinds that have one.
        value: The number, for the kinds that have one.
    """

    cell: str
    contender: str
    kind: Kind
    other: str | None = None
    value: float | None = None

    def __str__(self) -> str:
        """Say it in a few words."""
        if self.kind == "tflops":
            return f"{self.value:.0f}"
        return f"{self.value} x {self.other}" if self.kind == "at_least" else f"> {self.other}"


@dataclass(frozen=True)
class BarResult:
    """Whether a bar is met: True, False, or None if the run cannot tell; and what was found."""

    bar: Bar
    met: bool | None
    found: str


def _bars_of_cell(cell: str, who: str, under: float, content: Mapping[str, Any]) -> list[Bar]:
    bars: list[Bar] = []
    if "tflops" in content:
        bars.append(Bar(cell, who, "tflops", value=float(content["tflops"]) * (1 - under)))
    for other, value in content.get("at_least", {}).items():
        bars.append(Bar(cell, who, "at_least", str(other), float(value)))
    bars += [Bar(cell, who, "faster_than", str(o)) for o in content.get("faster_than", [])]
    unknown = sorted(set(content) - {"tflops", "at_least", "faster_than"})
    if unknown:
        raise ValueError(f"cell {cell} has unknown fields {unknown}")
    return bars


def load_bars(path: Path) -> tuple[Bar, ...]:
    """Read the bars of a JSON file.

    Args:
        path: A file with an object: ``"contender"``; ``"allowed_under"``, the share by which the
            TFLOP/s may lie under the given ones; ``"cells"``, by name, each with ``"tflops"``,
            ``"at_least"`` (ratios by peer) and ``"faster_than"`` (peers), all optional.

    Returns:
        The bars, in the file's order.

    Raises:
        OptionError: If the file cannot be read or is not well formed.
    """
    try:
        content = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, this version reads {SCHEMA}")
        who, under = str(content["contender"]), float(content["allowed_under"])
        return tuple(
            bar
            for cell, bars in content["cells"].items()
            for bar in _bars_of_cell(cell, who, under, bars)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"bench: the bars file {path} cannot be read ({type(error).__name__}: {error}). "
            "Try: benchmarks/attention_bars.json."
        ) from None


def _judge(bar: Bar, entry: Entry | None) -> BarResult:
    if entry is None:
        return BarResult(bar, None, f"{bar.contender} took no part")
    if entry.status != "ok" or entry.tflops is None:
        return BarResult(bar, False, entry.status)
    if bar.kind == "tflops":
        value = cast("float", bar.value)
        off = entry.tflops / value - 1
        return BarResult(bar, entry.tflops >= value, f"{entry.tflops:.0f} ({off:+.1%})")
    ratio = entry.ratios.get(cast("str", bar.other))
    if ratio is None:
        return BarResult(bar, None, f"{bar.other} has no number")
    if bar.kind == "at_least":
        return BarResult(bar, ratio.value >= cast("float", bar.value), f"{ratio.value:.2f}")
    found = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    return BarResult(bar, ratio.verdict == "faster", found)


def judge_bars(bars: Sequence[Bar], cells: Sequence[CellResult]) -> list[BarResult]:
    """Hold the bars against the cells of a run; bars of cells that were not run are left out."""
    by_name = {cell.case.name: cell for cell in cells}
    return [
        _judge(bar, by_name[bar.cell].entry(bar.contender)) for bar in bars if bar.cell in by_name
    ]
