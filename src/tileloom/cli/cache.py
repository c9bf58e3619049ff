"""`tileloom cache`: the winners of tuned kernels: list, show, verify, clear, export."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.cli import console
from tileloom.errors import OptionError

if TYPE_CHECKING:
    from rich.table import Table

    from tileloom.tuning.store import Record, Store

    Entry = tuple[Path, Record | None, str]


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "cache",
        example="tileloom cache ls",
        help="list, show, verify, clear and export the winners of tuned kernels",
        description=(
            "Winners lie under $TILELOOM_CACHE_DIR, one file for each kernel and machine; see "
            "docs/tuning_cache.md."
        ),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    texts = {
        "ls": "list the winners",
        "show": "show what is known of every candidate",
        "verify": "check every file",
        "clear": "remove winners; their kernels are tuned anew",
        "export": "compile winners with no GPU and write them into a bundle",
    }
    made = {
        name: actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in texts.items()
    }
    made["export"].add_argument("path", type=Path, metavar="FILE", help="the bundle to write")
    for name in ("ls", "show", "clear", "export"):
        made[name].add_argument(
            "kernel",
            nargs="*",
            default=[],
            metavar="KERNEL",
            help="a kernel's name, the name of a file without .json, or a pattern with *",
        )
    made["clear"].add_argument("--all", action="store_true", help="remove everything")
    for name in ("ls", "show", "verify"):
        made[name].add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser made of the command line.

    Returns:
        0; 1 if a file is damaged.

    Raises:
        OptionError: If a name fits nothing.
        BundleError: If a kernel does not compile.
    """
    from tileloom.tuning.store import Store, readable

    store = Store()
    entries = list(readable(store))
    if args.action == "verify":
        return _verify(store, entries, is_json=args.json)
    chosen = select(entries, args.kernel)
    if args.action == "ls":
        return _list(store, chosen, is_json=args.json)
    if args.action == "show":
        return _show(chosen, is_json=args.json)
    if args.action == "clear":
        return _clear(store, chosen, everything=args.all, named=bool(args.kernel))
    return _export(args.path, chosen)


def _kernel(path: Path) -> str:
    """The kernel's name in a file's name."""
    return path.stem.rpartition("-")[0]


def select(entries: Sequence[Entry], wanted: Sequence[str]) -> list[Entry]:
    """Pick files by kernel, by their own name, or by a pattern with ``*``.

    Args:
        entries: All files.
        wanted: What to pick; nothing picks all.

    Raises:
        OptionError: If one of `wanted` fits none.
    """
    chosen: set[Path] = set()
    for text in wanted:
        pattern = re.compile(".*".join(map(re.escape, text.split("*"))))
        names = {path: (_kernel(path), path.stem) for path, _, _ in entries}
        fits = [path for path, known in names.items() if any(map(pattern.fullmatch, known))]
        if not fits:
            kernels = sorted({kernel for kernel, _ in names.values()})
            near = difflib.get_close_matches(text, kernels, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else "Try: `tileloom cache ls`."
            raise OptionError(f"cache: there is no winner of a kernel '{text}'. {hint}")
        chosen.update(fits)
    return [entry for entry in entries if not wanted or entry[0] in chosen]


def _config(config: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())


def _complain(entries: Sequence[Entry]) -> int:
    damaged = [(path, why) for path, record, why in entries if record is None]
    for path, why in damaged:
        print(f"tileloom: cache: '{path}' is damaged: {why}.", file=sys.stderr)
    return int(bool(damaged))


def _list(store: Store, entries: Sequence[Entry], *, is_json: bool) -> int:
    if is_json:
        rows = [_row(path, record) for path, record, _ in entries if record is not None]
        print(json.dumps({"folder": str(store.folder), "winners": rows}, indent=2))
        return _complain(entries)
    if not entries:
        print(f"{store.folder}: no winners")
        return 0
    from rich.markup import escape

    made = _table(f"{store.folder}, {len(entries)} files")
    for name in ("kernel", "winner", "GPU"):
        made.add_column(name, overflow="fold")
    for name in ("ms", "of", "found by", "Triton", "date"):
        made.add_column(name, justify="right", no_wrap=True)
    for path, record, _ in entries:
        if record is not None:
            row = _row(path, record)
            cells = (
                row["kernel"], _config(row["winner"]), row["gpu"],
                "" if row["ms"] is None else f"{row['ms']:.4f}",
                str(row["candidates"]), row["found_by"], row["triton"], row["date"][:10],
            )  # fmt: skip
            made.add_row(*map(escape, cells))
    console().print(made)
    return _complain(entries)


def _row(path: Path, record: Record) -> dict[str, Any]:
    own = record.known().get(record.config)
    return {
        "file": path.stem,
        "kernel": record.problem["kernel"].rpartition(":")[2],
        "gpu": record.platform.gpu,
        "driver": record.platform.driver,
        "triton": record.platform.triton,
        "assembler": record.platform.assembler,
        "size_hints": record.problem["size_hints"],
        "winner": dict(record.winner),
        "found_by": record.found_by,
        "ms": None if own is None else own.ms,
        "candidates": len(record.candidates),
        "date": str(record.measured.get("date", "")),
    }


def _table(title: str) -> Table:
    from rich.markup import escape
    from rich.table import Table

    return Table(
        title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0),
        header_style="bold underline",
    )  # fmt: skip


def _show(entries: Sequence[Entry], *, is_json: bool) -> int:
    if is_json:
        known = [record.as_json() for _, record, _ in entries if record is not None]
        print(json.dumps(known, indent=2))
        return _complain(entries)
    shown = console()
    for path, record, _ in entries:
        if record is not None:
            shown.print(_candidates(path, record))
    return _complain(entries)


def _candidates(path: Path, record: Record) -> Table:
    from rich.markup import escape

    where, how = record.platform, record.measured
    clock = how.get("clock")
    if not isinstance(clock, dict) or not {"mhz", "low_mhz", "high_mhz"} <= clock.keys():
        clock = {}
    told = [f"{path.stem}: {record.problem['kernel']}"]
    told.append(
        f"{where.gpu}, driver {where.driver}, Triton {where.triton}, assembler {where.assembler}"
    )
    told.append(
        f"sizes {_config(record.problem['size_hints'] or {}) or 'none'}; measured "
        f"{how.get('date', 'at an unknown time')} in {how.get('rounds', '?')} rounds"
        + (f" at {clock['mhz']} MHz ({clock['low_mhz']} to {clock['high_mhz']})" if clock else "")
    )
    made = _table("\n".join(told))
    made.add_column("config", overflow="fold")
    for name in ("ms", "ratio", "regs", "spills", "shared"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("", overflow="fold")
    for one in record.candidates:
        is_winner = one.config == record.winner
        remark = f"winner, by {record.found_by}" if is_winner else one.reason.splitlines()[:1]
        made.add_row(
            escape(_config(one.config)),
            "" if one.ms is None else f"{one.ms:.4f}",
            "" if one.ratio is None else f"{one.ratio:.3f}",
            *("" if n is None else str(n) for n in (one.registers, one.spills, one.shared_bytes)),
            escape(remark if isinstance(remark, str) else "".join(remark)),
        )
    return made


def _verify(store: Store, entries: Sequence[Entry], *, is_json: bool) -> int:
    found = [("fault", f"{path.name}: {why}") for path, record, why in entries if record is None]
    found += [
        ("fault", f"{path.name}: its winner is none of its candidates")
        for path, record, _ in entries
        if record is not None and record.config not in record.known()
    ]
    faults, files = len(found), len(entries)
    said = (
        f"{faults} of {files} files have a fault"
        if faults
        else f"{files} files are what was written"
    )
    found.insert(0, ("fault" if faults else "ok", said))
    found += [
        ("note", f"{path.name} is left over; `tileloom cache clear --all` removes it")
        for path in store.leavings()
    ]
    bad = any(status == "fault" for status, _ in found)
    if is_json:
        rows = [{"status": status, "text": text} for status, text in found]
        told = {"folder": str(store.folder), "ok": not bad, "findings": rows}
        print(json.dumps(told, indent=2))
        return int(bad)
    from rich.markup import escape

    colours = {"ok": "green", "note": "yellow", "fault": "red"}
    shown = console()
    for status, text in found:
        shown.print(f"[{colours[status]}]{status}[/]: {escape(text)}")
    return int(bad)


def _clear(store: Store, entries: Sequence[Entry], *, everything: bool, named: bool) -> int:
    if named == everything:
        raise OptionError(
            "cache: clear takes names of kernels, or --all for everything. Try: "
            "`tileloom cache ls` for the names."
        )
    left = store.leavings() if everything else []
    try:
        for path, _, _ in entries:
            store.remove(path)
        for path in left:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(
            f"cache: '{error.filename}' cannot be removed: {error.strerror}. Try: `ls -ld "
            f"'{store.folder}'`, which shows whose folder it is."
        ) from None
    rest = f", {len(left)} left over" if left else ""
    print(f"{store.folder}: {len(entries)} removed{rest}")
    return 0


def _export(path: Path, entries: Sequence[Entry]) -> int:
    from tileloom.tuning.bundled import bundle_winners

    variants = bundle_winners(path, [record for _, record, _ in entries if record is not None])
    count = f"{len(variants)} winner{'s' if len(variants) != 1 else ''}"
    print(f"{path}: {count}, {path.stat().st_size / 2**20:.2f} MiB")
    return _complain(entries)
