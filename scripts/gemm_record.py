"""Puts parts of a record of `tileloom bench gemm` together, and prints it as Markdown tables.

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

from tileloom.bench.gemm_bars import CUBLAS, MEAN, OURS, PLAIN, GemmBar
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


def _us(cell: Mapping[str, Any], name: str) -> str:
    entry = entry_of(cell, name)
    if entry is None:
        return ""
    is_call = cell["case"]["judged"] == "call"
    us = entry["call_us"]["median"] if is_call else entry["time_ms"]["median"] * 1000
    return f"{us:.1f}"


def _ratio(cell: Mapping[str, Any], other: str) -> str:
    own = entry_of(cell, OURS)
    kind = "call_ratios" if cell["case"]["judged"] == "call" else "ratios"
    ratio = None if own is None else own[kind].get(other)
    return (
        "" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    )


def _config(cell: Mapping[str, Any]) -> str:
    own = entry_of(cell, OURS)
    return "" if own is None else own["about"].get("config", "").partition(":")[2]


def markdown(record: Record) -> list[str]:
    """Return tables of a record: products, then what is fused, chunks and calls with the host."""
    met = {}
    for bar in record["bars"]:
        met.setdefault(bar["case"], []).append(
            {True: "yes", False: "**no**", None: "?"}[bar["met"]]
        )
    kinds: dict[str, list[Any]] = {"product": [], "fused": [], "chunks": [], "host": []}
    for cell in record["cells"]:
        case = cell["case"]
        is_fused = case["bias"] or case["activation"] or case["residual"]
        kind = "host" if case["judged"] == "call" else "chunks" if case["chunks"] else "product"
        kinds["fused" if kind == "product" and is_fused else kind].append(cell)
    columns = {
        "product": ((CUBLAS, "triton", "quack"), CUBLAS),
        "fused": ((PLAIN, CUBLAS, "compile", "quack"), PLAIN),
        "chunks": ((PLAIN, CUBLAS, "seed"), PLAIN),
        "host": ((CUBLAS,), CUBLAS),
    }
    lines: list[str] = []
    for kind, cells in kinds.items():
        peers, other = columns[kind]
        heads = [kind, "M x N x K", OURS, "TFLOP/s", *peers, f"to {other} [95 %]", "bar", "config"]
        lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for cell in cells:
            case, own = cell["case"], entry_of(cell, OURS)
            speed = "" if own is None else f"{cell['flops'] / own['time_ms']['median'] / 1e9:.0f}"
            row = [
                *(case["name"], f"{case['m']} x {case['n']} x {case['k']}", _us(cell, OURS), speed),
                *(_us(cell, peer) for peer in peers),
                *(_ratio(cell, other), ", ".join(met.get(case["name"], [])), _config(cell)),
            ]
            lines.append(f"| {' | '.join(row)} |")
    last = record["bars"][-1]
    count = sum(bar["met"] is True for bar in record["bars"])
    return [*lines, "", f"Geometric mean of the products: {last['found']}; bars met: {count} of "
            f"{len(record['bars'])}."]  # fmt: skip


def main() -> None:
    """Merge, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    order = [case["name"] for case in json.loads(_CASES.read_text("utf-8"))["cases"]]
    record = merge([json.loads(path.read_text("utf-8")) for path in args.parts], order)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print("\n".join(markdown(record)))


if __name__ == "__main__":
    main()
