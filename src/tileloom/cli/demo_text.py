"""What `tileloom demo` prints: the findings, as plain text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tileloom.cli import console
from tileloom.report.findings import WHEN
from tileloom.report.html import sci

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tileloom.report.findings import Findings, Played


def show(findings: Findings, page: Path) -> None:
    """Print what the demo found.

    Args:
        findings: What it found.
        page: The page that says the same.
    """
    from rich.markup import escape

    out = console()
    for agreement in findings.agreements:
        out.print(f"\n[bold]Embeddings in {agreement.dtype}[/]")
        out.print(
            f"  tileloom against eager attention: largest difference {agreement.max_abs_error:.1e},"
            f" smallest cosine {agreement.min_cosine:.7f} ({agreement.texts} texts, "
            f"{agreement.padded:.0%} of the tokens padding)\n"
            f"  against float64: tileloom {agreement.own_error:.1e}, eager "
            f"{agreement.eager_error:.1e}; with padding seen it would be off by "
            f"{agreement.unmasked_error:.1e}",
            soft_wrap=True,
        )
        verdict = (
            f"[red]broken[/]: {escape(agreement.rule)}" if agreement.rule else "[green]holds[/]"
        )
        out.print(f"  accuracy rule ({agreement.judged} texts): {verdict}", soft_wrap=True)
    _show_searches(findings, out)
    out.print("\n[bold]Which backend ran, and why[/]")
    out.print(_backend_table(findings))
    for table in _contest_tables(findings):
        out.print(table)
    if findings.played is not None:
        _show_played(findings.played, page.parent, out)
    if findings.kernels:
        out.print(_kernel_table(findings))
    for fault in findings.faults:
        out.print(f"[red]fault:[/] {escape(fault)}", soft_wrap=True)
    out.print(f"\nwritten: {page} ({findings.seconds:.0f} s in all)", markup=False, soft_wrap=True)


def _show_searches(findings: Findings, out: Console) -> None:
    out.print("\n[bold]A small search[/]")
    for search in findings.searches:
        out.print(f"  {search.query}", style="cyan", markup=False, soft_wrap=True)
        for hit in search.hits:
            words = hit.text if len(hit.text) < 110 else f"{hit.text[:107]}..."
            out.print(f"    {hit.score:.3f}  {hit.source}: {words}", markup=False, soft_wrap=True)


def _show_played(played: Played, folder: Path, out: Console) -> None:
    out.print("\n[bold]The real Hopper kernel, emulated on the CPU[/]")
    out.print(
        f"  on Q, K, V of the model's first attention layer ({played.problem})", soft_wrap=True
    )
    if played.why_not:
        out.print(f"  not played: {played.why_not}", markup=False, soft_wrap=True)
        return
    out.print(_played_table(played))
    out.print(f"  the wait that was removed: {played.removed}", markup=False, soft_wrap=True)
    out.print("  what the emulator says about it, although the numbers happen to be right:\n")
    for line in played.report.splitlines() or ["nothing"]:
        out.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"\n  timeline: {folder / played.timeline} (open ui.perfetto.dev, choose 'Open trace "
        "file')",
        markup=False,
        soft_wrap=True,
    )


def _played_table(played: Played) -> Table:
    from rich.markup import escape

    made = _table("kernel", "copies complete", ">error", "accuracy rule", ">reports")
    for row in played.rows:
        verdict = "broken" if row.rule else "holds"
        error = sci(row.max_error)
        made.add_row(escape(row.kernel), WHEN[row.schedule], error, verdict, str(row.reports))
    made.add_row("plain formula, float16", "", sci(played.plain_error), "the measure", "")
    return made


def _table(*columns: str, title: str | None = None) -> Table:
    """Make a table; a column whose name starts with ``>`` is right-aligned."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    return made


def _backend_table(findings: Findings) -> Table:
    from rich.markup import escape

    made = _table(">calls", "backend", "problem", "why", "on an H100, in float16")
    for row in findings.backends:
        cells = (str(row.calls), row.backend, row.problem, "\n".join(row.why), row.elsewhere)
        made.add_row(*map(escape, cells))
    return made


def _contest_tables(findings: Findings) -> Sequence[Table]:
    from rich.markup import escape

    tables: list[Table] = []
    for contest in findings.contests:
        made = _table(
            "who", ">median", ">tileloom is faster by", "remark", title=escape(contest.title)
        )
        for row in contest.rows:
            median = row.status if row.median_us is None else f"{row.median_us:,.1f} us"
            ratio = ""
            if row.speedup is not None:
                ratio = f"{row.speedup:.2f} x [{row.speedup_low:.2f}, {row.speedup_high:.2f}]"
            made.add_row(*map(escape, (row.name, median, ratio, row.note)))
        tables.append(made)
    return tables


def _kernel_table(findings: Findings) -> Table:
    from rich.markup import escape

    title = f"The kernels, compiled by Triton {findings.compiler}" + (
        f"; {findings.left_out} left out (see tileloom inspect)" if findings.left_out else ""
    )
    made = _table("kernel", "arch", ">registers", ">spills", ">shared", ">stages", ">blocks/SM",
                  ">compile", "faults", title=title)  # fmt: skip
    for row in findings.kernels:
        numbers = ["-"] * 6
        if row.registers is not None and row.shared_bytes is not None:
            numbers = [
                str(row.registers),
                f"{row.spill_bytes} B",
                f"{row.shared_bytes / 1024:.1f} KiB",
                "-" if row.stages is None else str(row.stages),
                str(row.blocks_per_sm),
                "cached" if row.compile_s is None else f"{row.compile_s:.1f} s",
            ]
        allowed = "none; spills within its budget" if row.spill_bytes else "none"
        faults = "; ".join(row.faults) or allowed
        made.add_row(escape(row.name), row.arch, *numbers, escape(faults))
    return made
