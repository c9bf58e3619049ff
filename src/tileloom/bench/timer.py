"""How time is taken: device events behind a filled queue, and contenders in balanced rotation."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from tileloom.bench.stats import FEWEST_ROUNDS
from tileloom.tuning.measure import rotation

IndexedCall = Callable[[int], Any]

# The driver's queue holds 1024 launches; a call may be several.
_MOST_CALLS = 300
# A spinning kernel counts cycles; at the highest clock of an H100 this is a little over 1 ms.
_CYCLES_PER_MS = 2_000_000


@dataclass(frozen=True)
class Sample:
    """The mean over the calls of one sample: device time in ms, and host time in microseconds."""

    device_ms: float
    host_us: float


@dataclass(frozen=True)
class Plan:
    """How a case is measured.

    Attributes:
        rounds: Samples of each contender.
        sample_ms: Device time that one sample should take at least, in ms.
        warm_ms: Device time of the same contender right before each sample, in ms.
        pause_s: Idle time before each contender, in seconds: the card is power-capped in long runs,
            and nobody should pay for the one before.
        least_calls: Calls of a sample at least.
    """

    rounds: int = 9
    sample_ms: float = 40.0
    warm_ms: float = 20.0
    pause_s: float = 0.03
    least_calls: int = 2


def affordable_rounds(plan: Plan, contenders: int, cells: int, seconds: float) -> int:
    """Say how many rounds a cell may take so that the cells left fit into the time left.

    Args:
        plan: Rounds wanted, lengths and pauses.
        contenders: How many take part.
        cells: Cells left, this one included.
        seconds: Time left.

    Returns:
        At most the rounds wanted, at least 5 (or what is wanted, if less): with fewer rounds no
        verdict is possible.
    """
    one = 1.2 * (plan.pause_s + (plan.warm_ms + plan.sample_ms) / 1000)
    per_cell = seconds / cells - 1.5  # inputs, reference, checks
    fit = int(per_cell / (one * max(contenders, 1)))
    return min(plan.rounds, max(FEWEST_ROUNDS, fit))


class Timer(Protocol):
    """What takes the time. Tests use one with a clock of their own."""

    def warm(self, call: IndexedCall, calls: int) -> None:
        """Run calls that are not timed."""
        ...

    def sample(self, call: IndexedCall, calls: int, lead_ms: float) -> Sample:
        """Time calls that run back to back, queued while the device is busy for `lead_ms`."""
        ...

    def pause(self, seconds: float) -> None:
        """Let the device idle."""
        ...

    def finish(self) -> None:
        """Wait for the device; raises if it is lost."""
        ...


class DeviceTimer:
    """Takes device time by events.

    Before a sample a kernel spins on the device while the host queues the calls, so that they run
    back to back and host time is not in the sample: it is reported beside it.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a timer for a GPU.

        Args:
            device: A CUDA device.
        """
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def warm(self, call: IndexedCall, calls: int) -> None:
        """Queue calls that are not timed."""
        for i in range(calls):
            call(i)

    def sample(self, call: IndexedCall, calls: int, lead_ms: float) -> Sample:
        """Time `calls` calls behind a kernel that spins for about `lead_ms`."""
        collects = gc.isenabled()
        gc.disable()
        try:
            cast("Any", torch.cuda)._sleep(int(lead_ms * _CYCLES_PER_MS))
            self._start.record()
            before = time.perf_counter()
            for i in range(calls):
                call(i)
            host = time.perf_counter() - before
            self._end.record()
        finally:
            if collects:
                gc.enable()
        self._end.synchronize()
        return Sample(self._start.elapsed_time(self._end) / calls, host * 1e6 / calls)

    def pause(self, seconds: float) -> None:
        """Wait for the device, then let it idle."""
        self.finish()
        time.sleep(seconds)

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


@dataclass
class Runner:
    """A contender that is ready to be timed in one case.

    Attributes:
        name: The contender's name.
        call: Runs it on input set `i % sets`.
        sets: Number of input sets that it rotates through.
        scope: Makes the context inside which calls run.
        calls: Calls of a sample, found by `interleave`.
        warm_calls: Calls before a sample, found by `interleave`.
        lead_ms: How long the device must be kept busy while the host queues a sample.
    """

    name: str
    call: IndexedCall
    sets: int = 1
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    calls: int = 0
    warm_calls: int = 0
    lead_ms: float = 0.0


@dataclass
class Timed:
    """What `interleave` gives for one contender."""

    samples: list[Sample] = field(default_factory=list)
    calls: int = 0
    error: str | None = None


def _fit(runner: Runner, first: Sample, plan: Plan) -> None:
    """Size the samples of a contender by a first, rough one that holds no host time."""
    per_call = max(first.device_ms, 1e-4)
    wanted = max(plan.least_calls, math.ceil(plan.sample_ms / per_call))
    warm = max(1, math.ceil(plan.warm_ms / per_call))
    # Whole turns through the sets, so that the first timed call does not meet its set in the cache.
    runner.calls, runner.warm_calls = (
        math.ceil(min(n, _MOST_CALLS) / runner.sets) * runner.sets for n in (wanted, warm)
    )
    # The host must stay ahead of the device: by what it is slower over the whole sample, with a
    # fifth to spare on both sides, and by a few calls in any case.
    host_ms = first.host_us / 1000
    behind = max(0.0, 1.2 * host_ms - 0.8 * per_call)
    runner.lead_ms = 0.2 + 4 * host_ms + behind * runner.calls


def interleave(
    runners: Sequence[Runner],
    plan: Plan,
    timer: Timer,
    *,
    step: Callable[[str], None] = lambda name: None,
) -> Mapping[str, Timed]:
    """Time contenders in rotation, one sample of each a round.

    Args:
        runners: The contenders; each has run at least once before.
        plan: Rounds, lengths and pauses.
        timer: Takes the time.
        step: Told the name of the contender that is about to run.

    Returns:
        For each contender its samples, one a round and in the order of rounds; or the error that
        stopped it, in which case it takes no more part and has no samples.

    Raises:
        RuntimeError: If the device itself is lost: nothing more can run in this process.
    """
    result = {runner.name: Timed() for runner in runners}

    def attempt(runner: Runner, work: Callable[[], None]) -> None:
        if result[runner.name].error is not None:
            return
        step(runner.name)
        try:
            with runner.scope():
                work()
        except Exception as error:
            result[runner.name] = Timed(error=f"{type(error).__name__}: {error}")
            timer.finish()

    for runner in runners:

        def fit(runner: Runner = runner) -> None:
            timer.warm(runner.call, 2)
            host_ms = timer.sample(runner.call, 3, 1.0).host_us / 1000
            _fit(runner, timer.sample(runner.call, 3, 0.2 + 1.5 * 3 * host_ms), plan)
            result[runner.name].calls = runner.calls

        attempt(runner, fit)
    for order in rotation(len(runners), plan.rounds):
        for index in order:

            def take(runner: Runner = runners[index]) -> None:
                timer.pause(plan.pause_s)
                timer.warm(runner.call, runner.warm_calls)
                sample = timer.sample(runner.call, runner.calls, runner.lead_ms)
                result[runner.name].samples.append(sample)

            attempt(runners[index], take)
    return result
