"""Which of several launches is the fastest, in rotation, so that a drifting clock decides nothing.

Time is that of the device, of each launch by itself, with a cold L2 cache. All candidates run in
every round and are compared within rounds; those that cannot be told from the best by more than
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
# Some 10 ms on an H100: the clock of a card that was idle is low.
_WARM_FILLS = 250
_IDLE_AFTER_S = 0.1
_FILLS = 8
_last_used: dict[torch.device, float] = {}


class CallTimer(Protocol):
    """What takes the time. Tests use one with recorded times."""

    def sample(self, call: Call, calls: int) -> list[float]:
        """Run a launch `calls` times and return the device time of each, in ms."""
        ...


@dataclass(frozen=True)
class Plan:
    """How candidates are compared.

    Attributes:
        rounds: Samples of each candidate at least.
        most_rounds: Samples at most, where those before do not decide.
        sample_ms: Device time that a sample should take, in ms.
        least_calls: Launches of a sample at least.
        most_calls: Launches of a sample at most.
        screen: Candidates that a first look finds so many times slower than the best drop out.
        band: Share of the best time within which candidates are equal.
    """

    rounds: int = 6
    most_rounds: int = 21
    sample_ms: float = 2.0
    least_calls: int = 3
    most_calls: int = 10
    screen: float = 1.25
    band: float = 0.005


@dataclass
class Timing:
    """What was found out about one candidate.

    Attributes:
        ms: Median of its samples; its first look's, where it dropped out; None if it failed.
        ratio: Its time over the winner's: the median of the rounds' ratios.
        reason: Why it was not measured to the end; empty if it was.
        samples: The middle of its launches in each round, in ms.
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
    rough = _first_look(calls, timer, timings, plan.least_calls)
    if not rough:
        return Comparison(timings, None)
    limit = plan.screen * min(rough.values())
    left = [i for i, ms in rough.items() if ms <= limit]
    on_round(0, len(left))
    rounds = 0
    while len(left) > 1 and rounds < plan.most_rounds:
        order = rotation(len(left), rounds + 1)[rounds]
        for place in order:
            i = left[place]
            wanted = math.ceil(plan.sample_ms / max(rough[i], 1e-4))
            count = min(max(wanted, plan.least_calls), plan.most_calls)
            sample = _try(timings[i], lambda i=i, count=count: timer.sample(calls[i], count))
            if sample is not None:
                timings[i].samples.append(_middle(sample))
        left = [i for i in left if not timings[i].reason]
        rounds += 1
        on_round(rounds, len(left))
        if rounds >= plan.rounds and _is_settled([timings[i].samples for i in left], plan.band):
            break
    return _conclude(timings, left, rough, plan, rounds)


def _first_look(
    calls: Sequence[Call], timer: CallTimer, timings: Sequence[Timing], count: int
) -> dict[int, float]:
    """Time each candidate roughly, there and back: the first may meet a clock that still rises."""
    rough: dict[int, float] = {}
    for i, call in enumerate(calls):
        # The first launch also loads the kernel's code.
        looked = _try(timings[i], lambda call=call: timer.sample(call, 1 + count))
        if looked is not None:
            rough[i] = timings[i].ms = min(looked[1:])
    for i in reversed(list(rough) if len(rough) > 1 else []):
        looked = _try(timings[i], lambda i=i: timer.sample(calls[i], count))
        if looked is None:
            del rough[i]
        else:
            rough[i] = timings[i].ms = min(rough[i], *looked)
    return rough


def _try(timing: Timing, work: Callable[[], list[float]]) -> list[float] | None:
    try:
        return work()
    except Exception as error:
        timing.reason = f"{type(error).__name__}: {error}"
        timing.ms = None
        timing.samples.clear()
        return None


def _middle(sample: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter: finer than the events' 32 ns."""
    cut = len(sample) // 4
    return statistics.fmean(sorted(sample)[cut : len(sample) - cut])


def _ratios(samples: Sequence[Sequence[float]]) -> tuple[int, list[list[float]]]:
    """Return who is the best, and for each the rounds' ratios to that one.

    The best is the one of the lowest median of its share in its round's median, which a drift
    of the clock between rounds moves for all alike.
    """
    middle = [statistics.median(row) for row in zip(*samples)]
    shares = [statistics.median(x / m for x, m in zip(own, middle)) for own in samples]
    best = min(range(len(samples)), key=shares.__getitem__)
    return best, [[a / b for a, b in zip(own, samples[best])] for own in samples]


def _certain(rounds: int) -> int:
    """How many of the ordered ratios to drop at each end for an interval of at least 95 %."""
    dropped, share = 0, 0.5**rounds
    total = share
    while True:
        share *= (rounds - dropped) / (dropped + 1)
        if total + share > 0.025:
            return dropped
        total += share
        dropped += 1


def _is_settled(samples: Sequence[Sequence[float]], band: float) -> bool:
    """Whether more rounds would hardly change the winner.

    The winner is the first that is equal to the best. It stays the same as long as it is certain
    of itself and of everyone before it on which side of the band they lie, or that they are within
    twice the band of the best, so that whichever is taken is as good.
    """
    if len(samples) < 2:
        return True
    best, ratios = _ratios(samples)
    first = next(i for i, own in enumerate(ratios) if statistics.median(own) <= 1 + band)
    for i in range(first + 1):
        ordered = sorted(ratios[i])
        dropped = _certain(len(ordered))
        low, high = ordered[dropped], ordered[-1 - dropped]
        if i != best and low <= 1 + band and high > 1 + 2 * band:
            return False
    return True


def _conclude(
    timings: list[Timing], left: Sequence[int], rough: dict[int, float], plan: Plan, rounds: int
) -> Comparison:
    if not left:
        return Comparison(timings, None, rounds=rounds)
    if rounds:
        _, ratios = _ratios([timings[i].samples for i in left])
        found = [statistics.median(own) for own in ratios]
        equal = [i for i, ratio in zip(left, found) if ratio <= 1 + plan.band]
        winner = equal[0]
        own = timings[winner].samples
        for i in left:
            timings[i].ms = statistics.median(timings[i].samples)
            pairs = zip(timings[i].samples, own)
            timings[i].ratio = statistics.median(a / b for a, b in pairs)
    else:
        equal = [winner := left[0]]
        timings[winner].ratio = 1.0
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
        if time.perf_counter() - _last_used.get(device, -math.inf) > _IDLE_AFTER_S:
            for _ in range(_WARM_FILLS):
                self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            start.record()
            for _ in range(_FILLS):
                self._flush.zero_()
            end.record()
            end.synchronize()
        self._fill_ms = start.elapsed_time(end) / _FILLS

    def sample(self, call: Call, calls: int) -> list[float]:
        """Time `calls` launches; see `CallTimer`."""
        made = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        host_s: list[float] = []
        with torch.cuda.device(self._device), _no_collection():
            stream = torch.cuda.current_stream()
            # A kernel spins until the host is far enough ahead, so that no time of the host is
            # between events: the device needs as long for each launch as for the buffer, at least.
            wanted_ms = 1.5 * self._host_ms
            lead_ms = 0.1 + 2 * wanted_ms + calls * max(0.0, wanted_ms - self._fill_ms)
            cast("Any", torch.cuda)._sleep(int(lead_ms * _CYCLES_PER_MS))
            for start, end in made:
                began = time.perf_counter()
                self._before()
                self._flush.zero_()
                start.record(stream)
                call()
                end.record(stream)
                host_s.append(time.perf_counter() - began)
            self._host_ms = statistics.median(host_s) * 1e3  # the first may load or compile
            torch.cuda.synchronize(self._device)
        _last_used[self._device] = time.perf_counter()
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
