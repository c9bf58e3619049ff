"""What the demo found, as plain data: the terminal and the page show the same values."""

from __future__ import annotations

from dataclasses import dataclass, field

WHEN = {"late": "as late as they may", "eager": "at once"}
"""When copies and matrix multiplications complete, by the emulator's name of the schedule."""


@dataclass(frozen=True)
class Fact:
    """A line of the environment."""

    name: str
    value: str


@dataclass(frozen=True)
class Agreement:
    """How far embeddings through tileloom are from those of eager attention.

    Attributes:
        dtype: Precision of the model, such as ``"float32"``.
        texts: Number of texts embedded by both.
        padded: Share of the tokens in the batches that are padding, 0 to 1.
        max_abs_error: Largest difference of an element; the vectors have length 1.
        min_cosine: Smallest cosine between the two vectors of a text.
        rule: What the accuracy rule says; empty if it holds.
        judged: Texts that the rule was applied to, with float64 as the truth.
        own_error: Largest error of tileloom against float64.
        eager_error: The same of eager attention: the measure of the rule.
        unmasked_error: Largest difference from eager if padding were seen.
    """

    dtype: str
    texts: int
    padded: float
    max_abs_error: float
    min_cosine: float
    rule: str
    judged: int
    own_error: float
    eager_error: float
    unmasked_error: float


@dataclass(frozen=True)
class Hit:
    """A passage that a search found."""

    score: float
    source: str
    text: str


@dataclass(frozen=True)
class Search:
    """A query and the passages nearest to it, best first."""

    query: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True)
class BackendRow:
    """Calls of the operator that were decided alike.

    Attributes:
        calls: How many.
        problem: What they computed.
        backend: Which backend ran.
        why: Why that one: what decided, and why those before it refused.
        elsewhere: What the same call takes on an H100 in float16; empty when it ran there.
    """

    calls: int
    problem: str
    backend: str
    why: tuple[str, ...]
    elsewhere: str


@dataclass(frozen=True)
class KernelRow:
    """A compiled kernel. Numbers are None where it did not compile, or was not compiled."""

    name: str
    arch: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    stages: int | None = None
    blocks_per_sm: int | None = None
    compile_s: float | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimeRow:
    """A contender's time, or why there is none.

    Attributes:
        name: The contender.
        status: ``"ok"``, ``"wrong"`` (its result broke the accuracy rule) or ``"refused"``.
        median_us: Median of the rounds, in microseconds.
        low_us: 20 % quantile.
        high_us: 80 % quantile.
        speedup: How many times as fast as this contender tileloom is.
        speedup_low: Lower end of the 95 % interval of the ratio.
        speedup_high: Its upper end.
        note: Why there is no time; for ours, which backend ran.
    """

    name: str
    status: str
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Contest:
    """Contenders timed in rotation on one problem."""

    title: str
    rows: tuple[TimeRow, ...]


@dataclass(frozen=True)
class Span:
    """What a track does from one step of the emulator to another.

    Attributes:
        start: First step.
        end: The step after the last.
        kind: ``"run"``, ``"wait"``, ``"load"``, ``"store"`` or ``"wgmma"``.
        text: What exactly, with the source line.
    """

    start: int
    end: int
    kind: str
    text: str


@dataclass(frozen=True)
class Track:
    """A line of a timeline: a partition of the kernel, or what is in flight; spans may overlap."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PlayedRow:
    """One run of the Hopper kernel on the emulator.

    Attributes:
        kernel: ``"as shipped"``, or what was changed.
        schedule: When asynchronous operations complete.
        max_error: Largest difference from float64.
        rule: What the accuracy rule says; empty if it holds.
        reports: Number of errors that the emulator reports.
        changed: Whether the kernel was damaged on purpose.
    """

    kernel: str
    schedule: str
    max_error: float
    rule: str
    reports: int
    changed: bool = False


@dataclass(frozen=True)
class Played:
    """The Hopper kernel played on the emulator, as shipped and with one wait removed.

    Attributes:
        problem: What was computed, and in which precision.
        why_not: Why nothing was played; the rest is empty then.
        plain_error: Largest difference of the plain formula in the kernel's precision from float64:
            the measure of the rule.
        rows: The runs.
        programs: Programs of the grid.
        accesses: Memory accesses that were checked in the first run.
        removed: The statement that was removed, with file and line.
        report: The emulator's first report about its absence.
        timeline: Name of the trace's file, beside the page.
        tracks: The beginning of that timeline, of one program.
    """

    problem: str
    why_not: str = ""
    plain_error: float = 0.0
    rows: tuple[PlayedRow, ...] = ()
    programs: int = 0
    accesses: int = 0
    removed: str = ""
    report: str = ""
    timeline: str = ""
    tracks: tuple[Track, ...] = ()

    @property
    def faults(self) -> list[str]:
        """What is wrong: a report about the kernel as shipped, or none about the damaged one."""
        found: list[str] = []
        for row in self.rows:
            name = f"the Hopper kernel {row.kernel}, emulated ({row.schedule})"
            if row.changed and not row.reports:
                found.append(f"{name}: nobody noticed")
            if not row.changed and row.reports:
                found.append(f"{name}: {row.reports} reports")
            if not row.changed and row.rule:
                found.append(f"{name}: {row.rule}")
        return found


@dataclass
class Findings:
    """Everything that the page shows; the demo fills it from top to bottom."""

    version: str
    date: str
    model: str
    text: str
    environment: list[Fact] = field(default_factory=list[Fact])
    agreements: list[Agreement] = field(default_factory=list[Agreement])
    searches: list[Search] = field(default_factory=list[Search])
    backends: list[BackendRow] = field(default_factory=list[BackendRow])
    contests: list[Contest] = field(default_factory=list[Contest])
    no_contest: str = ""
    kernels: list[KernelRow] = field(default_factory=list[KernelRow])
    compiler: str = ""
    left_out: int = 0
    played: Played | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """What is wrong, a sentence each; empty if all is well."""
        found = [f"embeddings in {a.dtype}: {a.rule}" for a in self.agreements if a.rule]
        found += [f"{row.name} for {row.arch}: {f}" for row in self.kernels for f in row.faults]
        found += [
            f"{contest.title}: {row.name} is {row.status}: {row.note}"
            for contest in self.contests
            for row in contest.rows
            if row.status != "ok" and row.name.startswith("tileloom")
        ]
        return found + (self.played.faults if self.played is not None else [])
