"""What the demo found, as plain data: the terminal and the page show the same values."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        return found
