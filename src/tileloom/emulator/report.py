"""What the emulator found: reports, how they read, and the exceptions that carry them."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tileloom import errors
from tileloom.emulator.ir import UNKNOWN, Loc
from tileloom.emulator.vocabulary import in_words_of
from tileloom.errors import TileloomError


class EmulatorError(TileloomError, RuntimeError):
    """The base of what the emulator raises."""


class IRSyntaxError(EmulatorError):
    """The IR's text has a form that the reader does not know."""

    def __init__(self, message: str, loc: Loc = UNKNOWN) -> None:
        super().__init__(f"emulator: {message}" + (f"\n    at   {quote(loc)}" if loc.line else ""))


class UnsupportedKernelError(EmulatorError, NotImplementedError):
    """A kernel does something that the emulator cannot play: an operation, PTX, a layout."""

    def __init__(self, message: str, loc: Loc = UNKNOWN) -> None:
        super().__init__(f"emulator: {message}" + (f"\n    at   {quote(loc)}" if loc.line else ""))


class LaunchError(EmulatorError, errors.LaunchError, ValueError):
    """The arguments of a launch are ones that the hardware or emulator refuses."""


class NoTestError(errors.OptionError):
    """A pytest file has no test of the name asked for, or none at all."""


class ReportError(EmulatorError):
    """A report with severity ``error``; `report` is the structured form."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report


class RaceError(ReportError):
    """Two accesses to the same memory are not ordered."""


class ProxyError(RaceError):
    """A generic access is ordered before an asynchronous one, but no proxy fence stands between."""


class DeadlockError(ReportError):
    """Every partition waits and nothing is in flight."""


class BarrierError(ReportError):
    """An mbarrier or a named barrier is misused."""


class UninitializedError(ReportError):
    """Shared memory is read that was never written."""


class OutOfBoundsError(ReportError):
    """An address lies outside the tensor or the shared buffer."""


class PendingError(ReportError):
    """The result of an asynchronous wgmma is used before it is waited for."""


class ExitError(ReportError):
    """The program ends with asynchronous work of its own in flight."""


class AssertError(ReportError):
    """A ``device_assert`` of the kernel fails."""


class StepLimitError(ReportError):
    """The kernel did not end within the set number of steps."""


_EXCEPTIONS: dict[str, type[ReportError]] = {
    "race": RaceError,
    "proxy": ProxyError,
    "deadlock": DeadlockError,
    "barrier": BarrierError,
    "uninitialized": UninitializedError,
    "out-of-bounds": OutOfBoundsError,
    "pending": PendingError,
    "exit": ExitError,
    "assert": AssertError,
    "steps": StepLimitError,
    "cost": ReportError,  # never more than a warning
}
KINDS = tuple(_EXCEPTIONS)


def source_line(loc: Loc) -> str:
    """Return the text of a source line, stripped; empty if the file cannot be read."""
    return linecache.getline(loc.file, loc.line).strip()


def quote(loc: Loc) -> str:
    """Return ``file.py:12  | the line`` for a place."""
    return f"{os.path.basename(loc.file)}:{loc.line}  | {source_line(loc)}"


def callers_of(loc: Loc) -> list[str]:
    """Return the quoted call sites around a place, the innermost first."""
    return [quote(c) for c in loc.chain()[1:] if not source_line(c).startswith("def ")]


def quote_with_callers(loc: Loc) -> str:
    """Return a quoted place on one line, with the calls that led there."""
    return "".join([quote(loc), *(f"  < {caller}" for caller in callers_of(loc))])


def annotation(level: str, title: str, text: str, path: str = "", line: int = 0) -> str:
    """Return a GitHub workflow command.

    Args:
        level: ``error``, ``warning`` or ``notice``.
        title: What stands above the text.
        text: Any text.
        path: The file that is annotated; "" for none.
        line: The line; 0 for none.
    """

    def escaped(value: str, more: str = "") -> str:
        for char in "%\r\n" + more:
            value = value.replace(char, f"%{ord(char):02X}")
        return value

    where = {"file": path, "line": str(line or ""), "title": title}
    said = ",".join(f"{key}={escaped(value, ':,')}" for key, value in where.items() if value)
    return f"::{level} {said}::{escaped(text)}"


@dataclass(frozen=True)
class Access:
    """One side of a conflict: where it stands and who did it; `program` is empty for no one.

    `ahead` is the name of a kernel that was launched before.
    """

    loc: Loc
    what: str
    partition: str
    program: tuple[int, ...]
    ahead: str = ""

    def text(self) -> str:
        """Return the access as the lines of a report show it."""
        who = f"({self.what})"
        if self.program:
            behind = f" of the kernel '{self.ahead}' launched before" if self.ahead else ""
            who = f"({self.what} by partition '{self.partition}', program {self.program}{behind})"
        lines = [f"{quote(self.loc)}   {who}"]
        lines += [f"         called from {caller}" for caller in callers_of(self.loc)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """One finding.

    Attributes:
        kind: One of `KINDS`.
        severity: ``error`` raises; ``warning`` and ``info`` are only listed.
        message: One sentence.
        at: The access or statement that met the fault.
        other: The earlier access it conflicts with, if there is one.
        hint: What would mend it.
        details: Further lines, for example where each partition waits.
        kernel: The kernel's name.
        schedule: The schedule it was found under.
        seed: The seed of that schedule.
    """

    kind: str
    severity: str
    message: str
    at: Access | None = None
    other: Access | None = None
    hint: str = ""
    details: tuple[str, ...] = ()
    kernel: str = ""
    schedule: str = ""
    seed: int = 0
    level: str = ""

    @property
    def line(self) -> int:
        """The source line of the statement that met the fault; 0 if there is none."""
        return self.at.loc.line if self.at else 0

    def text(self) -> str:
        """Return the report as it is printed."""
        mark = "" if self.severity == "error" else f" {self.severity}:"
        lines = [f"[{self.kind}]{mark} {self.message}"]
        if self.at:
            lines.append(f"    at   {self.at.text()}")
        if self.other:
            lines.append(f"    vs   {self.other.text()}")
        lines += [f"    {line}" for line in self.details]
        if self.hint:
            lines.append(f"    hint {self.hint}")
        if self.schedule:
            where = f"kernel {self.kernel}, schedule={self.schedule!r}, seed={self.seed}"
            lines.append(f"    seen {where}, level={self.level!r}")
        return "\n".join(lines)

    __str__ = text

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def github(self, more: str = "") -> str:
        """Return a GitHub workflow command that annotates the line, with `more` below the text."""
        level = {"error": "error", "warning": "warning"}.get(self.severity, "notice")
        loc = self.at.loc if self.at else Loc()
        text = "\n    ".join(filter(None, (self.text(), more)))
        return annotation(level, f"tileloom {self.kind}", text, loc.file, loc.line)

    def exception(self) -> ReportError:
        """Return the exception that carries this report."""
        return _EXCEPTIONS[self.kind](self)


_ALLOW = re.compile(r"#\s*tileloom:\s*allow\((\w[\w-]*)\)\s*(.*)$")


def suppression(loc: Loc, kind: str) -> str | None:
    """Return the reason why reports of this kind are suppressed at a place, or None.

    A line is marked by a comment ``# tileloom: allow(race) the reason``; without a reason the mark
    does not count.
    """
    for place in loc.chain():
        match = _ALLOW.search(linecache.getline(place.file, place.line))
        if match and match.group(1) == kind and match.group(2).strip():
            return match.group(2).strip()
    return None


def alike(message: str, hint: str) -> tuple[str, frozenset[str]]:
    """Return what two reports of the same lines and the same fault share: words, no numbers."""
    words, remedies = (re.sub(r"\d+", "#", text) for text in (message, hint))
    return words, frozenset(remedies.split("; "))


@dataclass
class Reporter:
    """Collects reports of one run; the first error raises unless `collect` is set."""

    collect: bool = False
    ignore: frozenset[str] = frozenset()
    schedule: str = ""
    seed: int = 0
    level: str = ""
    kernel: str = ""
    reports: list[Report] = field(default_factory=list)
    suppressed: list[tuple[Report, str]] = field(default_factory=list)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def forget(self) -> None:
        """Begin anew, for another case of the same run: it may report the same faults."""
        self.reports.clear()
        self.suppressed.clear()
        self._seen.clear()

    def add(
        self,
        kind: str,
        message: str,
        at: Access | None = None,
        *,
        other: Access | None = None,
        hint: str = "",
        details: tuple[str, ...] = (),
        severity: str = "error",
    ) -> None:
        """Record a finding, once for each pair of lines and hint; raise it if it is an error.

        Raises:
            ReportError: For errors, unless the run collects.
        """
        if kind in self.ignore:
            return
        lines = (at.loc.line if at else 0, other.loc.line if other else 0)
        key = (kind, *lines, at.loc.file if at else "", *alike(message, hint), self.kernel)
        if key in self._seen:
            return
        self._seen.add(key)
        if at is not None:
            message, hint = in_words_of(at.loc, message), in_words_of(at.loc, hint)
            at = replace(at, what=in_words_of(at.loc, at.what))
        if other is not None:
            other = replace(other, what=in_words_of(other.loc, other.what))
        report = Report(
            kind, severity, message, at, other, hint, details,
            self.kernel, self.schedule, self.seed, self.level,
        )  # fmt: skip
        reason = suppression(at.loc, kind) if at else None
        if reason is not None:
            self.suppressed.append((report, reason))
            return
        self.reports.append(report)
        if severity == "error" and not self.collect:
            raise report.exception()
