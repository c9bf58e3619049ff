"""Writes the tables of numbers in docs/tuning.md and docs/tuning_cache.md from the results.

python -m tests.tuning.numbers_page

A table stands between `<!-- table: FILE -->` and `<!-- end -->`; FILE is one of benchmarks/results,
whose name is that of a function below and the card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.house import ROOT

PAGES = (ROOT / "docs" / "tuning.md", ROOT / "docs" / "tuning_cache.md")
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _made(record: dict[str, Any], name: str) -> str:
    return (
        f"{record['card']}, torch {record['torch']}, Triton {record['triton']}, "
        f"{record['date'][:10]}, commit {record['commit']} (`benchmarks/results/{name}.json`)."
    )


def tuning_modules(record: dict[str, Any]) -> str:
    """Modules of torch.compile: first calls, tuning, device and host time, and choices."""
    rows: list[list[str]] = []
    for row in record["rows"]:
        first, device, launch = row["first"], row["device"], row["launch"]
        tunes = row["tunes"].values()
        times, within = (sum(one[key] for one in tunes) for key in ("tunes", "within"))
        rows.append([
            f"`{row['module']}`",
            *(f"{first[who]['seconds']:.2f}" for who in ("original", "ours")),
            *(f"{first[who]['call'] * 1e3:.0f}" for who in ("original", "ours")),
            *(f"{device[who] * 1e3:.1f}" for who in ("original", "ours")),
            *(f"{launch[who]:.1f}" for who in ("original", "ours")),
            f"{within} of {times}" if times else "",
        ])  # fmt: skip
    head = (
        "module", "first call, s: Inductor", "here", "tuning in it, ms: Inductor", "here",
        "on the device, us: Inductor", "here", "launch, us: Inductor", "here", "within 1 %",
    )  # fmt: skip
    return _rows(head, rows)


def tuning_numbers(record: dict[str, Any]) -> str:
    """Kernels with a list of six configs each."""
    rows: list[list[str]] = []
    for name, found in record["subjects"].items():
        second, launch, choice = found["second"], found["launch"], found["choice"]
        rows.append([
            f"`{name}`",
            f"{max(second['lookup_ms']):.2f}",
            f"{second['measured']}, {second['compiled']}",
            *(f"{launch[key]:.2f}" for key in ("tuned_us", "bare_us", "inductor_us")),
            f"{choice['within_1_percent']} of {choice['tunings']}",
            f"{choice['worst']:.3f}",
            *(f"{choice[key]:.2f}" for key in ("cold_seconds", "seconds", "original_seconds")),
        ])  # fmt: skip
    head = (
        "kernel", "look-up in a second process, ms", "measured, compiled there",
        "tuned launch, us", "bare launcher", "Inductor's", "within 1 %", "worst choice / best",
        "first call without workers, s", "with", "Inductor's",
    )  # fmt: skip
    return _rows(head, rows)


def tuned_rowwise(record: dict[str, Any]) -> str:
    """Row-wise calls, bfloat16: the rule's tile and the tuned one."""
    rows = [
        [
            row["case"],
            row["kernel"].rpartition("_")[2],
            row["tiles"],
            f"{row['rule_ms'] * 1e3:.1f}",
            f"{row['winner_ms'] * 1e3:.1f}",
            f"{row['rule_ratio']:.3f}",
            f"{row['seconds']:.1f}",
        ]
        for row in record["rows"]
    ]
    head = ("case", "", "tiles", "rule, us", "tuned, us", "rule / tuned", "tuning, s")
    return _rows(head, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "tuning_modules": tuning_modules,
    "tuning_numbers": tuning_numbers,
    "tuned_rowwise": tuned_rowwise,
}


def table(name: str) -> str:
    """The lines of a table, markers included."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    text = f"{_made(record, name)}\n\n{TABLES[name.rpartition('_')[0]](record)}"
    return f"<!-- table: {name} -->\n{text}\n<!-- end -->"


def written(page: Path) -> str:
    """A page's text with its tables as the results are."""
    return _TABLE.sub(lambda match: table(match[1]), page.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path))
