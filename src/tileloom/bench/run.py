"""One cell of the table: make inputs, check every contender, time those that are right, sum up."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tileloom.bench.case import AttentionCase
from tileloom.bench.contender import Call, Contender, Inputs
from tileloom.bench.gradients import Results, backward_call, joined
from tileloom.bench.machine import CardState
from tileloom.bench.reference import reference_pair
from tileloom.bench.scores import Kept, none_kept
from tileloom.bench.stats import Ratio, Summary, quantile, ratio_of, summarise
from tileloom.bench.timer import Plan, Runner, Timed, Timer, interleave

Status = Literal["ok", "wrong", "refused", "failed"]
Pair = tuple[Results, Results]
Judge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

_MOST_SETS = 32


@dataclass(frozen=True)
class Entry:
    """What one contender did in one cell.

    Attributes:
        name: The contender.
        side: ``"ours"`` or ``"peer"``.
        status: ``"ok"``; ``"wrong"``: it breaks the accuracy rule, and so has no number;
            ``"refused"``: it says that it cannot; ``"failed"``: it raised.
        reason: Why it is not ok.
        about: Backend, config and the like.
        samples_ms: Device time of a call, one a round.
        time_ms: Their summary.
        tflops: At the median.
        of_matmul: Share of the best matrix product of the same run, or None if not measured.
        host_us: Median host time of a call.
        calls: Calls of a sample.
        ratios: By the other contender's name.
    """

    name: str
    side: str
    status: Status
    reason: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    samples_ms: Sequence[float] = ()
    time_ms: Summary | None = None
    tflops: float | None = None
    of_matmul: float | None = None
    host_us: float | None = None
    calls: int = 0
    ratios: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])


@dataclass(frozen=True)
class CellResult:
    """One cell: the case, what each contender did, and the state of the card meanwhile."""

    case: AttentionCase
    entries: Sequence[Entry]
    sets: int
    rounds: int
    card: CardState | None
    seconds: float

    def entry(self, name: str) -> Entry | None:
        """Return the entry of a contender, None if it took no part."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True)
class Session:
    """What the cells of a run have in common.

    Attributes:
        device: Where it runs.
        timer: Takes the time.
        plan: Rounds, lengths and pauses.
        judge: Raises `AssertionError` if an output (first) breaks the accuracy rule against the
            float64 reference (second) and the baseline in its own dtype (third).
        l2_bytes: Size of the cache that must be cold.
        matmul_tflops: The best matrix product, or None.
        baseline: Name of the contender that all others are compared with.
        compare: Names of further contenders to give ratios to.
        card: Gives the state of the card between two times of `time.perf_counter`.
        step: Told what is about to be done, for progress and for the watchdog.
        kept: Gives the scores that dropout keeps, drawn after `seed`.
        seed: Seeds PyTorch's generator, before a result with dropout that is judged.
    """

    device: torch.device
    timer: Timer
    plan: Plan
    judge: Judge
    l2_bytes: int
    matmul_tflops: float | None = None
    baseline: str = "cudnn"
    compare: tuple[str, ...] = ()
    card: Callable[[float, float], CardState | None] = lambda start, end: None
    step: Callable[[str], None] = lambda text: None
    kept: Kept = none_kept
    seed: Callable[[], None] = lambda: None


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sets_for(case: AttentionCase, l2_bytes: int) -> int:
    """Return how many input sets make each call find a cold L2.

    Between two uses of a set, the others move at least three times the cache through it.
    """
    return max(2, min(_MOST_SETS, 1 + math.ceil(3 * l2_bytes / case.bytes_moved)))


def _first_lines(error: BaseException, caught: Sequence[warnings.WarningMessage] = ()) -> str:
    """The error and the warnings that came with it, which is where SDPA says its reasons."""
    texts = [f"{type(error).__name__}: {error}", *(str(w.message) for w in caught)]
    lines = [text.strip().splitlines()[0] for text in texts if text.strip()]
    return " | ".join(dict.fromkeys(line[:300] for line in lines))


def _poison(case: AttentionCase, device: torch.device) -> None:
    """Leave NaN in the memory that the next output is likely to get.

    Otherwise a kernel that writes nothing could pass on what the contender before it has written.
    """
    if device.type != "cpu":
        torch.cuda.empty_cache()
    shape = (case.batch, case.heads_q, case.len_q, case.head_dim)
    blocks = [
        torch.full(shape, math.nan, dtype=case.dtype, device=device) for _ in range(2)
    ]  # all at once, so that they are different blocks
    del blocks


@dataclass
class _Ready:
    """A contender that has passed the gate."""

    contender: Contender
    calls: list[Call]
    about: Mapping[str, Any]


def _check(
    case: AttentionCase, contender: Contender, output: Any, pair: Pair, session: Session
) -> str | None:
    """Judge the output, or each gradient; the reason why one is wrong, or None."""
    is_forward = case.direction == "forward"
    if case.dropout_p and contender.has_own_mask:
        return None
    for name, given, *exact in zip(
        ("output",) if is_forward else ("dq", "dk", "dv", "dbias"),
        (output,) if is_forward else output,
        *pair,
    ):
        actual, plain = contender.read(given), exact[1]
        if (actual.shape, actual.dtype) != (plain.shape, plain.dtype):
            return (
                f"the {name} has shape {tuple(actual.shape)} and dtype {actual.dtype}, not "
                f"{tuple(plain.shape)} and {plain.dtype}"
            )
        try:
            session.judge(*(t if is_forward else joined(t) for t in (actual, *exact)))
        except AssertionError as error:
            return str(error) if is_forward else f"{name}: {error}"
    return None


def _call(contender: Contender, case: AttentionCase, inputs: Inputs, session: Session) -> Call:
    """Make, outside the timing, the call that is timed."""
    own = contender.laid_out(inputs)
    session.seed()  # a backward's forward runs now
    if case.direction == "forward":
        return contender.prepare(case, own)
    return backward_call(contender, case, own)


def _admit(
    contender: Contender,
    case: AttentionCase,
    sets: Sequence[Inputs],
    pair: Pair,
    session: Session,
) -> _Ready | Entry:
    """Run a contender once and judge its output, before any number."""
    about: Mapping[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reason = contender.refuse(case, sets[0])
            if reason is not None:
                return Entry(contender.name, contender.side, "refused", reason)
            about = dict(contender.describe(case, sets[0]))
            calls = [_call(contender, case, inputs, session) for inputs in sets]
            _poison(case, session.device)
            session.seed()
            with contender.scope():
                output = calls[0]()
            session.timer.finish()
            wrong = _check(case, contender, output, pair, session)
        except Exception as error:
            entry = Entry(
                contender.name, contender.side, "failed", _first_lines(error, caught), about
            )
            session.timer.finish()  # raises if the device is lost
            return entry
    if wrong is not None:
        return Entry(contender.name, contender.side, "wrong", wrong, about)
    if case.dropout_p and contender.has_own_mask:
        about = {**about, "judged": "no: its dropout mask is its own"}
    if caught:
        about = {**about, "warnings": list(dict.fromkeys(str(w.message) for w in caught))}
    return _Ready(contender, calls, about)


def _recheck(
    ready: _Ready, case: AttentionCase, pair: Pair, session: Session
) -> tuple[Status, str | None]:
    """Judge the last of several calls that ran back to back: a race shows under load."""
    output: Any = None
    try:
        with ready.contender.scope():
            for call in ready.calls[::-1]:
                session.seed()
                output = call()
        session.timer.finish()
        wrong = _check(case, ready.contender, output, pair, session)
    except Exception as error:
        session.timer.finish()  # raises if the device is lost
        return "failed", f"after the timed calls: {_first_lines(error)}"
    if wrong is not None:
        return "wrong", f"right at first, wrong after the timed calls: {wrong}"
    return "ok", None


def _entry(
    ready: _Ready,
    timed: Timed,
    case: AttentionCase,
    session: Session,
    pair: Pair,
) -> Entry:
    """Make the entry of a contender that was timed, after a last look at its output."""
    contender = ready.contender
    if timed.error is not None:
        return Entry(contender.name, contender.side, "failed", timed.error, ready.about)
    status, reason = _recheck(ready, case, pair, session)
    if status != "ok":
        return Entry(contender.name, contender.side, status, reason, ready.about)
    times = [sample.device_ms for sample in timed.samples]
    time_ms = summarise(times)
    tflops = case.flops / time_ms.median / 1e9
    peak = session.matmul_tflops
    return Entry(
        contender.name,
        contender.side,
        "ok",
        about=ready.about,
        samples_ms=tuple(times),
        time_ms=time_ms,
        tflops=tflops,
        of_matmul=None if peak is None else tflops / peak,
        host_us=quantile([sample.host_us for sample in timed.samples], 0.5),
        calls=timed.calls,
    )


def _with_ratios(entries: Sequence[Entry], session: Session) -> list[Entry]:
    right = {entry.name: entry for entry in entries if entry.status == "ok"}
    against = dict.fromkeys((session.baseline, *session.compare))
    done: list[Entry] = []
    for entry in entries:
        others = [right[name] for name in against if name in right and name != entry.name]
        ratios = {
            other.name: ratio_of(entry.samples_ms, other.samples_ms, other.name)
            for other in others
            if entry.status == "ok"
        }
        done.append(replace(entry, ratios=ratios))
    return done


def run_cell(case: AttentionCase, contenders: Sequence[Contender], session: Session) -> CellResult:
    """Measure one case.

    Every contender is checked first, on memory that held NaN, and again after the timed calls; one
    that is wrong gets no number, and neither does one that cannot run, which gives its reason.

    Args:
        case: The problem.
        contenders: Who takes part.
        session: How.

    Returns:
        The result, with an entry for each contender in the order given.

    Raises:
        RuntimeError: If the device is lost (a kernel faulted): nothing more can run.
        ValueError: If the judge finds that the case itself cannot tell right from wrong.
    """
    begun = time.perf_counter()
    session.step(f"{case.name}: inputs and reference")
    count = sets_for(case, session.l2_bytes)
    sets = [case.inputs(session.device, seed) for seed in range(count)]
    pair = reference_pair(sets[0], case, session.kept)
    for right, plain in zip(*pair):  # the baseline passes its own rule, or the case is no good
        session.judge(
            *map(joined if case.direction == "backward" else _as_is, (plain, right, plain))
        )
    admitted: list[_Ready | Entry] = []
    for contender in contenders:
        session.step(f"{case.name}: checking {contender.name}")
        admitted.append(_admit(contender, case, sets, pair, session))
    ready = {one.contender.name: one for one in admitted if isinstance(one, _Ready)}

    started = time.perf_counter()
    timed = interleave(
        [_runner(one) for one in ready.values()],
        session.plan,
        session.timer,
        step=lambda name: session.step(f"{case.name}: timing {name}"),
    )
    card = session.card(started, time.perf_counter())
    entries: list[Entry] = []
    for one in admitted:
        if isinstance(one, Entry):
            entries.append(one)
            continue
        name = one.contender.name
        session.step(f"{case.name}: checking {name} again")
        entries.append(_entry(one, timed[name], case, session, pair))
    return CellResult(
        case,
        _with_ratios(entries, session),
        count,
        session.plan.rounds,
        card,
        time.perf_counter() - begun,
    )


def _runner(ready: _Ready) -> Runner:
    calls, count = ready.calls, len(ready.calls)
    return Runner(
        ready.contender.name, lambda i: calls[i % count](), sets=count, scope=ready.contender.scope
    )
