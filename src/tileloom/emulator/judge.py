"""Do a kernel's tests have teeth? Run a file's mutants and say who noticed each, or that nobody."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tileloom.emulator.check import check_in_child, nearest
from tileloom.emulator.findings import Finding, Result, Setting
from tileloom.emulator.mutate import Mutant, functions_of, kernels_of, mutants
from tileloom.emulator.prints import to_stderr
from tileloom.emulator.report import LaunchError
from tileloom.emulator.synchronising import Helpers, with_imports
from tileloom.errors import OptionError

_MAX_STEPS = 2_000_000  # a mutant that goes on longer is one that does not end


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        path: The file that was damaged.
        mutant: The damage.
        outcome: ``reported`` by the emulator, ``wrong result`` if an assertion of the file failed,
            ``does not run`` for any other exception or a crash, or ``unnoticed``.
        detail: The report or complaint, in short.
        setting: How the run that noticed was made.
        case: The case that noticed.
    """

    path: Path
    mutant: Mutant
    outcome: str
    detail: str = ""
    setting: Setting | None = None
    case: str = ""

    @property
    def noticed(self) -> bool:
        """Whether somebody noticed, or a comment says that nobody need."""
        return self.outcome != "unnoticed" or self.mutant.harmless is not None


class Judge:
    """Runs mutants of some files, each in a process of its own.

    Args:
        path: A file that `check_file` can run.
        ways: Settings that each mutant is tried under, in turn.
        kernels: The files to damage: `path` itself, or modules that it imports.
        timeout_s: Seconds that one launch may take.
        case: Run only this case.
        kernel: Damage only this kernel and the functions it is made of, and heed only what is
            reported about it.
    """

    def __init__(
        self, path: Path, ways: Sequence[Setting], kernels: Sequence[Path] = (), *,
        timeout_s: float = 600.0, case: str | None = None, kernel: str | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.ways = ways
        self.kernels = tuple(kernels) or (path,)
        self.timeout_s = timeout_s
        self.case = case
        self.kernel = kernel
        self._usual: set[tuple[str, ...]] = set()
        self._played = 0  # ways whose findings are usual
        self._places: dict[str, frozenset[tuple[str, int]]] = {}
        self._one_at_a_time = Lock()

    def mutants(self) -> Mapping[Path, list[Mutant]]:
        """Return the mutants of each file; helpers that it imports count where they are called.

        Raises:
            OptionError: If there is no such file or kernel, or it is not Python.
        """
        texts = {path: _source(path) for path in self.kernels}
        helpers = Helpers.of(with_imports(self.kernels).values())
        found = {path: mutants(text, helpers) for path, text in texts.items()}
        if self.kernel is None:
            return found
        wanted = functions_of(self.kernel, texts.values())
        if not wanted:
            known = kernels_of(texts.values())
            hint = f" Try: {self.path}:{nearest(self.kernel, known)}." if known else ""
            raise OptionError(
                f"emulator: {', '.join(path.name for path in texts)} has no jitted function "
                f"'{self.kernel}' to damage.{hint}"
            )
        return {path: [m for m in some if m.function in wanted] for path, some in found.items()}

    def _run_as_it_is(self, count: int) -> None:
        """Run everything undamaged as the first ways say, so that nobody notices what is usual.

        Raises:
            LaunchError: If there is an error without any damage.
        """
        with self._one_at_a_time:
            ways = self.ways[self._played : count]
            if not ways:
                return
            with tempfile.TemporaryDirectory(prefix="tileloom-mutants-") as folder:
                copies = {p: _copy(p, p.read_text(), Path(folder)) for p in self.kernels}
                result = self._check(copies, ways, first_only=False)
            if result.errors or result.failures:
                first = result.errors[0].report.text() if result.errors else result.failures[0].text
                raise LaunchError(
                    f"emulator: {self.path} is not correct as it is. Try: tileloom check without "
                    f"--mutate.\n{first}"
                )
            self._usual |= {_words(finding) for finding in result.findings}
            self._places = self._places or result.places
            self._played = count

    def verdict(self, path: Path, mutant: Mutant) -> Verdict:
        """Run one mutant until somebody notices it.

        Args:
            path: The file that the mutant was made from.
            mutant: One of its mutants.

        Returns:
            What became of it.

        Raises:
            LaunchError: If the file is not correct as it is.
        """
        with tempfile.TemporaryDirectory(prefix="tileloom-mutants-") as folder:
            copy = _copy(path, mutant.text, Path(folder))
            only = self._cases_of(path, mutant)
            result = self._check({path: copy}, self.ways, first_only=True, only=only)
        found = result.errors[0] if result.errors else None
        failure = result.failures[0] if result.failures else None
        first = found or failure
        if first is not None:
            self._run_as_it_is(self.ways.index(first.setting) + 1)
        else:
            found = self._unusual(result)
        if found is not None:
            return Verdict(path, mutant, "reported", _short(found), found.setting, found.case)
        if failure is None:
            return Verdict(path, mutant, "unnoticed")
        outcome = "wrong result" if failure.kind == "wrong" else "does not run"
        last = failure.text.strip().splitlines()[-1][:120]
        return Verdict(path, mutant, outcome, last, failure.setting, failure.case)

    def _unusual(self, result: Result) -> Finding | None:
        """Return the first finding that is not said anyway."""
        for finding in result.findings:
            if _words(finding) not in self._usual:
                self._run_as_it_is(self.ways.index(finding.setting) + 1)
            if _words(finding) not in self._usual:
                return finding
        return None

    def _cases_of(self, path: Path, mutant: Mutant) -> frozenset[str]:
        """Return the cases whose kernels have the damaged lines; in the others nothing changes."""
        lines = {(path.name, line) for line in range(mutant.lines[0], mutant.lines[1] + 1)}
        return frozenset(case for case, places in self._places.items() if places & lines)

    def _check(
        self, copies: Mapping[Path, Path], ways: Sequence[Setting], *, first_only: bool,
        only: Collection[str] = (),
    ) -> Result:  # fmt: skip
        is_first = not first_only and not self._played  # what it prints is seen once
        return check_in_child(
            self.path, ways, timeout_s=self.timeout_s, case=self.case, copies=copies,
            first_only=first_only, only=only, max_steps=_MAX_STEPS, kernel=self.kernel,
            show=to_stderr if is_first else None,
        )  # fmt: skip

    def verdicts(
        self, mutants: Sequence[tuple[Path, Mutant]] | None = None, *, jobs: int = 1
    ) -> Generator[Verdict]:
        """Judge mutants.

        Args:
            mutants: Which, each with its file; default: all.
            jobs: How many at a time.

        Yields:
            A verdict for each mutant, in order.

        Raises:
            LaunchError: If the file is not correct as it is.
        """
        if mutants is None:
            mutants = [(path, m) for path, found in self.mutants().items() for m in found]
        if not mutants:
            return
        self._run_as_it_is(1)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(lambda item: self.verdict(*item), mutants)


def _source(path: Path) -> str:
    """Read a file to damage, or say what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        ast.parse(text, filename=path.name)
    except OSError:
        raise OptionError(f"emulator: there is no file {path}.") from None
    except (SyntaxError, ValueError) as error:  # or bytes that are no text
        raise OptionError(f"emulator: {path} is not Python: {error}.") from None
    return text


def _copy(path: Path, text: str, folder: Path) -> Path:
    """Write a file's damaged text under the file's own name, which reports quote."""
    copy = folder / path.name
    copy.write_text(text)
    return copy


def _words(finding: Finding) -> tuple[str, ...]:
    """What a finding says, without numbers that change from run to run, but with barriers' own."""
    report = finding.report
    message = re.sub(r"(?<!named barrier )\b\d+", "#", report.message)
    return report.kind, report.severity, report.kernel, message


def _short(finding: Finding) -> str:
    report = finding.report
    mark = "" if report.severity == "error" else f" ({report.severity})"
    place = f"{Path(report.at.loc.file).name}:{report.line}" if report.at else ""
    return f"{report.kind}{mark} at {place}"
