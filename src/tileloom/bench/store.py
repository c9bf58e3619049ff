"""The record of a run as JSON, with everything that a reader needs to judge the numbers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from tileloom.bench.bars import BarResult
from tileloom.bench.ceilings import Ceilings
from tileloom.bench.run import CellResult
from tileloom.bench.stats import geometric_mean
from tileloom.bench.timer import Plan
from tileloom.errors import OptionError

KIND = "tileloom-bench"
SCHEMA = 1

_FIELDS: Mapping[str, type] = {
    "operator": str,
    "date": str,
    "finished": bool,
    "code": dict,
    "machine": dict,
    "inputs": str,
    "protocol": dict,
    "baseline": str,
    "cells": list,
    "geometric_means": dict,
    "bars": list,
}
_STATUSES = ("ok", "wrong", "refused", "failed")


def _cell(cell: CellResult) -> dict[str, Any]:
    return {
        "case": asdict(cell.case),
        "flops": cell.case.flops,
        "bytes": cell.case.bytes_moved,
        "input_sets": cell.sets,
        "rounds": cell.rounds,
        "card": None if cell.card is None else cell.card.as_dict(),
        "seconds": cell.seconds,
        "entries": [asdict(entry) for entry in cell.entries],
    }


def geometric_means(cells: Sequence[CellResult], baseline: str) -> dict[str, dict[str, Any]]:
    """Sum up a run: for each contender over the cells where it has a number.

    Args:
        cells: The run's cells.
        baseline: Who the ratios are to.

    Returns:
        By contender: `cells`, the number of cells, `tflops`, and `ratio` over the `ratio_cells`
        where the baseline has a number too (None where there are none).
    """
    names = dict.fromkeys(entry.name for cell in cells for entry in cell.entries)
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        entries = [entry for cell in cells if (entry := cell.entry(name)) is not None]
        numbers = [entry.tflops for entry in entries if entry.tflops is not None]
        ratios = [entry.ratios[baseline].value for entry in entries if baseline in entry.ratios]
        result[name] = {
            "cells": len(numbers),
            "tflops": geometric_mean(numbers) if numbers else None,
            "ratio": geometric_mean(ratios) if ratios else None,
            "ratio_cells": len(ratios),
        }
    return result


def document(
    *,
    operator: str,
    date: str,
    code: Mapping[str, Any],
    machine: Mapping[str, Any],
    plan: Plan,
    baseline: str,
    cells: Sequence[CellResult],
    bars: Sequence[BarResult],
    ceilings: Ceilings | None,
    finished: bool,
    command: str | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Put a run together as plain data.

    Args:
        operator: What was measured, such as ``"attention_fwd"``.
        date: When, in UTC.
        code: Commit and dirty flag, of `machine.git_state`.
        machine: Card and versions, of `machine.describe_machine`.
        plan: The protocol's numbers.
        baseline: Who the ratios of the geometric means are to.
        cells: The results.
        bars: Which bars are met.
        ceilings: Matrix products and launches, or None if not measured.
        finished: Whether all cells were run.
        command: The command line.
        notes: What a reader should know besides.

    Returns:
        The document; `check` accepts it.
    """
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "operator": operator,
        "date": date,
        "finished": finished,
        "command": command,
        "code": dict(code),
        "machine": dict(machine),
        "inputs": "independent N(0, 1), another seed for each input set",
        "protocol": {
            **asdict(plan),
            "time": "device events around a sample queued behind a spinning kernel",
            "l2": "cold: input sets rotate, so that between two uses of a set at least three times "
            "the cache passes through it",
            "order": "all contenders in each round, in a balanced Latin square",
            "ratio": "median of the rounds' ratios, 95 % bootstrap interval over rounds",
        },
        "baseline": baseline,
        "ceilings": None if ceilings is None else asdict(ceilings),
        "cells": [_cell(cell) for cell in cells],
        "geometric_means": geometric_means(cells, baseline),
        "bars": [{**asdict(one.bar), "met": one.met, "found": one.found} for one in bars],
        "notes": list(notes),
    }


def check(content: Any) -> None:
    """Check that plain data is a record of this schema.

    Args:
        content: What JSON gave.

    Raises:
        OptionError: If it is not; the text names the first field that is wrong.
    """

    def refuse(what: str) -> None:
        raise OptionError(f"bench: this is no benchmark record of schema {SCHEMA}: {what}.")

    if not isinstance(content, dict):
        refuse(f"it is a {type(content).__name__}, not an object")
    record = cast("dict[str, Any]", content)
    if record.get("kind") != KIND:
        refuse(f"kind is {record.get('kind')!r}, not {KIND!r}")
    if record.get("schema") != SCHEMA:
        refuse(f"schema is {record.get('schema')!r}")
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind):
            refuse(f"{name} is {record.get(name)!r}, not a {kind.__name__}")
    for cell in record["cells"]:
        name = cell["case"]["name"]
        for entry in cell["entries"]:
            where = f"{entry.get('name')} in {name}"
            if entry.get("status") not in _STATUSES:
                refuse(f"{where} has status {entry.get('status')!r}")
            is_ok = entry["status"] == "ok"
            if is_ok != (entry.get("tflops") is not None):
                refuse(f"{where} is {entry['status']} and has tflops={entry.get('tflops')!r}")
            if not is_ok and not entry.get("reason"):
                refuse(f"{where} is {entry['status']} and has no reason")
            if is_ok and not math.isfinite(entry["tflops"]):
                refuse(f"{where} has tflops={entry['tflops']!r}")
            if is_ok and len(entry["samples_ms"]) != cell["rounds"]:
                refuse(f"{where} has {len(entry['samples_ms'])} samples in {cell['rounds']} rounds")


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record of `document`, whole or not at all.

    Args:
        path: The file; its folder is made if need be.
        content: A document that `check` accepts.

    Raises:
        OptionError: If it does not.
        OSError: If it cannot be written.
    """
    check(content)
    write(path, content)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data as JSON, whole or not at all.

    Args:
        path: The file; its folder is made if need be.
        content: The data, without NaN.

    Raises:
        OSError: If it cannot be written.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> dict[str, Any]:
    """Read a record.

    Args:
        path: A file that `save` wrote.

    Raises:
        OptionError: If it cannot be read or is of another schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"bench: the record {path} cannot be read ({type(error).__name__}: {error})."
        ) from None
    check(content)
    return content
