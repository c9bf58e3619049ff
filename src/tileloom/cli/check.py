"""`tileloom check`: run a file's kernels on the emulator and report races, deadlocks and misuse."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.emulator.check import Result, Setting
    from tileloom.emulator.mutate import Verdict


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "check",
        help="run a kernel in the emulator and look for races",
        description=(
            "Run a script, a pytest file or a module with a main() on the CPU, its CUDA devices "
            "mapped to an emulated Hopper card, under several schedules, and print every race, "
            "deadlock and misuse. Exit status 1 if there is an error, 2 for a wrong command line."
        ),
    )
    parser.add_argument(
        "target", metavar="FILE[:KERNEL]", help="what to run; KERNEL filters reports"
    )
    parser.add_argument(
        "--schedule", action="append", choices=("late", "eager", "random"),
        help="only this schedule; may be repeated. Default: all three",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="seeds of the random schedule (default 2)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="only this seed")
    parser.add_argument(
        "--level", action="append", choices=("ttir", "ttgir", "machine"),
        help="only this level; may be repeated. Default: ttgir and machine",
    )  # fmt: skip
    parser.add_argument("--arch", default="sm_90a", choices=("sm_80", "sm_90", "sm_90a"))
    parser.add_argument(
        "--sms",
        type=int,
        default=4,
        metavar="N",
        help="multiprocessors of the emulated card; few make persistent programs take several "
        "tiles each (default 4)",
    )
    parser.add_argument(
        "--mutate", action="store_true", help="damage one synchronisation at a time"
    )
    parser.add_argument(
        "--kernels",
        type=Path,
        action="append",
        metavar="FILE",
        help="with --mutate: damage the kernels of this module that FILE imports; may be repeated",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="JSON", help="write the first run's timeline"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("--github", action="store_true", help="write GitHub annotations")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What `add_parser` parsed.

    Returns:
        0 if nothing is wrong, 1 if there is an error, or with ``--mutate`` an unnoticed mutant.
    """
    from tileloom.emulator.check import check_file, settings

    file, _, kernel = args.target.rpartition(":") if ":" in args.target else (args.target, "", "")
    path = Path(file)
    schedules = args.schedule or ["late", "eager", "random"]
    seeds = [args.seed] if args.seed is not None else list(range(args.seeds))
    levels = args.level or ["ttgir", "machine"]
    ways = settings(schedules, seeds, levels, args.arch, args.sms)
    if args.mutate:
        return _mutate(path, ways, args.kernels or [None])
    result = check_file(path, ways, kernel=kernel or None, timeline=args.timeline)
    if args.json:
        _write_json(result, args.target)
    elif args.github:
        for finding in result.findings:
            print(finding.report.github())
    else:
        _write_text(result, args.target, ways)
    return 1 if result.errors or result.failures else 0


def _write_text(result: Result, target: str, ways: list[Setting]) -> None:
    for finding in result.findings:
        print(finding.report.text())
        print(f"    again: {finding.setting.command(target)}\n")
    for way, trace in result.failures[:1]:
        print(f"the file itself fails ({way.schedule}, {way.level}):\n{trace}")
    for report, reason in result.suppressed:
        print(f"suppressed [{report.kind}] at line {report.line}: {reason}")
    errors = len(result.errors)
    others = len(result.findings) - errors
    kernels = ", ".join(sorted(result.kernels)) or "no kernel"
    print(
        f"{kernels}: {result.launches} launches in {len(ways)} runs; {errors} errors, "
        f"{others} warnings and infos"
    )


def _write_json(result: Result, target: str) -> None:
    out = {
        "schema": 1,
        "target": target,
        "launches": result.launches,
        "kernels": sorted(result.kernels),
        "reports": [
            {**f.report.as_dict(), "text": f.report.text(), "command": f.setting.command(target)}
            for f in result.findings
        ],
        "failures": [trace for _, trace in result.failures],
        "suppressed": [{"report": r.text(), "reason": reason} for r, reason in result.suppressed],
    }
    json.dump(out, sys.stdout, indent=1)
    print()


def _mutate(path: Path, ways: list[Setting], files: Sequence[Path | None]) -> int:
    from tileloom.emulator.check import check_file
    from tileloom.emulator.mutate import mutate_file

    clean = check_file(path, ways[:1])
    if clean.errors or clean.failures:
        print("the file is not correct as it is; run `tileloom check` without --mutate first")
        return 1
    total = missed = 0
    for kernels in files:
        for verdict in mutate_file(path, ways, kernels):
            total += 1
            missed += not verdict.noticed
            _write_verdict(verdict, (kernels or path).name)
    print(f"{total} mutants, {missed} that nobody notices")
    return 1 if missed else 0


def _write_verdict(verdict: Verdict, name: str) -> None:
    mutant = verdict.mutant
    outcome = verdict.outcome if verdict.noticed else "UNNOTICED"
    if mutant.harmless and verdict.outcome == "unnoticed":
        outcome = f"harmless: {mutant.harmless}"
    print(f"{name}:{mutant.line}  {mutant.change:34} {outcome} {verdict.detail}")
    print(f"    {mutant.source}", flush=True)
