"""Which of several launches is the fastest, in rotation, so that a drifting clock decides nothing.

Time is that of the device, of each launch by itself, with a cold L2 cache. Candidates take turns
launch by launch, and neighbours are compared; those that cannot be told from the best by more than
half a percent are equal, and of equal ones the first of the list wins. So the answer is the same
in every process, as long as the list is.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

Call = Callable[[], Any]

# A spinning kernel counts cycles; at the highest clock of an H100 this is a little over 1 ms.
_CYCLES_PER_MS = 2_000_000
_FILLS = 8
_LOOKS = 3  # launches of a first look


class CallTimer(Protocol):
    """What takes the time. Tests use one with recorded times."""

    def sample(self, calls: Sequence[Call]) -> list[float]:
        """Run launches one after the other and return the device time of each, in ms."""
        ...


@dataclass(frozen=True)
class Plan:
    """How candidates are compared.

    Attributes:
        rounds: Rounds at least.
        most_rounds: Rounds at most, where those before do not decide.
        round_ms: Device time of the launches of a round, in ms.
        least_turns: Launches of each candidate in a round at least.
        most_turns: Launches of each candidate in a round at most.
        screen: Candidates that a first look finds so many times slower than the best drop out.
        band: Share of the best time within which candidates are equal.
    """

    rounds: int = 2
    most_rounds: int = 12
    round_ms: float = 4.0
    least_turns: int = 5
    most_turns: int = 20
    screen: float = 1.25
    band: float = 0.005


@dataclass
class Timing:
    """What was found out about one candidate.

    Attributes:
        ms: Median of its samples; its first look's, where it dropped out; None if it failed.
        ratio: Its time over the winner's: the median of the rounds' ratios.
        reason: Why it was not measured to the end; empty if it was.
        samples: Its launches, in ms; those of the same place in two candidates' were neighbours.
    """

    ms: float | None = None
    ratio: float | None = None
    reason: str = ""
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        timings: One for each candidate, in their order.
        winner: The winner's number; None if all failed.
        equal: Numbers of those that are as good as the best, the winner first.
        rounds: Rounds taken.
    """

    timings: list[Timing]
    winner: int | None
    equal: tuple[int, ...] = ()
    rounds: int = 0


def rotation(contenders: int, rounds: int) -> list[list[int]]:
    """Give the order of contenders in each round: a balanced Latin square (Williams).

    In `contenders` consecutive rounds (twice as many for an odd number) each contender stands once
    in each place and follows each other one equally often, so that no contender always inherits
    the card from a hot or a cool one.

    Args:
        contenders: How many there are.
        rounds: How many orders are wanted.

    Returns:
        For each round the indices of the contenders in order.
    """
    if contenders == 0:
        return [[] for _ in range(rounds)]
    zigzag = [
        (i + 1) // 2 if i % 2 else (contenders - i // 2) % contenders for i in range(contenders)
    ]
    rows: list[list[int]] = []
    for shift in range(contenders):
        row = [(i + shift) % contenders for i in zigzag]
        rows.append(row)
        if contenders % 2 and contenders > 1:
            rows.append(row[::-1])
    return [rows[i % len(rows)] for i in range(rounds)]


def compare(
    calls: Sequence[Call],
    timer: CallTimer,
    plan: Plan | None = None,
    *,
    on_round: Callable[[int, int], None] = lambda done, candidates: None,
) -> Comparison:
    """Find the fastest of several launches.

    Args:
        calls: The candidates, in order of preference: of equal ones the first wins.
        timer: Takes the time.
        plan: How.
        on_round: Told the number of rounds taken and of candidates that are left.

    Returns:
        The winner, and what was found out about each. A candidate that raises takes no more part.
    """
    plan = plan or Plan()
    timings = [Timing() for _ in calls]
    rough = _first_look(calls, timer, timings)
    if not rough:
        return Comparison(timings, None)
    limit = plan.screen * min(rough.values())
    left = [i for i, ms in rough.items() if ms <= limit]
    on_round(0, len(left))
    rounds = turns = 0
    while len(left) > 1 and rounds < plan.most_rounds:
        wanted = math.ceil(plan.round_ms / max(sum(rough[i] for i in left), 1e-4))
        more = min(max(wanted, plan.least_turns), plan.most_turns)
        _take_turns(calls, timer, timings, left, rotation(len(left), turns + more)[turns:])
        left = [i for i in left if not timings[i].reason]
        rounds, turns = rounds + 1, turns + more
        on_round(rounds, len(left))
        if left and rounds >= plan.rounds:
            ratios = _ratios([timings[i].samples for i in left])
            if _is_settled(ratios, plan.band):
                break
            left = _those_near(timings, left, ratios, plan.band)
    return _conclude(timings, left, rough, plan, rounds)


def _first_look(
    calls: Sequence[Call], timer: CallTimer, timings: Sequence[Timing]
) -> dict[int, float]:
    """Time each candidate roughly, after a first launch, which also loads the kernel's code."""
    for i, call in enumerate(calls):
        _try(timings[i], lambda call=call: timer.sample([call]))
    left = [i for i, timing in enumerate(timings) if not timing.reason]
    if left:
        _take_turns(calls, timer, timings, left, rotation(len(left), _LOOKS))
    rough: dict[int, float] = {}
    for i in left:
        if not timings[i].reason:
            rough[i] = timings[i].ms = min(timings[i].samples)
            timings[i].samples.clear()
    return rough


def _take_turns(
    calls: Sequence[Call],
    timer: CallTimer,
    timings: Sequence[Timing],
    left: Sequence[int],
    orders: Sequence[Sequence[int]],
) -> None:
    """Time candidates in some orders, one after the other; a round that fails counts for none."""
    sequence = [left[place] for order in orders for place in order]
    try:
        taken = timer.sample([calls[i] for i in sequence])
    except Exception:
        for i in left:
            _try(timings[i], lambda i=i: timer.sample([calls[i]]))
        if not any(timings[i].reason for i in left):
            raise
        return
    for i, ms in zip(sequence, taken):
        timings[i].samples.append(ms)


def _try(timing: Timing, work: Callable[[], list[float]]) -> None:
    try:
        work()
    except Exception as error:
        timing.reason = f"{type(error).__name__}: {error}"
        timing.ms = None
        timing.samples.clear()


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without the lowest and the highest quarter, and its standard error."""
    ordered, cut = sorted(values), len(values) // 4
    middle = ordered[cut : len(ordered) - cut]
    if len(ordered) < 2:
        return ordered[0], math.inf
    # The error of a trimmed mean is that of the values with the outer ones drawn in.
    drawn_in = [middle[0]] * cut + middle + [middle[-1]] * cut
    error = statistics.stdev(drawn_in) * math.sqrt(len(ordered)) / len(middle)
    return statistics.fmean(middle), error


def _ratios(samples: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the logarithm of each one's time over the best's, and its standard error.

    They follow from launches that were neighbours, which a drift of the clock moves alike.
    """
    logs = [[math.log(max(ms, 1e-6)) for ms in own] for own in samples]

    def over(base: Sequence[float]) -> list[tuple[float, float]]:
        return [_middle([a - b for a, b in zip(own, base)]) for own in logs]

    first = over(logs[0])
    best = min(range(len(logs)), key=lambda i: first[i][0])
    return over(logs[best])


def _is_settled(ratios: Sequence[tuple[float, float]], band: float) -> bool:
    """Whether more rounds would hardly change the winner.

    The winner is the first that is equal to the best. It stays the same as long as it is certain
    of itself and of everyone before it on which side of the band they lie, or that they are within
    twice the band of the best, so that whichever is taken is as good.
    """
    equal, as_good = math.log(1 + band), math.log(1 + 2 * band)
    first = next(i for i, (ratio, _) in enumerate(ratios) if ratio <= equal)
    return all(
        ratio - 2 * error > equal or ratio + 2 * error <= as_good
        for ratio, error in ratios[: first + 1]
    )


def _those_near(
    timings: Sequence[Timing],
    left: Sequence[int],
    ratios: Sequence[tuple[float, float]],
    band: float,
) -> list[int]:
    """Return those that may still win; of the others note how much slower they are."""
    near: list[int] = []
    for i, (ratio, error) in zip(left, ratios):
        if ratio - 3 * error <= math.log(1 + 2 * band):
            near.append(i)
        else:
            timing = timings[i]
            timing.ms, timing.ratio = _middle(timing.samples)[0], math.exp(ratio)
            timing.reason = (
                f"{len(timing.samples)} launches found it {timing.ratio:.3f} times as slow"
            )
    return near


def _conclude(
    timings: list[Timing], left: Sequence[int], rough: dict[int, float], plan: Plan, rounds: int
) -> Comparison:
    if not left:
        return Comparison(timings, None, rounds=rounds)
    equal = [winner := left[0]]
    timings[winner].ratio = 1.0
    if rounds and len(timings[winner].samples) > 1:
        ratios = _ratios([timings[i].samples for i in left])
        equal = [i for i, (ratio, _) in zip(left, ratios) if ratio <= math.log(1 + plan.band)]
        winner = equal[0]
        own = dict(zip(left, ratios))[winner][0]
        for i, (ratio, _) in zip(left, ratios):
            timings[i].ms = _middle(timings[i].samples)[0]
            timings[i].ratio = math.exp(ratio - own)
    for i in rough:
        if i not in left and not timings[i].reason:
            timings[i].ratio = rough[i] / rough[winner]
            timings[i].reason = f"a first look found it {timings[i].ratio:.2f} times as slow"
    return Comparison(timings, winner, tuple(equal), rounds)


class DeviceTimer:
    """Takes the device time of each launch by events, with nothing of it in the L2 cache.

    Ahead of each launch, outside of what is timed, `before` runs and a buffer of twice the cache's
    size is written.
    """

    def __init__(self, device: torch.device, before: Call = lambda: None) -> None:
        """Make a timer.

        Args:
            device: A GPU.
            before: Puts the launch's arguments into the state that each launch is to find.
        """
        properties: Any = torch.cuda.get_device_properties(device)
        cache = int(getattr(properties, "L2_cache_size", 0)) or 64 * 2**20
        self._host_ms = 0.05  # to queue a launch and what comes ahead of it: a first guess
        self._flush = torch.empty(2 * cache, dtype=torch.int8, device=device)
        self._device = device
        self._before = before
        self._events: list[list[torch.cuda.Event]] = []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            start.record()
            for _ in range(_FILLS):
                self._flush.zero_()
            end.record()
            end.synchronize()
        self._fill_ms = start.elapsed_time(end) / _FILLS

    def sample(self, calls: Sequence[Call]) -> list[float]:
        """Time launches; see `CallTimer`."""
        while len(self._events) < len(calls):
            self._events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        made = self._events[: len(calls)]
        host_s: list[float] = []
        with torch.cuda.device(self._device), _no_collection():
            stream = torch.cuda.current_stream()
            # A kernel spins until the host is far enough ahead, so that no time of the host is
            # between events: the device needs as long for each launch as for the buffer, at least.
            wanted_ms = 1.5 * self._host_ms
            lead_ms = 0.1 + 2 * wanted_ms + len(calls) * max(0.0, wanted_ms - self._fill_ms)
            cast("Any", torch.cuda)._sleep(int(lead_ms * _CYCLES_PER_MS))
            for (start, end), call in zip(made, calls):
                began = time.perf_counter()
                self._before()
                self._flush.zero_()
                start.record(stream)
                call()
                end.record(stream)
                host_s.append(time.perf_counter() - began)
            self._host_ms = statistics.median(host_s) * 1e3  # the first may load or compile
            torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in made]


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
