"""Write the tables of docs/ that are measured anew from the records in benchmarks/results.

    python scripts/record_tables.py            # writes them
    python scripts/record_tables.py --check    # status 1 where one is not what its record says

A table stands between `<!-- from NAME.json -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ATTENTION = {"cudnn": "cuDNN", "fa4": "FlashAttention-4", "flash": "FlashAttention-2"}
_ATTENTION["efficient"] = "mem_eff_attention"
_BOUND = re.compile(r"(\S+): bound (\d+) TFLOP/s by ([a-z ]+), tileloom reaches ([\d.]+) of it")
_NAMES = {"compile": "torch.compile", "eager": "PyTorch", "quack": "QuACK"}
_LAUNCHES = (
    ("raw", "raw: `cuLaunchKernel` in C"),
    ("cuda.bindings", "`cuda.bindings`, arguments prepared"),
    ("tileloom entry alone", "a prepared launch alone (`entry`)"),
    ("tileloom bound", "`bound.launch(...)`"),
    ("torch.add(out=)", "`torch.add(x, x, out=x)`"),
    ("tileloom packed", "`launcher[grid](...)`, packed"),
    ("inductor launcher", "Inductor's launcher alone"),
    ("tileloom seam", "`launcher[grid](...)`, seam"),
    ("triton", "`kernel[grid](...)`"),
)

_STEPS = {
    "import": "import of tileloom.launch",
    "open": "load_bundle",
    "first": "first launch",
    "second": "second",
}

Record = Mapping[str, Any]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def _entries(cell: Record) -> dict[str, Record]:
    return {e["name"]: e for e in cell["entries"] if e["status"] == "ok"}


def _speed(entry: Record | None) -> str:
    if entry is None:
        return ""
    return f"{entry['time_ms']['median'] * 1000:.1f} ({entry['of_copy']:.1%})"


def rowwise(record: Record) -> str:
    """The table of `tileloom bench rowwise`, and what is below its bars."""
    machine, cells = record["machine"], record["cells"]
    found = {entry["name"] for cell in cells for entry in cell["entries"]}
    peers = [name for name in _NAMES if name in found]
    rows: list[list[str]] = []
    below: list[str] = []
    behind: list[str] = []
    for cell in cells:
        entries = _entries(cell)
        name = cell["case"]["name"].replace("-", " ")
        ours = entries["tileloom"]
        row = [name, _speed(ours), *(_speed(entries.get(peer)) for peer in peers)]
        for peer in peers:
            ratio = ours["ratios"].get(peer)
            row.append(ratio and f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]")
            if ratio is not None and ratio["high"] < 1:
                call = ours["call_ratios"][peer]["value"]
                behind.append(f"{name} of {_NAMES[peer]} ({ratio['value']:.3f}; a call {call:.2f})")
        calls = (entries.get(each) for each in ("tileloom", *peers))
        row.append(", ".join("-" if e is None else f"{e['call_us']['median']:.0f}" for e in calls))
        rows.append([text or "" for text in row])
        if cell["case"]["columns"] >= 4096 and "small" not in name and ours["of_copy"] < 0.9:
            below.append(f"{name} ({ours['of_copy']:.1%})")
    head = ["case", "tileloom", *(_NAMES[peer] for peer in peers)]
    head += [f"against {_NAMES[peer]} [95 %]" for peer in peers] + ["call, us"]
    return (
        f"`tileloom bench rowwise` on one {machine['card']}, {record['date'][:10]}, commit "
        f"{_commit(record)}, torch {machine['torch'].partition('+')[0]}, Triton "
        f"{machine['packages']['triton']}, copy {record['copy_gbps']:.0f} GB/s; bf16. Device time "
        "in us, and the share of the copy's bandwidth; last the time of a call with the host, ours "
        f"and then the peers' in the columns' order.\n\n{_table(head, rows)}\n\n"
        f"Below 90 %: {', '.join(below) or 'none'}. Behind on the device: "
        f"{', '.join(behind) or 'none'}."
    )


def _attention_rows(record: Record) -> tuple[list[str], list[list[str]], list[str]]:
    """Head and rows of a table of attention's speeds, and of each peer what was won and lost."""
    cells = record["cells"]
    found = {entry["name"] for cell in cells for entry in cell["entries"] if entry["tflops"]}
    peers = [name for name in _ATTENTION if name in found]
    judged = [name for name in peers if name in ("cudnn", "fa4")]
    rows: list[list[str]] = []
    won: dict[str, list[str]] = {name: [] for name in judged}
    lost: dict[str, list[str]] = {name: [] for name in judged}
    for cell in cells:
        entries = _entries(cell)
        name, ours = cell["case"]["name"], entries["tileloom"]
        row = [name, *(f"{entries[e]['tflops']:.0f}" if e in entries else "-"
                       for e in ("tileloom", *peers))]  # fmt: skip
        for peer in judged:
            ratio = ours["ratios"].get(peer)
            row.append(
                f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""
            )
            if ratio and ratio["low"] > 1:
                won[peer].append(name)
            elif ratio:
                lost[peer].append(f"{name} ({ratio['value']:.2f})")
        rows.append(row)
    head = ["case", "tileloom", *(_ATTENTION[e] for e in peers)]
    head += [f"against {_ATTENTION[e]} [95 %]" for e in judged]
    text = [
        f"Ahead of {_ATTENTION[e]} in {len(won[e])} of {len(won[e]) + len(lost[e])} cells; not in: "
        f"{', '.join(lost[e]) or 'none'}."
        for e in judged
    ]
    return head, rows, text


def attention(record: Record) -> str:
    """The table of `tileloom bench attention`, and who is ahead."""
    head, rows, text = _attention_rows(record)
    return f"{_where(record)}\n\n{_table(head, rows)}\n\n{' '.join(text)}"


def features(record: Record) -> str:
    """The table of `tileloom bench attention --features`, with the bound of each feature."""
    bounds = {m[1]: m for note in record["notes"] if (m := _BOUND.match(note))}
    head, rows, text = _attention_rows(record)
    seed = head.index("mem_eff_attention") if "mem_eff_attention" in head else None
    below: list[str] = []
    for row in rows:
        bound = bounds.get(row[0])
        row += [f"{bound[2]} by {bound[3]}", bound[4]] if bound else ["", ""]
        has_seed = seed is not None and row[seed] != "-"
        row.append(f"{float(row[1]) / float(row[seed]):.1f}" if seed and has_seed else "")
        if bound and float(bound[4]) < 0.8:
            below.append(f"{row[0]} ({bound[4]})")
    table = _table([*head, "bound", "reached", "times mem_eff"], rows)
    under = f"Below 0.8 of the bound: {', '.join(below) or 'none'}."
    return f"{_where(record)}\n\n{table}\n\n{' '.join([*text, under])}"


def _where(record: Record) -> str:
    machine, rounds = record["machine"], {cell["rounds"] for cell in record["cells"]}
    many = f"{min(rounds)} to {max(rounds)}" if len(rounds) > 1 else f"{min(rounds)}"
    return (
        f"One {machine['card']}, {record['date'][:10]}, commit {_commit(record)}, torch "
        f"{machine['torch'].partition('+')[0]}, cuDNN {machine['packages']['nvidia-cudnn-cu13']}, "
        f"Triton {machine['packages']['triton']}; TFLOP/s, causal counted at half, medians of "
        f"{many} interleaved rounds."
    )


def _commit(record: Record) -> str:
    code = record["code"]
    return code if isinstance(code, str) else str(code["commit"])[:7]


def launches(record: Record) -> str:
    """The tables of `tileloom.bench.launch_cost`: launches, calls, the first from a bundle."""
    cases = list(record["cases"].values())
    rows = [
        [text, *(f"{case[name]['median_us']:.2f}" if name in case else "" for case in cases)]
        for name, text in _LAUNCHES
        if any(name in case for case in cases)
    ]
    text = (
        f"On the host of one {record['card']}, Python {record['python']}, torch "
        f"{record['torch'].partition('+')[0]}, Triton {record['triton']}, {record['date']}, commit "
        f"{record['commit'][:7]}, medians in microseconds:\n\n"
        f"{_table(['', '19 arguments', '4 of them TMA'], rows)}"
    )
    if record.get("calls"):
        rows = []
        for name, pair in record["calls"].items():
            torch, ours = pair["torch"]["median_us"], pair["tileloom"]["median_us"]
            rows.append([name, f"{torch:.1f}", f"{ours:.1f}", f"{ours / torch:.2f}"])
        head = ["a call without gradients", "PyTorch", "tileloom", "in PyTorch's"]
        text += f"\n\n{_table(head, rows)}"
    bundle = record.get("first_launch_from_a_bundle")
    if bundle:
        (times,) = (value for value in bundle.values() if isinstance(value, dict))
        rows = [[name, *(f"{times[name][column][0]:.2f}" for column in _STEPS)] for name in times]
        text += f"\n\nIn {bundle['runs']} new processes that load a bundle, medians in ms:\n\n"
        text += _table(["kernel", *_STEPS.values()], rows)
    return text


_GEMM = {  # what is shown of each kind of case: peers, and whom ours is compared with
    "product": (("torch", "triton", "quack"), "torch"),
    "fused": (("plain", "torch", "compile", "quack"), "plain"),
    "chunks": (("plain", "torch", "seed"), "plain"),
    "host": (("torch",), "torch"),
}


def _gemm_kind(case: Record) -> str:
    if case["judged"] == "call":
        return "host"
    is_fused = case["bias"] or case["activation"] or case["residual"]
    return "chunks" if case["chunks"] else "fused" if is_fused else "product"


def _gemm_row(cell: Record, peers: Sequence[str], other: str, met: str) -> list[str]:
    case, entries = cell["case"], _entries(cell)
    is_call = case["judged"] == "call"

    def us(name: str) -> str:
        entry = entries.get(name)
        if entry is None:
            return ""
        return f"{entry['call_us']['median'] if is_call else entry['time_ms']['median'] * 1000:.1f}"

    ours = entries.get("tileloom")
    speed = ratio = config = ""
    if ours is not None:
        speed = f"{cell['flops'] / ours['time_ms']['median'] / 1e9:.0f}"
        found = ours["call_ratios" if is_call else "ratios"].get(other)
        ratio = f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else ""
        config = ours["about"].get("config", "").partition(":")[2]
    sizes = f"{case['m']} x {case['n']} x {case['k']}"
    return [case["name"], sizes, us("tileloom"), speed, *map(us, peers), ratio, met, config]


def gemm(record: Record) -> str:
    """The tables of `tileloom bench gemm`, and which bars are met."""
    machine, bars = record["machine"], record["bars"]
    met: dict[str, list[str]] = {}
    for bar in bars:
        met.setdefault(bar["case"], []).append({True: "yes", False: "no", None: "?"}[bar["met"]])
    parts = [
        f"One {machine['card']}, {record['date'][:10]}, commit {_commit(record)}, torch "
        f"{machine['torch'].partition('+')[0]}, Triton {machine['packages']['triton']}, bf16; "
        "device time in us, of `host` the time of a call. The bars are those above; a fused case "
        "has two, against the product alone and against `torch.compile`."
    ]
    for kind, (peers, other) in _GEMM.items():
        cells = [cell for cell in record["cells"] if _gemm_kind(cell["case"]) == kind]
        found = {name for cell in cells for name in _entries(cell)}
        shown = [name for name in peers if name in found]
        head = [kind, "M x N x K", "tileloom", "TFLOP/s", *(_NAMES.get(e, e) for e in shown)]
        head += [f"to {other} [95 %]", "bars", "config"]
        rows = [_gemm_row(c, shown, other, ", ".join(met[c["case"]["name"]])) for c in cells]
        parts += [_table(head, rows)] if rows else []
    count = sum(bar["met"] is True for bar in bars)
    mean = bars[-1]["found"]
    parts.append(f"Geometric mean of the products: {mean}. Bars met: {count} of {len(bars)}.")
    return "\n\n".join(parts)


def head_dims(record: Record) -> str:
    """The table of `scripts/time_head_dims.py`: widths of q and k, and of v, that differ."""
    rows: list[list[str]] = []
    for row in record["rows"]:
        speeds: list[str] = []
        for way in ("forward", "backward"):
            found = {name: row[way].get(name, {}).get("tflops") for name in _PAIRS}
            speeds.append(" / ".join("-" if v is None else f"{v:.0f}" for v in found.values()))
        wide, wide_v = row["dims"]
        rows.append([f"{wide} x {wide_v}", "yes" if row["causal"] else "no", *speeds])
    return (
        f"One {record['device']}, {record['date']}, commit {record['commit'][:7]}, torch "
        f"{record['torch'].partition('+')[0]}, Triton {record['triton']}; bf16, 4,096 queries and "
        "keys, TFLOP/s of tileloom / cuDNN / mem_eff_attention, medians without intervals.\n\n"
        f"{_table(['D x Dv', 'causal', 'forward', 'backward'], rows)}"
    )


_PAIRS = ("tileloom", "cudnn", "efficient")
_RESULTS = ROOT / "benchmarks" / "results"
_ALL: Mapping[str, tuple[str, Callable[[Record], str]]] = {
    "rowwise_h100.json": ("docs/benchmarks.md", rowwise),
    "rowwise_h200.json": ("docs/benchmarks.md", rowwise),
    "launch_h100.json": ("docs/launching.md", launches),
    "launch_h200.json": ("docs/launching.md", launches),
    "attention_fwd_h100.json": ("docs/benchmarks.md", attention),
    "attention_bwd_h100.json": ("docs/benchmarks.md", attention),
    "attention_fwd_h200.json": ("docs/benchmarks.md", attention),
    "attention_bwd_h200.json": ("docs/benchmarks.md", attention),
    "attention_features_fwd_h200.json": ("docs/benchmarks.md", features),
    "attention_features_bwd_h200.json": ("docs/benchmarks.md", features),
    "attention_head_dims_h200.json": ("docs/attention_measurements.md", head_dims),
    "gemm_h200.json": ("docs/benchmarks.md", gemm),
}
TABLES = {name: made for name, made in _ALL.items() if (_RESULTS / name).exists()}
"""Record that is there -> the page that shows it, and what makes the text."""


def page_with(name: str, page: str) -> str:
    """Return the text of a page with the table of a record as the record says."""
    record = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
    begin, end = f"<!-- from {name} -->\n", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    text = f"{begin}{TABLES[name][1](record)}\n{end}"
    changed, count = pattern.subn(lambda _: text, page)
    if count != 1:
        raise SystemExit(f"{TABLES[name][0]} has {count} tables from {name}, not one")
    return changed


def main() -> int:
    """Write or check all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    wrong = 0
    for name, (where, _) in TABLES.items():
        path = ROOT / where
        page = path.read_text(encoding="utf-8")
        changed = page_with(name, page)
        if changed != page:
            wrong += 1
            print(f"{where}: the table from {name} is {'not what it says' if check else 'new'}")
            if not check:
                path.write_text(changed, encoding="utf-8")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
