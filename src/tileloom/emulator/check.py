"""Running a user's file under several schedules and levels, and gathering what is found."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tileloom.emulator.devices import cuda_on_cpu
from tileloom.emulator.report import LaunchError, Report, ReportError
from tileloom.emulator.session import Run, run


@dataclass(frozen=True)
class Setting:
    """One way to run the file."""

    schedule: str
    seed: int
    level: str
    arch: str = "sm_90a"
    sms: int = 4

    def command(self, target: str) -> str:
        """Return the command that repeats exactly this run."""
        seed = f" --seed {self.seed}" if self.schedule == "random" else ""
        return (
            f"tileloom check {target} --schedule {self.schedule}{seed} --level {self.level}"
            f" --arch {self.arch} --sms {self.sms}"
        )


@dataclass
class Finding:
    """A report, and the setting under which it was first seen."""

    report: Report
    setting: Setting


@dataclass
class Result:
    """What came of checking a file.

    Attributes:
        findings: Reports, each once.
        failures: For each run that raised something else, the setting and the traceback.
        launches: Launches over all runs.
        kernels: Names of the kernels that ran.
        suppressed: Reports that a comment suppresses, with its reason.
    """

    findings: list[Finding] = field(default_factory=list)
    failures: list[tuple[Setting, str]] = field(default_factory=list)
    launches: int = 0
    kernels: set[str] = field(default_factory=set)
    suppressed: list[tuple[Report, str]] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)

    @property
    def errors(self) -> list[Finding]:
        """Findings with severity ``error``."""
        return [f for f in self.findings if f.report.severity == "error"]

    def take(self, session: Run, setting: Setting, kernel: str | None) -> None:
        """Add what a run found."""
        self.launches += len(session.launches)
        self.kernels |= {launch.kernel for launch in session.launches}
        for report in session.reports:
            other = report.other.loc.line if report.other else 0
            words = re.sub(r"\d+", "#", report.message)
            key = (report.kind, report.kernel, report.line, other, words)
            if key in self._seen or (kernel and report.kernel != kernel):
                continue
            self._seen.add(key)
            self.findings.append(Finding(report, setting))
        known = {(r.kind, r.line) for r, _ in self.suppressed}
        self.suppressed += [s for s in session.suppressed if (s[0].kind, s[0].line) not in known]


def settings(
    schedules: Sequence[str], seeds: Sequence[int], levels: Sequence[str], arch: str = "sm_90a",
    sms: int = 4,
) -> list[Setting]:  # fmt: skip
    """Return all combinations; only the random schedule has seeds.

    Args:
        schedules: Names of schedules.
        seeds: Seeds of the random one.
        levels: Names of levels.
        arch: The architecture.
        sms: Multiprocessors of the emulated card: few, so that persistent programs take several
            tiles each.

    Returns:
        The settings, level by level.
    """
    return [
        Setting(schedule, seed, level, arch, sms)
        for level in levels
        for schedule in schedules
        for seed in (seeds if schedule == "random" else (0,))
    ]


_count = 0


def _import(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that every run starts afresh."""
    global _count
    _count += 1
    name = f"tileloom_checked_{_count}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LaunchError(f"emulator: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_pytest(path: Path) -> bool:
    return path.name.startswith("test_") or path.name.endswith("_test.py")


def _run_pytest(path: Path) -> None:
    import pytest

    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        status = pytest.main([str(path), "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"])
    if status not in (0, 1):
        raise LaunchError(f"emulator: pytest could not run {path}:\n{captured.getvalue()[-2000:]}")
    if status == 1:
        raise AssertionError(captured.getvalue()[-4000:])


def runner(path: Path) -> Callable[[], None]:
    """Return what runs a file: its ``main()``, its tests, or the file as a script.

    Args:
        path: A Python file.

    Returns:
        A function without arguments.

    Raises:
        LaunchError: If there is no such file.
    """
    if not path.is_file():
        raise LaunchError(f"emulator: there is no file {path}.")
    if _is_pytest(path):
        return lambda: _run_pytest(path)

    def go() -> None:
        module = _import(path)
        main = getattr(module, "main", None)
        if callable(main):
            main()

    if "def main(" in path.read_text():
        return go

    def script() -> None:
        import runpy

        runpy.run_path(str(path), run_name="__main__")

    return script


@contextlib.contextmanager
def _script_folder(path: Path) -> Generator[None]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def check_file(
    path: Path, ways: Sequence[Setting], *, kernel: str | None = None, timeline: Path | None = None,
    max_steps: int = 20_000_000,
) -> Result:  # fmt: skip
    """Run a file once for each setting and gather the reports.

    Args:
        path: A script, a pytest file, or a module with a ``main()``.
        ways: How to run it.
        kernel: Keep only reports about this kernel.
        timeline: Write the first run's timeline here.
        max_steps: See `emulator.run`.

    Returns:
        What was found.

    Raises:
        LaunchError: If there is no such file, or no kernel was launched at all.
    """
    go = runner(path)
    result = Result()
    for number, way in enumerate(ways):
        keep = timeline is not None and number == 0
        with _script_folder(path):
            session = _run_once(go, way, result, keep, max_steps)
        result.take(session, way, kernel)
        if keep and timeline is not None:
            session.timeline(timeline)
    if not result.launches and not result.failures:
        raise LaunchError(
            f"emulator: {path} launched no kernel. Try: give it a main() that does, or a test."
        )
    return result


def _run_once(
    go: Callable[[], None], way: Setting, result: Result, keep: bool, max_steps: int
) -> Run:
    with run(
        arch=way.arch, schedule=way.schedule, seed=way.seed, level=way.level, collect=True,
        timeline=keep, max_steps=max_steps, sms=way.sms,
    ) as session, cuda_on_cpu(session.target):  # fmt: skip
        try:
            go()
        except ReportError:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                result.failures.append((way, f"the script ends with status {stop.code}"))
        except Exception:
            result.failures.append((way, traceback.format_exc(limit=-4)))
    return session
