"""Writes the tables of the pages on asynchronous copies from the records in benchmarks/results.

python scripts/cpasync_tables.py

A page has a block for each record, which begins with `<!-- from benchmarks/results/NAME.json -->`
and ends with `<!-- end -->`; what is between is written anew. `tests/cpasync/test_numbers.py`
compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("docs/cpasync.md", "docs/cpasync_tilelang.md")
BLOCK = re.compile(r"(<!-- from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PEERS = ("copy_", "mul", "bitwise_or")  # device copies that are not ours
Rows = dict[str, dict[str, Any]]


def rate(row: dict[str, Any]) -> str:
    """A contender's GB/s or TFLOP/s, or why it has none."""
    number = row.get("GB/s", row.get("TFLOP/s"))
    if number is None:
        return "wrong" if row.get("wrong") else str(row["error"])
    return f"{number:.0f}{'' if row.get('right', True) else ', wrong'}"


def table(head: str, rows: Iterator[str]) -> str:
    """Markdown."""
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *rows, ""])


def axpby(cells: dict[str, Rows]) -> Iterator[str]:
    """cp.async by size and modifier."""
    for cell, rows in cells.items():
        best = rows["torch.add"]["GB/s"]
        yield (
            f"The sum of two float32 vectors of {cell}, fed by a ring of cp.async, GB/s. Blocks of "
            "four steps, or as many blocks as are resident. Beside it `torch.add`: "
            f"{rate(rows['torch.add'])}.\n"
        )
        yield table(
            "| copies | GB/s | resident | best, of torch.add |",
            (
                f"| {name} | {rate(row)} | {rate(rows[f'{name} resident'])} | "
                f"{max(row['GB/s'], rows[f'{name} resident']['GB/s']) / best:.3f} |"
                for name, row in rows.items()
                if f"{name} resident" in rows
            ),
        )


def copy(cells: dict[str, Rows]) -> Iterator[str]:
    """TMA by box, stages and kind of wait."""
    for cell, rows in cells.items():
        peers = {name: rows[name] for name in PEERS}
        best = max(row["GB/s"] for row in peers.values())
        said = ", ".join(f"`{name}` {rate(row)}" for name, row in peers.items())
        yield (
            f"A copy of {cell} by TMA, GB/s read and written, by box, stages, and what the wait "
            "for a store waits for. Blocks of as many boxes as stages, or as many blocks as are "
            f"resident, which go round. Beside it torch: {said}.\n"
        )
        kinds: dict[str, Rows] = {}
        for name, row in rows.items():
            if name not in peers:
                shape, _, wait = name.rpartition(" ")
                kinds.setdefault(shape, {})[wait] = row
        waits = ("read", "full", "resident-read", "resident-full")
        yield table(
            "| box, stages | `read=True` | `read=False` | resident, `read=True` | resident, "
            "`read=False` | best, of the best of torch |",
            (
                f"| {shape} | {' | '.join(rate(by[wait]) for wait in waits)} | "
                f"{max(row['GB/s'] for row in by.values()) / best:.3f} |"
                for shape, by in kinds.items()
            ),
        )


def products(cells: dict[str, Rows]) -> Iterator[str]:
    """Matrix products beside cuBLAS."""
    names = list(
        dict.fromkeys(name for rows in cells.values() for name in rows if name != "cuBLAS")
    )
    yield table(
        f"| product | {' | '.join(names)} | cuBLAS | {names[0]} / cuBLAS |",
        (
            f"| {cell} | {' | '.join(rate(rows[n]) if n in rows else '' for n in names)} | "
            f"{rate(rows['cuBLAS'])} | {rows['cuBLAS']['ms'] / rows[names[0]]['ms']:.2f} |"
            for cell, rows in cells.items()
        ),
    )


def text_of(record: dict[str, Any]) -> str:
    """All tables of a record, under a line that says where and when it was taken."""
    machine, tables = record["machine"], record["tables"]
    parts = [
        f"On one {machine['card']}, driver {machine['driver']}, torch {machine['torch']}, "
        f"{record['date'][:10]}, commit {record['commit']}.\n"
    ]
    if "axpby" in tables:
        parts += [*axpby(tables["axpby"]), *copy(tables["copy"])]
        parts.append("`gemm.py` and `split_k_gemm.py` in float16, TFLOP/s:\n")
        parts += products(tables["gemm"] | tables["split_k"])
    else:
        parts.append("Products of square matrices in float16, TFLOP/s:\n")
        parts += products(tables)
    return "\n".join(parts)


def page_of(text: str) -> str:
    """The page with every block written anew."""
    return BLOCK.sub(lambda m: m[1] + text_of(json.loads((ROOT / m[2]).read_text())) + m[3], text)


def main() -> None:
    """Rewrite the pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(page_of(path.read_text()))


if __name__ == "__main__":
    main()
