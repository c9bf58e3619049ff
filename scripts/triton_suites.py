"""Run Triton's own Gluon tutorials and its ConSan test-suite on the emulator.

    python scripts/triton_suites.py CHECKOUT [--only consan] [-k EXPRESSION] [--markdown FILE]

CHECKOUT is a clone of Triton (or its folders python/tutorials/gluon, python/test/gluon and the file
python/test/conftest.py) that fits the installed version. Its files are run as they are, by pytest,
with CUDA devices mapped to an emulated H100.

A tutorial's test must pass, without a report. A test of ConSan, Triton's concurrency sanitizer,
starts a process for its kernel and looks whether a device-side assertion ended it: here the kernel
is played instead, and the test is told that one did if the emulator reports an error. So the test
itself says what it expects, and each of its kernels is judged: a bug found or missed, a right
kernel clean or reported falsely. Exit status 1 if anything is missed, reported falsely or fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from triton._C import libtriton

from tileloom import emulator
from tileloom.emulator.devices import cuda_on_cpu
from tileloom.emulator.findings import Setting, settings

TUTORIALS = "python/tutorials/gluon"
CONSAN = "python/test/gluon/test_consan.py"
# What ConSan says, and the kinds of the reports of ours that mean the same.
SAME = {
    "Buffer being accessed has outstanding": ("race", "proxy", "pending"),
    "Accessing buffer with pending access": ("race", "proxy", "pending"),
    "missing fence_async_shared": ("proxy",),
    "Deadlock": ("deadlock", "barrier"),
    "underflow": ("barrier",),
    "Barrier used before initialization": ("barrier",),
    "Barrier re-initialized": ("barrier",),
}
GOOD = ("clean", "found")
BAD = ("missed", "false report", "other kind", "reported", "failed")
OTHER = ("refused", "too long", "skipped", "stricter")
ORDER = (*OTHER, "found", "failed", "reported", "false report", "other kind", "missed", "clean")
# Right to ConSan, and reported here for a reason that holds on the hardware.
STRICTER = {
    "test_tma_wait_does_not_publish_overwritten_row": (
        "two TMA loads into one buffer are in flight together: the one not waited for may land last"
    ),
    "test_aliasing_tma_overwrite_clears_stale_write_visibility": (
        "a generic store is overwritten by a TMA load without a proxy fence: it may land last"
    ),
}


@dataclass(frozen=True)
class Row:
    """What came of one test: its file, name and parameters, one of the outcomes, and why."""

    file: str
    test: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0


class Refused(Exception):
    """The emulator, or Triton's compiler, does not take a kernel."""


class TooLong(BaseException):
    """A test takes more than its time. Not an Exception: nothing in between may catch it."""


@dataclass
class Asked:
    """Stands for a device-side assertion, and notes that the test looked for it."""

    reports: list[emulator.Report]
    seen: bool = False

    def __str__(self) -> str:
        """What CUDA says when a device-side assertion fails."""
        self.seen = True
        return "device-side assert triggered"


class Stderr(str):
    """What the process would have written: the kinds of our reports, each in brackets."""

    def __contains__(self, text: object) -> bool:
        """Whether ConSan would have written a message: whether a report of ours means the same."""
        kinds = [kind for words, kinds in SAME.items() if words in str(text) for kind in kinds]
        if not kinds:
            raise Refused(f"ConSan's message {text!r} is not known here")
        return any(str(self).find(f"[{kind}]") >= 0 for kind in kinds)


def is_besides(report: emulator.Report) -> bool:
    """Whether ConSan does not look for this; some kernels of its test-suite do it."""
    kinds = ("uninitialized", "out-of-bounds", "exit")
    return report.kind in kinds or report.message.startswith("global tensor")


@dataclass
class Answer:
    """What a test gets in place of the result of its process."""

    exc: Asked | None
    driver_stderr_output: Stderr


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that the kernel is not taken, rather than that it is wrong."""
    kinds = (
        emulator.UnsupportedKernelError,
        emulator.IRSyntaxError,
        emulator.LaunchError,
        NotImplementedError,
    )
    return isinstance(error, kinds) or type(error).__name__ in (
        "CompilationError", "CompileTimeAssertionFailure", "RuntimeError", "OutOfResources",
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """The part of an exception's text that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    if kind == "CompilationError" and lines:
        return f"Triton's compiler: {next(x for x in reversed(lines) if x.strip('^'))}"
    return lines[0] if lines else kind


@contextlib.contextmanager
def played(way: Setting) -> Generator[emulator.Run]:
    """Play launches inside the block, CUDA devices being the CPU."""
    with emulator.run(
        arch=way.arch, schedule=way.schedule, seed=way.seed, level=way.level, sms=way.sms,
        collect=True,
    ) as run, cuda_on_cpu(run.target):  # fmt: skip
        yield run


@contextlib.contextmanager
def limited(seconds: float) -> Generator[None]:
    """Raise `TooLong` in the block when the time is over."""

    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Plugin:
    """Runs each test in each way, and keeps a row for it."""

    ways: Sequence[Setting]
    seconds: float
    rows: list[Row] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    besides: list[emulator.Report] = field(default_factory=list)
    launches: int = 0
    way: Setting | None = None

    @pytest.fixture(name="device")
    def _device(self) -> str:
        return "cuda"

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Run a test's function; pytest sees it pass, and its row says what happened."""
        started = time.perf_counter()
        found: list[tuple[str, str]] = []
        for way in self.ways:
            self.way = way
            found.append(self._once(pyfuncitem))
            if found[-1][0] in ("found", *OTHER):
                break
        # A bug is found if one schedule shows it; a right kernel must be clean under all of them.
        outcome, detail = min(found, key=lambda one: ORDER.index(one[0]))
        seconds = time.perf_counter() - started
        detail = " ".join(detail.split())
        self.rows.append(Row(Path(pyfuncitem.path).name, pyfuncitem.name, outcome, detail, seconds))
        return True

    def _once(self, item: pytest.Function) -> tuple[str, str]:
        arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
        one = self._consan if Path(item.path).name == Path(CONSAN).name else self._tutorial
        try:
            with limited(self.seconds):
                return one(item.obj, item.module, arguments)
        except TooLong:
            return "too long", f"over {self.seconds:g} s"
        except Refused as error:
            return "refused", str(error)
        except pytest.skip.Exception as skip:
            return "skipped", str(skip)
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            return "refused" if is_refusal(error) else "failed", text

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped, or failed, before its function ran."""
        file, _, test = report.nodeid.partition("::")
        if report.skipped and isinstance(report.longrepr, tuple):
            self.rows.append(Row(Path(file).name, test, "skipped", report.longrepr[2]))
        elif report.failed:
            self.rows.append(Row(Path(file).name, test, "failed", str(report.longrepr)[-300:]))

    def _tutorial(self, test: Any, module: Any, arguments: dict[str, Any]) -> tuple[str, str]:
        assert self.way is not None
        with played(self.way) as run:
            try:
                test(**arguments)
            except Exception:
                if not run.errors:
                    raise
        self.launches += len(run.launches)
        if run.errors:
            return "reported", run.errors[0].text()
        return "clean", ""

    def _consan(self, test: Any, module: Any, arguments: dict[str, Any]) -> tuple[str, str]:
        self.asked = []
        wrong = ""
        module.run_in_process = self._run_in_process
        try:
            test(**arguments)
        except AssertionError as error:
            wrong = first_line(error) or "an assertion of the test"
        if not self.asked:
            raise Refused("it looks into ConSan itself")
        last = self.asked[-1]
        if not last.reports:
            return ("missed", wrong) if wrong else ("clean", "")
        text = last.reports[0].text()
        if last.seen:
            return ("other kind" if wrong else "found"), text
        reason = STRICTER.get(test.__name__)
        return ("stricter", reason) if reason else ("false report", text)

    def _run_in_process(self, function: Any, args: Any = (), kwargs: Any = None) -> Answer:
        assert self.way is not None
        with played(self.way) as run:
            try:
                function(*args, **(kwargs or {}))
            except Exception as error:
                # Some look into the PTX of a kernel after it has run; none is made here.
                if not run.errors and not (isinstance(error, KeyError) and "ptx" in str(error)):
                    if is_refusal(error):
                        raise Refused(f"{type(error).__name__}: {first_line(error)}") from error
                    raise
        self.launches += len(run.launches)
        if not run.launches:
            raise Refused("it launched nothing")
        errors = [report for report in run.errors if not is_besides(report)]
        self.besides += [report for report in run.errors if is_besides(report)]
        answer = Asked(errors)
        self.asked.append(answer)
        text = Stderr("".join(f"[{report.kind}]" for report in errors))
        return Answer(answer if errors else None, text)


def run_suite(checkout: Path, files: Sequence[Path], plugin: Plugin, expression: str) -> None:
    """Collect and run test files of a checkout; rows go to the plugin."""
    arguments = [
        *map(str, files), f"--rootdir={checkout}", f"--confcutdir={checkout}", "-c", os.devnull,
        "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist",
        "-p", "no:timeout", "--no-header", "-k", expression, "-o",
        "filterwarnings=ignore",
    ]  # fmt: skip
    # Tutorials open cuBLAS when they are imported, for the benchmarks at their end.
    cublas = mock.patch.object(libtriton.nvidia.cublas, "CublasLt", create=True)
    with played(plugin.ways[0]), cublas:
        pytest.main(arguments, plugins=[plugin])


def table(rows: Sequence[Row]) -> str:
    """Count outcomes by file, as a Markdown table."""
    outcomes = [o for o in (*GOOD, *BAD, *OTHER) if any(r.outcome == o for r in rows)]
    lines = [f"| file | {' | '.join(outcomes)} |", f"|---|{'---|' * len(outcomes)}"]
    for file in sorted({row.file for row in rows}):
        counts = collections.Counter(row.outcome for row in rows if row.file == file)
        lines.append(f"| {file} | {' | '.join(str(counts[o]) for o in outcomes)} |")
    return "\n".join(lines)


def reasons(rows: Sequence[Row]) -> str:
    """List why tests were not run to a verdict, or what was wrong, each reason once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.outcome not in GOOD:
            test = row.test if row.outcome in BAD else row.test.partition("[")[0]
            names = found.setdefault((row.file, row.outcome, row.detail[:300]), [])
            names.append(test)
    lines: list[str] = []
    for (file, outcome, detail), names in sorted(found.items()):
        tests = ", ".join(f"{n} x{c}" for n, c in sorted(collections.Counter(names).items()))
        lines.append(f"- {file}, {outcome}: {detail} ({tests})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites and print what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("checkout", type=Path, help="a checkout of Triton")
    add("--only", choices=("tutorials", "consan"), help="one of the two; default: both")
    add("-k", default="", metavar="EXPRESSION", help="as pytest's -k")
    add("--schedule", action="append", choices=("late", "eager", "random"))
    add("--level", action="append", choices=("ttgir", "machine"))
    add("--seeds", type=int, default=2, metavar="N", help="seeds of the random schedule; default 2")
    add("--seconds", type=float, default=120.0, metavar="S", help="for each test; default 120")
    add("--sms", type=int, default=4, help="multiprocessors of the emulated card; default 4")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    args = parser.parse_args(arguments)
    checkout = args.checkout.resolve()
    schedules = args.schedule or ["late", "random"]
    ways = settings(schedules, range(args.seeds), args.level or ["ttgir"], sms=args.sms)
    suites: dict[str, list[Path]] = {}
    if args.only != "consan":
        suites["Tutorials"] = sorted((checkout / TUTORIALS).glob("[0-9][0-9]-*.py"))
    if args.only != "tutorials":
        suites["ConSan"] = [checkout / CONSAN]
    missing = [str(f) for fs in suites.values() for f in fs or [TUTORIALS] if not Path(f).exists()]
    if missing or not all(suites.values()):
        parser.error(f"{checkout} has no {', '.join(missing) or TUTORIALS}.")
    sys.path.insert(0, str(checkout / TUTORIALS))  # tutorials import each other by name
    bad = 0
    texts: list[str] = []
    for name, files in suites.items():
        started = time.perf_counter()
        plugin = Plugin(ways, args.seconds)
        run_suite(checkout, files, plugin, args.k)
        bad += sum(row.outcome in BAD for row in plugin.rows)
        took = f"{plugin.launches} launches, {time.perf_counter() - started:.0f} s"
        texts.append(f"### {name}\n\n{table(plugin.rows)}\n\n{took}\n\n{reasons(plugin.rows)}\n")
    print("\n" + "\n".join(texts))
    if args.markdown:
        args.markdown.write_text("\n".join(texts))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
