"""Puts parts of a record of `tileloom bench gemm` together; `record_tables.py` makes the tables.

PYTHONPATH=src python scripts/gemm_record.py PART... --out benchmarks/results/gemm_h100.json

Parts are records of the same commit on cards of one name, each of other cases (`--cases`). Ratios
are within a case, so they may come from different cards; the geometric mean is computed anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tileloom.bench.gemm_bars import CUBLAS, MEAN, OURS, GemmBar
from tileloom.bench.stats import geometric_mean

Record = dict[str, Any]
_CASES = Path(__file__).parents[1] / "benchmarks" / "gemm_cases.json"
_MEAN = "geometric mean"


def entry_of(cell: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return a contender's entry of a cell, if it has a number."""
    found = (e for e in cell["entries"] if e["name"] == name and e["status"] == "ok")
    return next(found, None)


def product_ratios(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return ours against cuBLAS in the cells of products alone."""
    ratios: list[float] = []
    for cell in cells:
        case, own = cell["case"], entry_of(cell, OURS)
        is_alone = case["judged"] == "device" and not (
            case["bias"] or case["activation"] or case["residual"] or case["chunks"]
        )
        if is_alone and own is not None and CUBLAS in own["ratios"]:
            ratios.append(own["ratios"][CUBLAS]["value"])
    return ratios


def merge(parts: Sequence[Record], order: Sequence[str]) -> Record:
    """Put records together.

    Args:
        parts: Records; where two have a case, the later one's counts.
        order: Names of all cases.

    Raises:
        ValueError: If they are of different commits, cards or PyTorch.
    """
    first = parts[0]
    for part in parts[1:]:
        for group, key in (("code", "commit"), ("machine", "card"), ("machine", "torch")):
            one, other = first[group].get(key), part[group].get(key)
            if one != other:
                raise ValueError(f"{group}.{key} is {one} in one part and {other} in another")
    cells = {cell["case"]["name"]: cell for part in parts for cell in part["cells"]}
    bars: dict[str, list[Any]] = {}
    for part in parts:
        fresh = dict.fromkeys(bar["case"] for bar in part["bars"])
        bars |= {name: [b for b in part["bars"] if b["case"] == name] for name in fresh}
    bars.pop(_MEAN, None)
    names = [name for name in order if name in cells]
    kept = [cells[name] for name in names]
    ratios = product_ratios(kept)
    mean = geometric_mean(ratios)
    asked, found = f"at least {MEAN} x {CUBLAS}", f"{mean:.3f} ({len(ratios)} cases)"
    last = asdict(GemmBar(_MEAN, asked, found, mean >= MEAN))
    return {
        **first,
        "finished": all(part["finished"] for part in parts) and len(names) == len(order),
        "command": [part["command"] for part in parts],
        "copy_gbps": [part["copy_gbps"] for part in parts],
        "cells": kept,
        "bars": [*(bar for name in names for bar in bars.get(name, [])), last],
    }


def main() -> None:
    """Merge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    order = [case["name"] for case in json.loads(_CASES.read_text("utf-8"))["cases"]]
    record = merge([json.loads(path.read_text("utf-8")) for path in args.parts], order)
    args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    missed = [bar for bar in record["bars"] if bar["met"] is not True]
    print(f"{len(record['bars']) - len(missed)} of {len(record['bars'])} bars met; not met:")
    print("\n".join(f"  {bar['case']}: {bar['asked']}: {bar['found']}" for bar in missed))


if __name__ == "__main__":
    main()
