"""`tileloom check`: run a file's kernels on the emulator and report races, deadlocks and misuse."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.errors import OptionError

if TYPE_CHECKING:
    from tileloom.emulator.findings import Failure, Result, Setting
    from tileloom.emulator.judge import Verdict


def add_parser(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "check",
        help="run a kernel in the emulator and look for races",
        description=(
            "Run a script, a pytest file or a module with a main() or with CASES (names and "
            "functions) on the CPU, its CUDA devices mapped to an emulated Hopper card, under "
            "several schedules, and print every race, deadlock and misuse. The file runs in a "
            "process of its own; what it prints goes to stderr, of its first run, and of others "
            "where it differs or they fail. Exit status 1 if there is an error, with --mutate if "
            "nobody notices a mutant, 2 for a wrong argument, also where FILE launches no kernel."
        ),
    )
    add = parser.add_argument
    add(
        "target",
        metavar="FILE[:KERNEL]",
        help="what to run; KERNEL filters reports, and with --mutate what is damaged",
    )
    add("--schedule", action="append", choices=("late", "eager", "random"),
        help="only this schedule; may be repeated. Default: all three")  # fmt: skip
    add("--seeds", type=_positive, default=2, metavar="N",
        help="seeds of the random schedule (default 2)")  # fmt: skip
    add("--seed", type=int, metavar="S", help="only this seed")
    add("--level", action="append", choices=("ttir", "ttgir", "machine"),
        help="only this level; may be repeated. Default: ttgir and machine")  # fmt: skip
    add("--arch", default="sm_90a", choices=("sm_80", "sm_90", "sm_90a"))
    add("--sms", type=_positive, default=4, metavar="N",
        help="multiprocessors of the emulated card; few make persistent programs take several "
        "tiles each (default 4)")  # fmt: skip
    add("--registers", action="store_true",
        help="also warn of spills and of wgmma that the assembler serialises: compiles to machine "
        "code for level machine, which takes seconds a kernel")  # fmt: skip
    add("--case", metavar="NAME", help="only this one of the file's CASES or tests")
    add("--timeout", type=_positive, default=600, metavar="S",
        help="seconds that one launch may take, compilation included (default 600)")  # fmt: skip
    add("--mutate", action="store_true", help="damage one synchronisation at a time")
    add("--kernels", type=Path, action="append", default=[], metavar="FILE",
        help="with --mutate: damage the kernels of this module that FILE imports; may be "
        "repeated")  # fmt: skip
    add("--line", type=int, action="append", metavar="N",
        help="with --mutate: only the mutants of this line; may be repeated")  # fmt: skip
    add("--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N",
        help="with --mutate: processes at a time (default: one for each core)")  # fmt: skip
    add("--timeline", type=Path, metavar="JSON", help="write the first run's timeline")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="write JSON")
    form.add_argument("--github", action="store_true", help="write GitHub annotations")


def _positive(text: str) -> int:
    """Read a number that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What `add_parser` parsed.

    Returns:
        0 if nothing is wrong, 1 if there is an error, or with ``--mutate`` an unnoticed mutant.

    Raises:
        OptionError: If an argument is wrong, or the file launches no kernel.
    """
    from tileloom.emulator.check import check_in_child
    from tileloom.emulator.findings import settings

    file, _, test = args.target.partition("::")
    if test:
        raise OptionError(f"check: {args.target} names a test. Try: {file} --case {test}.")
    file, _, kernel = args.target.rpartition(":") if ":" in args.target else (args.target, "", "")
    path = Path(file)
    schedules = args.schedule or ["late", "eager", "random"]
    seeds = [args.seed] if args.seed is not None else list(range(args.seeds))
    levels = args.level or ["ttgir", "machine"]
    ways = settings(schedules, seeds, levels, args.arch, args.sms, args.registers)
    if args.mutate:
        return _mutate(args, path, ways, kernel or None)
    if args.kernels or args.line:
        raise OptionError("check: --kernels and --line choose mutants. Try: --mutate with them.")
    result = check_in_child(
        path, ways, kernel=kernel or None, case=args.case, timeline=args.timeline,
        timeout_s=args.timeout,
    )  # fmt: skip
    if args.json:
        _write_json(result, args.target)
    elif args.github:
        for finding in result.findings:
            print(finding.report.github(finding.also_in()))
        for failures in _alike(result.failures):
            print(_annotation(failures, path))
    else:
        _write_text(result, args.target, ways)
    return 1 if result.errors or result.failures else 0


def _alike(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Put failures of the same case that end with the same line together."""
    found: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        last = failure.text.strip().rpartition("\n")[2]
        found.setdefault((failure.case, last), []).append(failure)
    return list(found.values())


def _annotation(failures: Sequence[Failure], path: Path) -> str:
    """A GitHub workflow command for runs that ended alike, with no report."""
    from tileloom.emulator.report import annotation

    others = f" and {len(failures) - 1} other settings" if len(failures) > 1 else ""
    text = f"{failures[0].text.strip()}\nunder {failures[0].setting.text()}{others}"
    return annotation("error", "tileloom check", text, str(path))


def _write_text(result: Result, target: str, ways: list[Setting]) -> None:
    for finding in result.findings:
        print(finding.report.text())
        if finding.also:
            print(f"    {finding.also_in()}")
        print(f"    again: {finding.setting.command(target, finding.case)}\n")
    for failure in result.failures[:1]:
        if failure.kind == "died":
            print(failure.text)
        else:
            where = failure.setting.text() + (f", case {failure.case}" if failure.case else "")
            print(f"the file itself fails ({where}):\n{failure.text}")
        print(f"    again: {failure.setting.command(target, failure.case)}\n")
    for report, reason in result.suppressed:
        print(f"suppressed [{report.kind}] at line {report.line}: {reason}")
    if any(failure.kind == "died" for failure in result.failures):
        return
    errors = len(result.errors)
    others = len(result.findings) - errors
    kernels = ", ".join(sorted(result.kernels)) or "no kernel"
    failed = f", {len(result.failures)} of which failed" if result.failures else ""
    print(
        f"{kernels}: {result.launches} launches in {len(ways)} runs{failed}; {errors} errors, "
        f"{others} warnings and infos"
    )


def _write_json(result: Result, target: str) -> None:
    out = {
        "schema": 2,
        "target": target,
        "launches": result.launches,
        "kernels": sorted(result.kernels),
        "reports": [
            {
                **finding.report.as_dict(),
                "text": finding.report.text(),
                "case": finding.case,
                "also_in": finding.also,
                "command": finding.setting.command(target, finding.case),
            }
            for finding in result.findings
        ],
        "failures": [
            {
                "text": failure.text,
                "kind": failure.kind,
                "case": failure.case,
                "command": failure.setting.command(target, failure.case),
            }
            for failure in result.failures
        ],
        "suppressed": [{"report": r.text(), "reason": reason} for r, reason in result.suppressed],
    }
    json.dump(out, sys.stdout, indent=1)
    print()


def _mutate(args: argparse.Namespace, path: Path, ways: list[Setting], kernel: str | None) -> int:
    from tileloom.emulator.judge import Judge
    from tileloom.emulator.report import annotation

    judge = Judge(path, ways, args.kernels, timeout_s=args.timeout, case=args.case, kernel=kernel)
    wanted = [
        (path, mutant)
        for path, found in judge.mutants().items()
        for mutant in found
        if args.line is None or mutant.line in args.line
    ]
    if not wanted:
        where = ", ".join(path.name for path in judge.kernels)
        line = f" on line {', '.join(map(str, args.line))}" if args.line else ""
        raise OptionError(
            f"check: no statement of {where}{line} synchronises; there is nothing to damage. "
            "Try: --kernels with the file that holds the kernels."
        )
    missed = 0
    verdicts: list[Verdict] = []
    for verdict in judge.verdicts(wanted, jobs=args.jobs):
        verdicts.append(verdict)
        missed += not verdict.noticed
        if args.github and not verdict.noticed:
            text = f"{verdict.mutant.change}: nobody notices"
            where = str(verdict.path), verdict.mutant.line
            print(annotation("error", "tileloom mutant", text, *where))
        elif not args.json and not args.github:
            _write_verdict(verdict)
    if args.json:
        out = {"schema": 1, "target": args.target, "mutants": [_plain(v) for v in verdicts]}
        json.dump(out, sys.stdout, indent=1)
        print()
    else:
        print(f"{len(verdicts)} mutants, {missed} that nobody notices")
    return 1 if missed else 0


def _plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data for JSON."""
    mutant, way = verdict.mutant, verdict.setting
    return {
        "file": str(verdict.path),
        "line": mutant.line,
        "function": mutant.function,
        "statement": mutant.source,
        "mutation": mutant.change,
        "outcome": verdict.outcome,
        "detail": verdict.detail,
        "schedule": way and way.schedule,
        "seed": way and way.seed,
        "level": way and way.level,
        "case": verdict.case,
        "harmless": mutant.harmless,
    }


def _write_verdict(verdict: Verdict) -> None:
    mutant = verdict.mutant
    outcome = verdict.outcome if verdict.noticed else "UNNOTICED"
    if mutant.harmless and verdict.outcome == "unnoticed":
        outcome = f"harmless: {mutant.harmless}"
    where = f"   ({verdict.setting.text()})" if verdict.setting else ""
    case = f" by case {verdict.case}" if verdict.case else ""
    print(f"{verdict.path.name}:{mutant.line}  {mutant.change:34} {outcome} {verdict.detail}")
    print(f"    {mutant.source}{case}{where}", flush=True)
