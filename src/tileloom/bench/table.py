"""The result of a run for people: tables of `rich`, and the sentences below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tileloom.bench.bars import BarResult
from tileloom.bench.ceilings import Ceilings
from tileloom.bench.run import CellResult, Entry
from tileloom.bench.stats import Ratio
from tileloom.bench.store import geometric_means

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLOURS = {"faster": "green", "slower": "red", "unclear": "dim"}


def _names(cells: Sequence[CellResult], baseline: str) -> list[str]:
    """Contenders in the order of columns, the baseline first; without those that refused all."""
    entries = [entry for cell in cells for entry in cell.entries]
    names = dict.fromkeys(entry.name for entry in entries if entry.status != "refused")
    return sorted(names, key=lambda name: name != baseline)


def _number(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if entry.tflops is None:
        return {"wrong": "[bold red]wrong[/]", "failed": "[red]failed[/]"}.get(entry.status, "-")
    return f"{entry.tflops:.0f}"


def _escaped(text: str) -> str:
    """Keep rich from reading an interval as a style."""
    return text.replace("[", "\\[")


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    text = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] {ratio.verdict}"
    return f"[{_COLOURS[ratio.verdict]}]{_escaped(text)}[/]"


def speed_table(cells: Sequence[CellResult], baseline: str) -> Table:
    """Make the table of TFLOP/s: a row a cell, a column a contender, the baseline first.

    Args:
        cells: The results.
        baseline: Whose column comes first.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    names = _names(cells, baseline)
    means = geometric_means(cells, baseline)
    table = Table(
        title="TFLOP/s (causal counted at half), median of the rounds", box=SIMPLE, pad_edge=False
    )
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("SM MHz", justify="right")
    table.add_column("W", justify="right")
    for cell in cells:
        card = cell.card
        state = ("", "") if card is None else (f"{card.clock_mhz:.0f}", f"{card.power_w:.0f}")
        table.add_row(cell.case.name, *(_number(cell.entry(name)) for name in names), *state)
    table.add_section()
    last = [
        "" if means[name]["tflops"] is None
        else f"{means[name]['tflops']:.0f} ({means[name]['cells']})"
        for name in names
    ]  # fmt: skip
    table.add_row("geometric mean (cells)", *last, "", "")
    return table


def ratio_table(cells: Sequence[CellResult], baseline: str) -> Table:
    """Make the table of our own contenders: ratio to the baseline, share of matmul, host time.

    Args:
        cells: The results.
        baseline: Who the ratios are to.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    means = geometric_means(cells, baseline)
    table = Table(
        title=f"ours against {baseline}: how many times as fast, 95 % interval", box=SIMPLE
    )
    for name in ("case", "contender", f"x {baseline}", "spread", "of matmul", "host us"):
        table.add_column(name, justify="left" if name in ("case", "contender") else "right")
    ours: dict[str, None] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.side != "ours":
                continue
            ours[entry.name] = None
            if entry.time_ms is None:
                table.add_row(cell.case.name, entry.name, _number(entry))
                continue
            spread = (entry.time_ms.q80 - entry.time_ms.q20) / entry.time_ms.median
            share = "" if entry.of_matmul is None else f"{entry.of_matmul:.0%}"
            table.add_row(
                *(cell.case.name, entry.name, _ratio(entry.ratios.get(baseline))),
                *(f"{spread:.1%}", share, f"{entry.host_us:.0f}"),
            )
    table.add_section()
    for name in ours:
        mean = means[name]
        if mean["ratio"] is not None:
            table.add_row("geometric mean", name, f"{mean['ratio']:.3f} ({mean['ratio_cells']})")
    return table


def _cases(names: Sequence[str], total: int) -> str:
    return "all cells" if len(names) == total else ", ".join(names)


def reasons(cells: Sequence[CellResult]) -> list[str]:
    """Say, once for each contender and reason, why it has no number and in which cells."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.status != "ok":
                key = (entry.name, entry.status, entry.reason or "no reason given")
                where.setdefault(key, []).append(cell.case.name)
    total = len(cells)
    return [
        f"{name} {status} in {_cases(names, total)}: {why}"
        for (name, status, why), names in where.items()
    ]


def choices(cells: Sequence[CellResult]) -> list[str]:
    """Say, for each of our contenders, which backend and config ran which cells, and why."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.side == "ours" and "config" in entry.about:
                text = f"{entry.about['config']} by {entry.about.get('source')}"
                if entry.about["config"] != entry.name:
                    where.setdefault((entry.name, text), []).append(cell.case.name)
    total = len(cells)
    return [f"{name}: {text} in {_cases(names, total)}" for (name, text), names in where.items()]


def bar_lines(results: Sequence[BarResult]) -> list[str]:
    """Say how many bars are met, and list those that are not."""
    if not results:
        return []
    met = sum(one.met is True for one in results)
    lines = [f"bars: {met} of {len(results)} met"]
    for one in results:
        if one.met is not True:
            word = "MISSED" if one.met is False else "not known"
            lines.append(f"  {word}: {one.bar.cell}, {one.bar}: {one.found}")
    return lines


def bar_table(results: Sequence[BarResult]) -> Table:
    """Make the table of bars: a row a cell, a column for each kind of bar.

    Args:
        results: What `judge_bars` gave.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    kinds = {"tflops": "TFLOP/s", "at_least": "ratio at least", "faster_than": "faster than"}
    colours = {True: "green", False: "bold red", None: "yellow"}
    words = {True: "met", False: "MISSED", None: "not known"}
    table = Table(title="bars: what was found", box=SIMPLE, pad_edge=False)
    table.add_column("case", no_wrap=True)
    for title in kinds.values():
        table.add_column(title)
    for cell in dict.fromkeys(one.bar.cell for one in results):
        row: list[str] = []
        for kind in kinds:
            texts = [
                f"{one.bar}: {_escaped(one.found)} [{colours[one.met]}]{words[one.met]}[/]"
                for one in results
                if one.bar.cell == cell and one.bar.kind == kind
            ]
            row.append("\n".join(texts))
        table.add_row(cell, *row)
    return table


def header(
    machine: Mapping[str, Any], code: Mapping[str, Any], ceilings: Ceilings | None
) -> list[str]:
    """Say what the numbers were taken on."""
    dirty = {True: " with changes", False: "", None: " (changes unknown)"}[code["dirty"]]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"{machine['card']}, {machine['sms']} SMs, driver {machine['driver']}, power limit "
        f"{machine['power_limit_w']} W",
        f"torch {machine['torch']}, cuDNN {machine['cudnn']}, {packages}, Python "
        f"{machine['python']}; commit {code['commit']}{dirty}",
    ]
    if ceilings is not None:
        sizes = ", ".join(f"{tf:.0f} at {n}" for n, tf in ceilings.matmul_by_size.items())
        lines.append(
            f"cuBLAS bf16 {ceilings.matmul_tflops:.0f} TFLOP/s ({sizes}); launch floor "
            f"{ceilings.launch_us:.1f} us on the device, {ceilings.launch_host_us:.1f} us of host "
            "time; inputs N(0, 1)"
        )
    return lines


def show(
    console: Console,
    cells: Sequence[CellResult],
    baseline: str,
    bars: Sequence[BarResult],
) -> None:
    """Print the result of a run.

    Args:
        console: Where to.
        cells: The results; nothing is printed if there are none.
        baseline: Who the ratios are to.
        bars: Which bars are met.
    """
    if not cells:
        return
    console.print(speed_table(cells, baseline))
    console.print(ratio_table(cells, baseline))
    if bars:
        console.print(bar_table(bars))
    for line in (*reasons(cells), *choices(cells), *bar_lines(bars)):
        console.print(line, markup=False, highlight=False)
