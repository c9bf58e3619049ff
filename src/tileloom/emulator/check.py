"""Running a user's file under several schedules and levels."""

from __future__ import annotations

import ast
import contextlib
import difflib
import faulthandler
import importlib.util
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from tileloom.emulator.child import ChildDied, answers
from tileloom.emulator.costs import COSTS
from tileloom.emulator.devices import cuda_on_cpu
from tileloom.emulator.endings import RingUse, never_reused
from tileloom.emulator.findings import Failure, Finding, Result, Setting
from tileloom.emulator.prints import Prints, Turn, mark, to_stderr
from tileloom.emulator.replace import loading
from tileloom.emulator.report import NoTestError, Reporter, ReportError
from tileloom.emulator.session import Run, run
from tileloom.errors import OptionError


# ---- what a file consists of
def nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of some names that is most like a name."""
    return max(sorted(names), key=lambda n: difflib.SequenceMatcher(None, name, n).ratio())


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tileloom_checked_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"emulator: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _no_file(path: Path) -> str:
    """Say that a path is no file, and which one is like it."""
    if path.is_dir():
        return f"emulator: {path} is a folder. Try: one of its files."
    there = [p.stem for p in path.absolute().parent.glob("*.py")]  # the suffix makes all look near
    near = difflib.get_close_matches(path.name.removesuffix(".py"), there, n=1)
    hint = f" Try: {path.with_name(f'{near[0]}.py')}." if near else ""
    return f"emulator: there is no file {path}.{hint}"


class _File:
    """A Python file, and how it is run: its tests, its `CASES` or ``main()``, or as a script."""

    def __init__(self, path: Path, case: str | None, copy: Path | None) -> None:
        if not path.is_file():
            raise OptionError(_no_file(path))
        self.case = case
        self.folder = str(path.resolve().parent)
        self.path = copy or path
        name = self.path.name
        text = self.path.read_text(encoding="utf-8", errors="replace")
        try:
            ast.parse(self.path.read_bytes(), filename=name)
        except (SyntaxError, ValueError) as error:  # or bytes that are no text
            raise OptionError(f"emulator: {path} is not Python: {error}.") from None
        self.is_pytest = name.startswith("test_") or name.endswith("_test.py")
        is_module = re.search(r"^(def main\(|CASES\b)", text, re.MULTILINE) is not None
        self.is_module = is_module and not self.is_pytest
        self._module: ModuleType | None = None

    def load(self) -> None:
        """Import the file if it is a module, once for all runs."""
        if self.is_module and self._module is None:
            self._module = _import(self.path)

    def actions(self, session: Run, take: Callable[[str], None]) -> Mapping[str, Callable[[], Any]]:
        """Return what to run, by case; "" is the whole file.

        Args:
            session: The run it is run in.
            take: Called with the name of a test when it has ended.
        """
        if self.is_pytest:
            from tileloom.emulator.pytest_check import run_pytest

            return {"": lambda: run_pytest(self.path, self.case, session, take)}
        cases: Any = getattr(self._module, "CASES", None)
        if not cases and self.case is not None:
            raise OptionError(
                f"emulator: {self.path} has no CASES, so no case {self.case!r}. Try: no --case."
            )
        if self._module is None:
            return {"": lambda: runpy.run_path(str(self.path), run_name="__main__")}
        if cases is None:
            return {"": self._module.main}
        if not isinstance(cases, Mapping):
            raise OptionError(
                f"emulator: CASES of {self.path} is a {type(cases).__name__}; it must map names to "
                "functions without arguments."
            )
        if self.case is None:
            return cases
        if self.case not in cases:
            raise OptionError(
                f"emulator: {self.path} has no case {self.case!r}; it has {', '.join(cases)}. "
                f"Try: --case {shlex.quote(nearest(self.case, cases))}."
            )
        return {self.case: cases[self.case]}


# ---- running it
@dataclass(frozen=True)
class Playing:
    """What a check is about to do; kept in case its process dies."""

    setting: Setting
    case: str = ""
    kernel: str = ""


def check_file(
    path: Path, ways: Sequence[Setting], *, kernel: str | None = None, case: str | None = None,
    timeline: Path | None = None, max_steps: int = 20_000_000, first_only: bool = False,
    copies: Mapping[Path, Path] | None = None, only: Collection[str] = (),
    say: Callable[[Any], None] | None = None,
) -> Result:  # fmt: skip
    """Run a file once for each setting, in this process, and gather the reports.

    Args:
        path: A script, a pytest file, or a module with a ``main()`` or with ``CASES``, a mapping
            of names to functions.
        ways: How to run it.
        kernel: Keep only reports about this kernel.
        case: Run only this case, or this test of a pytest file.
        timeline: Write the first run's timeline here.
        max_steps: See `emulator.run`.
        first_only: Stop at the first error, or after the first case with a failure.
        copies: Files to load in place of others; each must be imported by the file, or be it.
        only: Run only these of `CASES`; default: all.
        say: Told what is about to run (`Playing`), where a run begins and ends (`Turn`), and the
            `Result` so far after each run.

    Returns:
        What was found.

    Raises:
        OptionError: If there is no such file or case, no folder for the timeline, no kernel was
            launched at all, or none of that name, or the file did not import one of `copies`.
    """
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise OptionError(
            f"emulator: there is no folder {timeline.parent} to write the timeline to. "
            "Try: make it first."
        )
    copies = {original.resolve(): copy for original, copy in (copies or {}).items()}
    file = _File(path, case, copies.pop(path.resolve(), None))
    check = _Check(file, kernel, max_steps, first_only, say or (lambda _: None), only)
    with loading(copies) as used:
        for number, way in enumerate(ways):
            keep = timeline is not None and number == 0
            session = check.run_once(way, keep)
            if keep and timeline is not None:
                session.timeline(timeline)
            if check.is_done:
                return check.result
            if kernel is not None and kernel not in check.result.kernels:
                break  # other ways launch no others
    result = check.result
    if not first_only:
        check.look_at_rings()
    for original in copies:
        if original not in used and not result.failures:
            raise OptionError(
                f"emulator: {original} is not a module that the checked file imports. "
                "Try: name the file that holds the kernels it launches."
            )
    if not result.launches and not result.failures:
        raise OptionError(
            f"emulator: {path} launched no kernel. Try: a main() or CASES that do, or a test."
        )
    if kernel is not None and kernel not in result.kernels and not result.failures:
        raise OptionError(
            f"emulator: {path} launched no kernel '{kernel}'; it launched "
            f"{', '.join(sorted(result.kernels))}. Try: {path}:{nearest(kernel, result.kernels)}."
        )
    return result


class _Check:
    """Runs a file under one setting after another."""

    def __init__(
        self, file: _File, kernel: str | None, max_steps: int, first_only: bool,
        say: Callable[[Any], None], only: Collection[str],
    ) -> None:  # fmt: skip
        self.only = only
        self.file = file
        self.kernel = kernel
        self.max_steps = max_steps
        self.first_only = first_only
        self.say = say
        self.result = Result()
        self.rings: dict[RingUse, tuple[Setting, str]] = {}

    @property
    def is_done(self) -> bool:
        """Whether enough was seen."""
        return self.first_only and bool(self.result.errors or self.result.failures)

    def run_once(self, way: Setting, keep_timeline: bool) -> Run:
        """Run the file once; return the session."""
        is_enough = self.first_only and self.kernel is None  # else others' errors would end it
        failures = len(self.result.failures)
        self.say(Turn())
        with run(
            arch=way.arch, schedule=way.schedule, seed=way.seed, level=way.level,
            collect=not is_enough, timeline=keep_timeline, max_steps=self.max_steps, sms=way.sms,
            costs=COSTS if way.registers else ("conflicts",),
        ) as session, cuda_on_cpu(session.target), _script_folder(self.file.folder):  # fmt: skip
            # A test may say that its run has no reports; nobody asked there for what is slow.
            session.cost_reporter = Reporter(True, frozenset(), way.schedule, way.seed, way.level)
            self._play(session, way)
        self.say(Turn(len(self.result.failures) > failures))
        self.result.launches += len(session.launches)
        self.result.kernels |= {launch.kernel for launch in session.launches}
        self.say(self.result)
        return session

    def look_at_rings(self) -> None:
        """Add what no run tested: rings of mbarriers that were never used twice."""
        rings = [ring for ring in self.rings if self.kernel in (None, ring.kernel)]
        found = never_reused(rings).items()
        self.result.findings += [Finding(report, *self.rings[ring]) for ring, report in found]
        self.say(self.result)

    def _play(self, session: Run, way: Setting) -> None:
        case = ""

        done = 0  # launches

        def take(name: str) -> None:
            nonlocal case, done
            case = name  # of a pytest file the test that ended last
            self.result.take(session, way, name, self.kernel)
            places = self.result.places.get(name, frozenset())
            new = session.launches[done:]
            self.result.places[name] = places.union(*(launch.places for launch in new))
            for ring in (ring for launch in new for ring in launch.rings):
                self.rings.setdefault(ring, (way, name))
            done = len(session.launches)

        def guarded(action: Callable[[], Any]) -> bool:
            text, kind = _failure_of(action)
            if text:
                self.result.failures.append(Failure(way, case, text, kind))
            return not text

        self.say(Playing(way))
        with _launches_told(lambda kernel: self.say(Playing(way, case, kernel))):
            if not guarded(self.file.load):
                return
            self.say(Turn())
            for name, action in self.file.actions(session, take).items():
                if self.only and name and name not in self.only:
                    continue
                case = name
                guarded(action)
                take(case)
                if self.is_done:
                    return


_OWN_FRAMES = (f"{Path(__file__).parent}/", "<frozen ", runpy.__file__ or "<frozen ")
"""Where a file's own frames have not begun yet."""


def _failure_of(action: Callable[[], Any]) -> tuple[str, str]:
    """Run something; return what went wrong that is no report, and its kind; or nothing."""
    try:
        action()
    except ReportError:
        pass
    except NoTestError:
        raise
    except SystemExit as stop:
        if stop.code not in (None, 0):
            return f"the script ends with status {stop.code}", "raised"
    except Exception as error:
        kind = "wrong" if isinstance(error, AssertionError) else "raised"
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename.startswith(_OWN_FRAMES):
            place = place.tb_next
        text = traceback.format_exception(type(error), error, place, limit=-4)
        return "".join(text), kind
    return "", ""


@contextlib.contextmanager
def _script_folder(folder: str) -> Generator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


@contextlib.contextmanager
def _launches_told(tell: Callable[[str], None]) -> Generator[None]:
    """Tell of each launch before its kernel is compiled: the compiler may abort the process."""
    launch: Any = JITFunction.run

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", told):
        yield


# ---- in a process of its own
def _serve(
    say: Callable[[Any], None], path: Path, ways: Sequence[Setting], nonce: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    faulthandler.enable()

    def told(what: Any) -> None:
        if isinstance(what, Turn):
            mark(what, nonce)
        else:
            say(what)

    check_file(path, ways, say=told, **options)


def check_in_child(
    path: Path, ways: Sequence[Setting], *, timeout_s: float = 600.0,
    show: Callable[[str], None] | None = to_stderr, **options: Any,
) -> Result:  # fmt: skip
    """Do the same as `check_file` in a process of its own, which may abort, crash or hang.

    The check ends there: `Result.failures` then tells of the death, with the kernel and setting.

    Args:
        path: The file.
        ways: How to run it.
        timeout_s: Seconds that one launch may take, its compilation included.
        show: Shows what the file prints in its first run, and of the other runs what differs; None
            shows nothing.
        **options: Those of `check_file`.

    Returns:
        What was found.

    Raises:
        OptionError: See `check_file`.
    """
    result = Result()
    playing = Playing(ways[0])
    try:
        with Prints(ways, show) as prints:
            said = (path, ways, prints.nonce, options)
            for answer in answers(_serve, *said, timeout_s=timeout_s, prints=prints.pipe):
                if isinstance(answer, Playing):
                    playing = answer
                else:
                    result = answer
    except ChildDied as death:
        kernel = f"kernel '{playing.kernel}'" if playing.kernel else "no kernel yet"
        case = f", case {playing.case}" if playing.case else ""
        text = (
            f"emulator: the process that ran {kernel} of {path} {death}, under "
            f"{playing.setting.text()}{case}. Nothing after it was run."
        )
        result.failures.append(Failure(playing.setting, playing.case, text, "died"))
    return result
