"""Do a kernel's tests have teeth? Run a file's mutants and say who noticed each, or that nobody."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tileloom.emulator.check import Finding, Result, Setting, check_in_child, nearest
from tileloom.emulator.mutate import Helpers, Mutant, functions_of, kernels_of, mutants
from tileloom.emulator.report import LaunchError
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

    def mutants(self) -> Mapping[Path, list[Mutant]]:
        """Return the mutants of each file; helpers count in all of them.

        Raises:
            OptionError: If there is no such file or kernel, or it is not Python.
        """
        texts = {path: _source(path) for path in self.kernels}
        helpers = Helpers.of(texts.values())
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

    def run_as_it_is(self) -> None:
        """Run everything undamaged, so that what is said anyway counts as nobody's notice.

        Raises:
            LaunchError: If there is an error without any damage.
        """
        with tempfile.TemporaryDirectory(prefix="tileloom-mutants-") as folder:
            copies = {p: _copy(p, p.read_text(), Path(folder)) for p in self.kernels}
            result = self._check(copies, first_only=False)
        if result.errors or result.failures:
            first = result.errors[0].report.text() if result.errors else result.failures[0].text
            raise LaunchError(
                f"emulator: {self.path} is not correct as it is. Try: tileloom check without "
                f"--mutate.\n{first}"
            )
        self._usual = {_words(finding) for finding in result.findings}

    def verdict(self, path: Path, mutant: Mutant) -> Verdict:
        """Run one mutant until somebody notices it.

        Args:
            path: The file that the mutant was made from.
            mutant: One of its mutants.

        Returns:
            What became of it.
        """
        with tempfile.TemporaryDirectory(prefix="tileloom-mutants-") as folder:
            copy = _copy(path, mutant.text, Path(folder))
            result = self._check({path: copy}, first_only=True)
        new = [f for f in result.findings if _words(f) not in self._usual]
        found = next((f for f in new if f.report.severity == "error"), None)
        failure = result.failures[0] if result.failures else None
        if found is None and failure is None and new:
            found = new[0]
        if found is not None:
            return Verdict(path, mutant, "reported", _short(found), found.setting, found.case)
        if failure is None:
            return Verdict(path, mutant, "unnoticed")
        outcome = "wrong result" if failure.kind == "wrong" else "does not run"
        last = failure.text.strip().splitlines()[-1][:120]
        return Verdict(path, mutant, outcome, last, failure.setting, failure.case)

    def _check(self, copies: Mapping[Path, Path], *, first_only: bool) -> Result:
        return check_in_child(
            self.path, self.ways, timeout_s=self.timeout_s, case=self.case, copies=copies,
            first_only=first_only, max_steps=_MAX_STEPS, kernel=self.kernel,
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
        self.run_as_it_is()
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
    """What a finding says, without the lines that a damage may shift."""
    report = finding.report
    return report.kind, report.severity, report.kernel, re.sub(r"\d+", "#", report.message)


def _short(finding: Finding) -> str:
    report = finding.report
    mark = "" if report.severity == "error" else f" ({report.severity})"
    place = f"{Path(report.at.loc.file).name}:{report.line}" if report.at else ""
    return f"{report.kind}{mark} at {place}"
