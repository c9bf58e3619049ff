"""Writes docs/mutations.md: every mutant of the package's kernels, and who noticed it.

python -m tests.emulator.mutation_page          # judge every mutant: minutes
python -m tests.emulator.mutation_page --new    # only those that are new or stand elsewhere
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.house import ROOT
from tileloom.emulator.findings import settings
from tileloom.emulator.judge import Judge, Verdict
from tileloom.emulator.mutate import Mutant

PAGE = ROOT / "docs" / "mutations.md"
SCHEDULES, SEEDS, LEVELS = ("late", "eager", "random"), (0, 1), ("ttgir", "machine")
COMMAND = "python -m tests.emulator.mutation_page"


@dataclass(frozen=True)
class Subject:
    """Kernels, the files that run them, and the mutants that nobody need notice.

    Attributes:
        title: Heading of its table.
        drivers: What `tileloom check` runs, one after the other until one notices.
        kernels: What is damaged; every driver imports all of them.
        sms: Multiprocessors of the emulated card.
        harmless: (statement, mutation) -> why nobody need notice.
    """

    title: str
    drivers: tuple[Path, ...]
    kernels: tuple[Path, ...]
    sms: int
    harmless: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def judges(self) -> list[Judge]:
        """Return who judges its mutants."""
        ways = settings(SCHEDULES, SEEDS, LEVELS, sms=self.sms)
        return [Judge(driver, ways, self.kernels) for driver in self.drivers]

    def mutants(self) -> list[tuple[Path, Mutant]]:
        """Return its mutants, each with the file that it was made from."""
        found = self.judges()[0].mutants()
        return [(path, mutant) for path, some in found.items() for mutant in some]

    def verdicts(self, mutants: list[tuple[Path, Mutant]], jobs: int) -> Iterator[Verdict]:
        """Judge mutants; what one driver does not notice the next one tries."""
        for judge in self.judges():
            left: list[tuple[Path, Mutant]] = []
            for verdict in judge.verdicts(mutants, jobs=jobs):
                if verdict.outcome == "unnoticed":
                    left.append((verdict.path, verdict.mutant))
                yield verdict
            mutants = left


_SOURCE = ROOT / "src" / "tileloom"
_ATTENTION, _GEMM = _SOURCE / "ops" / "attention", _SOURCE / "ops" / "gemm"
_ATTENTION_TESTS = ROOT / "tests" / "ops" / "attention"
_PACKED_TESTS = _ATTENTION_TESTS / "varlen"
_ALONE = (
    "nothing else is in flight there: it names the product for the compiler and waits for nothing"
)
_OWN = (
    "it is there for Triton's analysis of shared memory, which then puts no barrier where nothing "
    "is cleared; the threads clear elements of their own, and all meet at the named barrier after"
)
_TURNS = (
    "turns order the issue of wgmmas for speed; nothing is handed over by them (so far judged in "
    "`d64-full-bf16` only)"
)
_TOLD = (
    "needed on the hardware, where the host may read the three words while the kernel runs; the "
    "emulator's host reads them when it has ended"
)
_ZEROS = (
    "what is in flight there are copies behind the last row, of zeros into places that nobody reads"
)
SUBJECTS = (
    Subject(
        "Attention forward on Hopper",
        (_ATTENTION_TESTS / "emulated.py", _PACKED_TESTS / "emulated.py"),
        (
            _ATTENTION / "kernel_gluon_sm90_fwd.py",
            _ATTENTION / "pieces_gluon_sm90.py",
            _ATTENTION / "pieces_rings_sm90.py",
            _ATTENTION / "pieces_step_sm90.py",
            _ATTENTION / "pieces_scores_sm90.py",
        ),
        sms=2,
        harmless={
            (
                "thread_barrier()  # with the one below, so that what does not come here needs "
                "none",
                "removed thread_barrier",
            ): _OWN,
            ("thread_barrier()", "removed thread_barrier"): _OWN,
            (
                "release(ring_empty, k_slot, 0, CONSUMERS)",
                "release before the warpgroup_mma_wait above it",
            ): "the producer refills slots in order: before this one it waits for V of the block "
            "before, which this step hands back behind its `warpgroup_mma_wait(0)` (so far judged "
            "in `d64-full-bf16`, `d64-causal-lengths-bf16` and `hidden-nan` only)",
            (
                "turn_end(WG, CONSUMERS, TURNS)",
                "turn_end before the issue_scores above it",
            ): _TURNS,
            (
                "turn_end(WG, CONSUMERS, TURNS)",
                "turn_end before the warpgroup_mma above it",
            ): _TURNS,
        },
    ),
    Subject(
        "Attention backward on Hopper",
        (_ATTENTION_TESTS / "emulated_backward.py", _PACKED_TESTS / "emulated_backward.py"),
        (
            _ATTENTION / "kernel_gluon_sm90_bwd.py",
            _ATTENTION / "kernel_gluon_sm90_bwd_wide.py",
            _ATTENTION / "pieces_gluon_sm90_bwd.py",
            _ATTENTION / "pieces_order_sm90.py",
            _ATTENTION / "pieces_gluon_sm90_scores.py",
            _ATTENTION / "pieces_dropper_sm90_bwd.py",
        ),
        sms=2,
        harmless={
            (
                "t = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[t]))",
                "warpgroup_mma_wait leaves one more in flight",
            ): _ALONE,
            (
                "dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])",
                "warpgroup_mma_wait leaves one more in flight",
            ): "nothing is: the last step has waited for all, this makes tensors of accumulators",
            (
                'fence_proxy_async("global")',
                "removed fence_proxy_async",
            ): "on the emulator reductions are atomics, which no proxy keeps apart; PTX asks for a "
            "fence between the flag that was read and a reduction by TMA",
            (
                "_count(order, step, steps)",
                "_count before the tma_store_wait above it",
            ): "needed on the hardware, where `test_a_fixed_order_adds_the_last_keys_first` looks "
            "for it; on the emulator the write, waited for at once, lands before that of the block "
            "whose turn it is",
        },
    ),
    Subject(
        "Attention backward on Hopper up to head dim 64",
        (_ATTENTION_TESTS / "emulated_narrow.py",),
        (_ATTENTION / "kernel_gluon_sm90_bwd_narrow.py",),
        sms=2,
        harmless={
            (
                "named_barrier_sync(SHARED, 256)",
                "removed named_barrier_sync",
            ): "the turns order it as well: each warpgroup hands its first turn on behind what it "
            "has cleared and filled, and reads the other's behind that one's",
            (
                "dv = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[dv]))",
                "warpgroup_mma_wait leaves one more in flight",
            ): "the next wait for S^T covers dV as well, and the one after the loop the last; dO "
            "of the slot is not overwritten before `q_empty` of the same slot, where every thread "
            "arrives behind that wait",
        },
    ),
    Subject(
        "Attention backward on Hopper for 192 columns of Q and K",
        (_ATTENTION_TESTS / "emulated_192.py",),
        (_ATTENTION / "kernel_gluon_sm90_bwd_192.py",),
        sms=2,
        harmless={
            (
                "thread_barrier()",
                "removed thread_barrier",
            ): "Triton puts a barrier of its own before "
            "the loads by TMA and before the products that read dS^T",
            (
                "dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])",
                "warpgroup_mma_wait leaves one more in flight",
            ): "the wait for dQ covers dV as well; this one gives its registers back",
            (
                "dk, dk_rest, dv = warpgroup_mma_wait(0, deps=[dk, dk_rest, dv])",
                "warpgroup_mma_wait leaves one more in flight",
            ): "nothing is: the last step has waited for all, this makes tensors of accumulators",
        },
    ),
    Subject(
        "Gradient of a shared bias on Hopper",
        (_ATTENTION_TESTS / "emulated_dbias.py",),
        (_ATTENTION / "kernel_gluon_sm90_dbias.py",),
        sms=2,
    ),
    Subject(
        "Matrix product on Hopper",
        (ROOT / "tests" / "ops" / "gemm" / "emulated.py",),
        (
            _GEMM / "kernel_gluon_sm90.py",
            _GEMM / "pieces_early_sm90.py",
            _GEMM / "pieces_gluon_sm90.py",
            _GEMM / "pieces_multiply_sm90.py",
            _SOURCE / "scheduling" / "device.py",
            _SOURCE / "device" / "mail.py",
        ),
        sms=2,
        harmless={
            (
                "return warpgroup_mma_wait(1, deps=(acc,))  # waits for nothing: only this one is "
                "under way",
                "warpgroup_mma_wait leaves one more in flight",
            ): _ALONE,
            (
                'store_release(status, late + 1, "sys")',
                "store_release before the store above it",
            ): _TOLD,
            ("thread_barrier()", "removed thread_barrier"): "the atomic before it is one thread's: "
            "Triton (PTX of 3.6 to 3.8) hands its result to the others through shared memory, with "
            "a barrier of its own in between, so all of them are behind the acquire",
        },
    ),
    Subject(
        "Norms through rings on Hopper",
        (ROOT / "tests" / "ops" / "rowwise" / "norms" / "emulated.py",),
        (
            _SOURCE / "ops" / "rowwise" / "norm" / "kernel_gluon_sm90_bwd.py",
            _SOURCE / "ops" / "rowwise" / "norm" / "kernel_gluon_sm90_bwd_walk.py",
            _SOURCE / "ops" / "rowwise" / "norm" / "kernel_gluon_sm90_fwd_walk.py",
        ),
        sms=2,
        harmless={
            ("thread_barrier()", "removed thread_barrier"): "pieces are copied and read in one "
            "layout: each thread reads only what it has copied itself, and has waited for that",
            ("async_copy.wait_group(0)", "removed wait_group"): _ZEROS,
            ("async_copy.wait_group(0)", "wait_group leaves one more in flight"): _ZEROS,
        },
    ),
    Subject(
        "Barriers, fences and copies",
        (ROOT / "tests" / "cpasync" / "emulated.py",),
        tuple(_SOURCE / "device" / f"{n}.py" for n in ("barriers", "fences", "cp_async", "tma")),
        sms=2,
    ),
    Subject(
        "Flags in global memory",
        (ROOT / "tests" / "device" / "emulated.py",),
        (_SOURCE / "device" / "memory.py",),
        sms=2,
    ),
)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    file: str
    line: int
    function: str
    statement: str
    mutation: str
    noticed: str = ""

    @staticmethod
    def of(path: Path, mutant: Mutant, noticed: str = "") -> Row:
        """Return the row of a mutant."""
        file = path.relative_to(ROOT).as_posix()
        return Row(file, mutant.line, mutant.function, mutant.source, mutant.change, noticed)

    @property
    def what(self) -> tuple[str, str, str, str]:
        """The damage and the function that it is in, wherever they stand in the file."""
        return self.file, self.function, self.statement, self.mutation

    def text(self) -> str:
        """Return the row as Markdown."""
        statement = self.statement.replace("|", "\\|")
        where = f"{self.line} | {self.function}"
        return f"| {where} | `{statement}` | {self.mutation} | {self.noticed} |"


def noticed(subject: Subject, verdict: Verdict) -> str:
    """Say who noticed a mutant, or why nobody need."""
    mutant = verdict.mutant
    if verdict.outcome == "unnoticed":
        reason = subject.harmless.get((mutant.source, mutant.change), mutant.harmless)
        return f"harmless: {reason}" if reason else "**nobody**"
    assert verdict.setting is not None, "somebody noticed"
    way = verdict.setting
    schedule = f"{way.schedule} {way.seed}" if way.schedule == "random" else way.schedule
    kind = verdict.detail.partition(" at ")[0]  # its line would move with the source
    who = kind if verdict.outcome == "reported" else verdict.outcome
    return f"{who}; {schedule}, {way.level}, {verdict.case}"


def current() -> list[Row]:
    """Return the rows that the kernels have now, not yet judged."""
    return [Row.of(path, mutant) for subject in SUBJECTS for path, mutant in subject.mutants()]


def known(old: Sequence[Row], now: Sequence[Row]) -> list[Row]:
    """Return rows of now with the verdicts of the old ones that still hold, wherever they moved.

    A verdict holds while its function has the statement as often as before, and between the same
    neighbours that synchronise: of equal statements, of which one is new, each is judged again.
    """
    verdicts = dict(zip(_places(old), (row.noticed for row in old)))
    return [replace(r, noticed=verdicts.get(key, "")) for r, key in zip(now, _places(now))]


def _places(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """Tell each row's place in its function: the same one of as many, between the same others."""
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        lines.setdefault(row.what[:2], {})[row.line] = row.statement
    of = Counter(row.what for row in rows)
    seen: Counter[tuple[str, str, str, str]] = Counter()
    places: list[tuple[object, ...]] = []
    for row in rows:
        seen[row.what] += 1
        others = lines[row.what[:2]]
        before = max((line for line in others if line < row.line), default=0)
        after = min((line for line in others if line > row.line), default=0)
        nth = (seen[row.what], of[row.what])
        places.append((row.what, nth, others.get(before, ""), others.get(after, "")))
    return places


def judged(
    old: Sequence[Row], jobs: int, save: Callable[[list[Row]], None] = lambda rows: None
) -> list[Row]:
    """Judge the mutants that `old` has no verdict of that holds; keep the others.

    `save` gets all rows after each verdict, so that nothing is lost when a long run is ended.
    """
    found = [(subject, *item) for subject in SUBJECTS for item in subject.mutants()]
    rows = known(old, [Row.of(path, mutant) for _, path, mutant in found])
    number = {(path, mutant): i for i, (_, path, mutant) in enumerate(found)}
    for subject in SUBJECTS:
        unknown = [(p, m) for s, p, m in found if s is subject and not rows[number[p, m]].noticed]
        for verdict in subject.verdicts(unknown, jobs):
            i = number[verdict.path, verdict.mutant]
            rows[i] = replace(rows[i], noticed=noticed(subject, verdict))
            print(rows[i].text(), file=sys.stderr, flush=True)
            save(rows)
    return rows


_INTRODUCTION = f"""# Mutations of the kernels

Generated; do not edit. Each row is one damage to a synchronising statement of a kernel of this
package, and who noticed it first when the kernel then ran on [the emulator](emulator.md): the kind
of report; schedule, level and case. `tests/emulator/test_mutation_page.py` holds the
page against the kernels; `{COMMAND}` writes it anew.

A harmless mutant ran in every case that has the statement, unless its reason names the cases, under
late, eager and two random schedules, at `ttgir` and at `machine`, and nothing was reported, nor any
result wrong.
"""
_HEAD = "| line | function | statement | mutation | noticed by |\n|---|---|---|---|---|"


def page(rows: list[Row]) -> str:
    """Return the page's text."""
    harmless = sum(row.noticed.startswith("harmless: ") for row in rows)
    seen = sum(bool(row.noticed) for row in rows) - harmless
    counts = f"{len(rows)} mutants; {seen} noticed, {harmless} harmless"
    out = [_INTRODUCTION, f"{counts}, each for the reason given."]
    for subject in SUBJECTS:
        drivers = " and ".join(f"`{d.relative_to(ROOT).as_posix()}`" for d in subject.drivers)
        out += ["", f"## {subject.title}", ""]
        out += [f"Run by {drivers}, with {subject.sms} multiprocessors."]
        for path in subject.kernels:
            file = path.relative_to(ROOT).as_posix()
            out += ["", f"### {file}", "", _HEAD]
            out += [row.text() for row in rows if row.file == file]
    return "\n".join(out) + "\n"


def read(text: str) -> list[Row]:
    """Return the rows of a page."""
    rows: list[Row] = []
    file = ""
    for line in text.splitlines():
        if line.startswith("### "):
            file = line.removeprefix("### ")
        elif line.startswith("| ") and line[2].isdigit():
            number, *rest = line[2:-2].replace("\\|", "\0").split(" | ")
            function, statement, mutation, who = rest
            statement = statement.strip("`").replace("\0", "|")
            rows.append(Row(file, int(number), function, statement, mutation, who))
    return rows


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="keep the verdicts that are there")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time; default 2")
    args = parser.parse_args()
    old = read(PAGE.read_text()) if args.new and PAGE.exists() else []
    PAGE.write_text(page(judged(old, args.jobs, lambda rows: PAGE.write_text(page(rows)))))


if __name__ == "__main__":
    main()
