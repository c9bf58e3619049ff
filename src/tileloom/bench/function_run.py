"""One case of a function of tensors: who takes part is checked, then timed twice, host and not."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from tileloom.bench.machine import CardState
from tileloom.bench.stats import Ratio, Summary, quantile, ratio_of, summarise
from tileloom.bench.timer import Plan, Runner, Timed, Timer, interleave

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


class Case(Protocol):
    """What is measured: `rowwise_case.RowwiseCase`, `gemm_case.GemmCase`."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        ...

    @property
    def direction(self) -> Literal["forward", "backward"]:
        """Which pass is timed."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Each input once and each output once, in bytes."""
        ...

    @property
    def formula(self) -> Function:
        """Plain torch: right in float64, and the accuracy rule's baseline in the case's dtype."""
        ...

    def inputs(self, device: torch.device, seed: int) -> Tensors:
        """Draw inputs; for a backward with grad."""
        ...


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class FunctionContender(Generic[C]):
    """One column of the table.

    Attributes:
        name: The column's name.
        make: `make(case)` returns the function of the case's inputs.
        refuse: Says, without running anything, why it cannot take a case; None if it can.
        formula: What it is judged by, where that is not the case's formula.
        describe: What there is to know of how it runs a case: backend, config and the like.
    """

    name: str
    make: Callable[[C], Function]
    refuse: Callable[[C], str | None] = lambda case: None
    formula: Callable[[C], Function] | None = None
    describe: Callable[[C, Tensors], Mapping[str, Any]] = lambda case, inputs: {}


@dataclass(frozen=True)
class FunctionEntry:
    """What one contender did in one case.

    Attributes:
        name: The contender.
        status: ``"ok"``, ``"wrong"`` (it breaks the accuracy rule), ``"refused"`` (it says that it
            cannot) or ``"failed"`` (it raised).
        reason: Why it is not ok.
        about: Backend, config and the like.
        samples_ms: Device time of a call, one a round.
        time_ms: Their summary.
        of_copy: Bytes that must move, a second, as a share of a copy's.
        call_samples_us: Time of a call where the device waits for the host, one a round.
        call_us: Their summary.
        host_us: Median host time of queuing a call.
        ratios: Device time, by the other contender's name.
        call_ratios: The same of `call_samples_us`.
    """

    name: str
    status: Literal["ok", "wrong", "refused", "failed"]
    reason: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    samples_ms: Sequence[float] = ()
    time_ms: Summary | None = None
    of_copy: float | None = None
    call_samples_us: Sequence[float] = ()
    call_us: Summary | None = None
    host_us: float | None = None
    ratios: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])
    call_ratios: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])


@dataclass(frozen=True)
class FunctionCell(Generic[C]):
    """One case, what each contender did, and the state of the card meanwhile."""

    case: C
    entries: Sequence[FunctionEntry]
    rounds: int
    card: CardState | None
    seconds: float

    def entry(self, name: str) -> FunctionEntry | None:
        """Return the entry of a contender, None if it took no part."""
        return next((entry for entry in self.entries if entry.name == name), None)


@dataclass(frozen=True)
class FunctionSession:
    """What the cases of a run have in common; see `run.Session`."""

    device: torch.device
    timer: Timer
    plan: Plan
    judge: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    l2_bytes: int
    copy_gbps: float
    card: Callable[[float, float], CardState | None] = lambda start, end: None
    step: Callable[[str], None] = lambda text: None


def copy_bandwidth(device: torch.device, timer: Timer, plan: Plan, megabytes: int = 512) -> float:
    """Measure what a copy on the device reaches.

    Args:
        device: The device.
        timer: Takes the time.
        plan: Rounds, lengths and pauses.
        megabytes: Size of the source, in 2^20 bytes.

    Returns:
        Bytes read plus bytes written, in GB/s (10^9).
    """
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    timed = interleave([Runner("copy", lambda i: target.copy_(source))], plan, timer)["copy"]
    if timed.error is not None:
        raise RuntimeError(f"bench: a copy cannot be measured: {timed.error}")
    return 2 * source.nbytes / quantile([s.device_ms for s in timed.samples], 0.5) / 1e6


def _differentiable(inputs: Tensors) -> Tensors:
    return tuple(t for t in inputs if t.requires_grad)


def _results(case: Case, f: Function, inputs: Tensors) -> Tensors:
    """Run the pass that the case asks for; the gradient that comes in is drawn by its own seed."""
    if case.direction == "forward":
        with torch.no_grad():
            return (f(*inputs),)
    out = f(*inputs)
    return torch.autograd.grad(out, _differentiable(inputs), _incoming(out))


def _incoming(out: torch.Tensor) -> torch.Tensor:
    """Draw a gradient that depends on nothing but the shape, and is exact in every float dtype."""
    generator = torch.Generator(device=out.device).manual_seed(7)
    drawn = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.bfloat16)
    return drawn.to(out.dtype)


def _call(case: Case, f: Function, inputs: Tensors) -> Callable[[], Any]:
    """Make the call that is timed: the backward alone where it is the backward."""
    if case.direction == "forward":
        return lambda: f(*inputs)
    out = f(*inputs)
    incoming, wanted = _incoming(out), _differentiable(inputs)
    return lambda: torch.autograd.grad(out, wanted, incoming, retain_graph=True)


def _in(dtype: torch.dtype, inputs: Tensors) -> Tensors:
    return tuple(
        t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in inputs
    )


class _Right:
    """What is right in float64, and the plain formula in whatever dtype a result has."""

    def __init__(self, case: Case, formula: Function, inputs: Tensors) -> None:
        self._case, self._formula, self._inputs = case, formula, inputs
        self._by_dtype: dict[torch.dtype, Tensors] = {}

    def within(self, dtype: torch.dtype) -> Tensors:
        """Give the results of the formula with every step in `dtype`."""
        if dtype not in self._by_dtype:
            inputs = _in(dtype, self._inputs)
            self._by_dtype[dtype] = _results(self._case, self._formula, inputs)
        return self._by_dtype[dtype]


def _check(actual: Tensors, right: _Right, judge: Any) -> str | None:
    for i, got in enumerate(actual):
        exact, plain = right.within(torch.float64)[i], right.within(got.dtype)[i]
        if got.shape != plain.shape:
            return f"a result has shape {tuple(got.shape)}, not {tuple(plain.shape)}"
        try:
            judge(got, exact, plain)
        except AssertionError as error:
            return str(error)
    return None


def _sets(case: Case, session: FunctionSession) -> list[Tensors]:
    """As many inputs as make each call find a cold L2."""
    count = max(2, min(16, 1 + math.ceil(3 * session.l2_bytes / case.bytes_moved)))
    return [case.inputs(session.device, seed) for seed in range(count)]


def _poison(results: Tensors) -> None:
    """Leave NaN in the memory that the next results are likely to get, as `run._poison` does."""
    if any(t.is_cuda for t in results):
        torch.cuda.empty_cache()
    blocks = [torch.full_like(t, math.nan) for t in results for _ in range(2)]
    del blocks  # all at once, so that they are different blocks


@dataclass
class _Ready:
    name: str
    calls: list[Callable[[], Any]]
    about: Mapping[str, Any]
    formula: Function | None


def _admit(
    contender: FunctionContender[C],
    case: C,
    sets: Sequence[Tensors],
    right: _Right,
    session: FunctionSession,
) -> _Ready | FunctionEntry:
    """Run a contender once and judge it, before any number."""
    reason = contender.refuse(case)
    if reason is not None:
        return FunctionEntry(contender.name, "refused", reason)
    about: Mapping[str, Any] = {}
    formula = None if contender.formula is None else contender.formula(case)
    try:
        about = dict(contender.describe(case, sets[0]))
        f = contender.make(case)
        if formula is not None:
            right = _Right(case, formula, sets[0])
        _poison(_results(case, f, sets[0]))
        wrong = _check(_results(case, f, sets[0]), right, session.judge)
        if wrong is not None:
            return FunctionEntry(contender.name, "wrong", wrong, about)
        calls = [_call(case, f, inputs) for inputs in sets]
        return _Ready(contender.name, calls, about, formula)
    except Exception as error:
        session.timer.finish()  # raises if the device is lost
        text = f"{type(error).__name__}: {error}"[:600]
        return FunctionEntry(contender.name, "failed", text, about)


def _recheck(
    ready: _Ready, case: Case, inputs: Tensors, right: _Right, session: FunctionSession
) -> FunctionEntry | None:
    """Judge the last of several calls that ran back to back: a race shows under load."""
    if ready.formula is not None:
        right = _Right(case, ready.formula, inputs)
    results: Any = None
    try:
        with contextlib.nullcontext() if case.direction == "backward" else torch.no_grad():
            for call in ready.calls[::-1]:
                results = call()
        session.timer.finish()
        results = results if isinstance(results, tuple) else (results,)
        wrong = _check(results, right, session.judge)
    except Exception as error:
        session.timer.finish()  # raises if the device is lost
        text = f"after the timed calls: {type(error).__name__}: {error}"[:600]
        return FunctionEntry(ready.name, "failed", text, ready.about)
    if wrong is None:
        return None
    text = f"right at first, wrong after the timed calls: {wrong}"
    return FunctionEntry(ready.name, "wrong", text, ready.about)


class _Waiting:
    """A timer whose device waits for the host: no kernel spins before a sample."""

    def __init__(self, timer: Timer) -> None:
        self.warm, self.pause, self.finish = timer.warm, timer.pause, timer.finish
        self._timer = timer

    def sample(self, call: Callable[[int], Any], calls: int, lead_ms: float) -> Any:
        return self._timer.sample(call, calls, 0.0)


def _entry(
    ready: _Ready, queued: Timed, waiting: Timed, case: Case, session: FunctionSession
) -> FunctionEntry:
    error = queued.error or waiting.error
    if error is not None:
        return FunctionEntry(ready.name, "failed", error, ready.about)
    times = [s.device_ms for s in queued.samples]
    calls = [s.device_ms * 1000 for s in waiting.samples]
    time_ms = summarise(times)
    return FunctionEntry(
        ready.name,
        "ok",
        about=ready.about,
        samples_ms=tuple(times),
        time_ms=time_ms,
        of_copy=case.bytes_moved / time_ms.median / 1e6 / session.copy_gbps,
        call_samples_us=tuple(calls),
        call_us=summarise(calls),
        host_us=quantile([s.host_us for s in queued.samples], 0.5),
    )


def _with_ratios(entries: Sequence[FunctionEntry]) -> list[FunctionEntry]:
    right = [entry for entry in entries if entry.status == "ok"]
    done: list[FunctionEntry] = []
    for entry in entries:
        others = [o for o in right if o.name != entry.name and entry.status == "ok"]
        done.append(
            replace(
                entry,
                ratios={o.name: ratio_of(entry.samples_ms, o.samples_ms, o.name) for o in others},
                call_ratios={
                    o.name: ratio_of(entry.call_samples_us, o.call_samples_us, o.name)
                    for o in others
                },
            )
        )
    return done


def run_function_cell(
    case: C, contenders: Sequence[FunctionContender[C]], session: FunctionSession
) -> FunctionCell[C]:
    """Measure one case: device time behind a filled queue, then calls that wait for the host.

    Every contender is checked first, on memory that held NaN, and again after the timed calls.

    Args:
        case: The problem.
        contenders: Who takes part.
        session: How.

    Returns:
        The result, with an entry for each contender in the order given.

    Raises:
        RuntimeError: If the device is lost: nothing more can run.
    """
    begun = time.perf_counter()
    session.step(f"{case.name}: inputs and reference")
    sets = _sets(case, session)
    right = _Right(case, case.formula, sets[0])
    admitted: list[_Ready | FunctionEntry] = []
    for contender in contenders:
        session.step(f"{case.name}: checking {contender.name}")
        admitted.append(_admit(contender, case, sets, right, session))
    del right
    gradients = case.direction == "backward"
    scope = contextlib.nullcontext if gradients else torch.no_grad
    ready = {one.name: one for one in admitted if isinstance(one, _Ready)}

    def timed(timer: Timer) -> Mapping[str, Timed]:
        runners = [
            Runner(r.name, lambda i, c=r.calls: c[i % len(c)](), sets=len(r.calls), scope=scope)
            for r in ready.values()
        ]
        return interleave(
            runners,
            session.plan,
            timer,
            step=lambda name: session.step(f"{case.name}: timing {name}"),
        )

    started = time.perf_counter()
    queued, waiting = timed(session.timer), timed(_Waiting(session.timer))
    card = session.card(started, time.perf_counter())
    right = _Right(case, case.formula, sets[0])
    entries: list[FunctionEntry] = []
    for one in admitted:
        if isinstance(one, _Ready):
            session.step(f"{case.name}: checking {one.name} again")
            entry = _entry(one, queued[one.name], waiting[one.name], case, session)
            bad = _recheck(one, case, sets[0], right, session) if entry.status == "ok" else None
            one = bad or entry
        entries.append(one)
    rounds, seconds = session.plan.rounds, time.perf_counter() - begun
    return FunctionCell(case, _with_ratios(entries), rounds, card, seconds)
