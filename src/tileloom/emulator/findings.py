"""What a check finds: reports with the setting and case of each, and runs that ended otherwise."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from tileloom.emulator.report import Report, alike
from tileloom.emulator.session import Run


@dataclass(frozen=True)
class Setting:
    """One way to run the file; with `registers` the assembler is asked, too."""

    schedule: str
    seed: int
    level: str
    arch: str = "sm_90a"
    sms: int = 4
    registers: bool = False

    def text(self) -> str:
        """Return the setting in words."""
        seed = f" (seed {self.seed})" if self.schedule == "random" else ""
        return f"schedule {self.schedule}{seed}, level {self.level}"

    def command(self, target: str, case: str = "") -> str:
        """Return the command that repeats exactly this run."""
        seed = f" --seed {self.seed}" if self.schedule == "random" else ""
        only = f" --case {shlex.quote(case)}" if case else ""
        only += " --registers" if self.registers else ""
        return (
            f"tileloom check {shlex.quote(target)} --schedule {self.schedule}{seed}"
            f" --level {self.level} --arch {self.arch} --sms {self.sms}{only}"
        )


@dataclass(frozen=True)
class Finding:
    """A report, and the setting and case that it was first seen under.

    Attributes:
        report: The report.
        setting: How the file was run.
        case: The case, "" for the whole file.
        also: The other cases that it was seen in, in any setting.
    """

    report: Report
    setting: Setting
    case: str = ""
    also: list[str] = field(default_factory=list[str])

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two reports the same finding: kind, kernel, lines, words and hint."""
        report = self.report
        other = report.other.loc.line if report.other else 0
        return report.kind, report.kernel, report.line, other, *alike(report.message, report.hint)

    def also_in(self) -> str:
        """Return the other cases in words; "" if there is none."""
        return f"also in {', '.join(self.also)}" if self.also else ""


@dataclass(frozen=True)
class Failure:
    """A run that ended otherwise: the file raised, or its process died.

    Attributes:
        setting: How it was run.
        case: The case, "" for the whole file.
        text: The traceback, or a sentence about the death.
        kind: ``wrong`` if one of the file's own assertions failed, ``died`` if the process died or
            was killed, ``raised`` for everything else.
    """

    setting: Setting
    case: str
    text: str
    kind: str = "raised"


@dataclass
class Result:
    """What came of checking a file.

    Attributes:
        findings: Reports, each once.
        failures: Runs that ended otherwise.
        launches: Launches over all runs.
        kernels: Names of the kernels that ran.
        suppressed: Reports that a comment suppresses, with its reason.
        places: By case, the names of files and the lines that its kernels come from.
    """

    findings: list[Finding] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    launches: int = 0
    kernels: set[str] = field(default_factory=set)
    suppressed: list[tuple[Report, str]] = field(default_factory=list)
    places: dict[str, frozenset[tuple[str, int]]] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        """Findings with severity ``error``."""
        return [f for f in self.findings if f.report.severity == "error"]

    def take(self, session: Run, setting: Setting, case: str, kernel: str | None) -> None:
        """Move what a case has found out of its run; what is known is noted under the case."""
        seen = {finding.key: finding for finding in self.findings}
        known = {(r.kind, r.line) for r, _ in self.suppressed}
        for reporter in filter(None, (session.reporter, session.cost_reporter)):
            for report in reporter.reports:
                finding = Finding(report, setting, case)
                if kernel not in (None, report.kernel):
                    continue
                first = seen.setdefault(finding.key, finding)
                if first is finding:
                    self.findings.append(finding)
                elif case not in (first.case, *first.also):
                    first.also.append(case)
            for one in reporter.suppressed:
                if (one[0].kind, one[0].line) not in known:
                    self.suppressed.append(one)
            reporter.forget()


def settings(
    schedules: Sequence[str], seeds: Sequence[int], levels: Sequence[str], arch: str = "sm_90a",
    sms: int = 4, registers: bool = False,
) -> list[Setting]:  # fmt: skip
    """Return all combinations; only the random schedule has seeds.

    Args:
        schedules: Names of schedules.
        seeds: Seeds of the random one.
        levels: Names of levels.
        arch: The architecture.
        sms: Multiprocessors of the emulated card: few, so that persistent programs take several
            tiles each.
        registers: Whether to ask the assembler for registers and spills, at level ``machine``.

    Returns:
        The settings, level by level.
    """
    return [
        Setting(schedule, seed, level, arch, sms, registers)
        for level in levels
        for schedule in schedules
        for seed in (seeds if schedule == "random" else (0,))
    ]
