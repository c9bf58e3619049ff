import gc
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from tests.bench.fakes import FakeTimer

from tileloom.bench import DeviceTimer, Plan, affordable_rounds, interleave
from tileloom.bench.timer import Runner, rotation

PLAN = Plan(rounds=6, sample_ms=10.0, warm_ms=5.0, pause_s=0.25)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_every_round_has_every_contender_once(n):
    assert all(sorted(order) == list(range(n)) for order in rotation(n, 11))
    assert len(rotation(n, 11)) == 11


@pytest.mark.parametrize("n", [2, 4, 6])
def test_each_follows_each_equally_often_and_stands_once_in_each_place(n):
    orders = rotation(n, n)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert set(follows.values()) == {1}
    assert len(follows) == n * (n - 1)
    assert all(sorted(order[place] for order in orders) == list(range(n)) for place in range(n))


@pytest.mark.parametrize("n", [3, 5, 7])
def test_an_odd_number_is_balanced_over_twice_as_many_rounds(n):
    orders = rotation(n, 2 * n)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert set(follows.values()) == {2}
    assert len(follows) == n * (n - 1)


def test_no_contender_no_order():
    assert rotation(0, 2) == [[], []]


def _runner(name, timer, ms, host_us=1.0, log=None, **options):
    def call(i):
        if log is not None:
            log.append((name, i))
        timer.spend(ms, host_us)

    return Runner(name, call, **options)


def test_contenders_take_turns_in_the_order_of_the_rotation():
    timer, steps = FakeTimer(), []
    runners = [_runner(name, timer, 1.0) for name in "abc"]
    timed = interleave(runners, PLAN, timer, step=steps.append)
    turns = ["abc"[i] for order in rotation(3, 6) for i in order]
    assert steps == [*"abc", *turns]  # once to size the samples, then the rounds
    assert [len(timed[name].samples) for name in "abc"] == [6, 6, 6]
    assert timer.pauses == [0.25] * 18


def test_times_are_per_call():
    timer = FakeTimer()
    timed = interleave([_runner("a", timer, 2.5, host_us=30.0)], PLAN, timer)
    assert {s.device_ms for s in timed["a"].samples} == {2.5}
    assert all(s.host_us == pytest.approx(30.0) for s in timed["a"].samples)


@pytest.mark.parametrize(
    ("ms", "sets", "calls"),
    [
        (1.0, 1, 10),  # ten times 1 ms is the 10 ms of the plan
        (3.0, 1, 4),
        (30.0, 1, 2),  # never fewer than two calls
        (3.0, 3, 6),  # whole turns through the sets
        (0.002, 1, 300),  # never more than the queue of the driver can hold
    ],
)
def test_samples_are_long_enough_and_whole(ms, sets, calls):
    timer = FakeTimer()
    runner = _runner("a", timer, ms, sets=sets)
    timed = interleave([runner], PLAN, timer)
    assert timed["a"].calls == runner.calls == calls
    assert {n for n, _ in timer.samples[2:]} == {calls}
    assert runner.warm_calls % sets == 0


def test_sets_take_turns_and_a_sample_does_not_begin_with_the_set_of_the_last_call():
    timer, log = FakeTimer(), []
    runner = _runner("a", timer, 3.0, log=log, sets=2)
    interleave([runner], Plan(1, sample_ms=6.0, warm_ms=4.0, pause_s=0), timer)
    sets = [i % 2 for _, i in log[8:]]  # after the two warm calls and the six that size it
    assert sets == [0, 1, 0, 1]


def test_a_slow_host_gets_the_lead_that_it_needs():
    """Host time must not be in the sample: the device is kept busy until the queue is long enough.

    With 0.4 ms of host time and 0.125 ms of device time a call, 80 calls are queued in 32 ms and
    run in 10 ms.
    """
    timer = FakeTimer()
    runner = _runner("a", timer, 0.125, host_us=400.0)
    interleave([runner], PLAN, timer)
    assert runner.calls == 80
    assert runner.lead_ms >= runner.calls * (0.4 - 0.125)


def test_a_fast_host_gets_a_short_lead():
    timer = FakeTimer()
    runner = _runner("a", timer, 1.0, host_us=50.0)
    interleave([runner], PLAN, timer)
    assert 4 * 0.05 <= runner.lead_ms < 1.0


def test_calls_run_inside_the_scope():
    inside, seen = [False], []

    @contextmanager
    def scope():
        inside[0] = True
        yield
        inside[0] = False

    timer = FakeTimer()

    def call(i):
        seen.append(inside[0])
        timer.spend(1.0)

    interleave([Runner("a", call, scope=scope), _runner("b", timer, 1.0)], PLAN, timer)
    assert all(seen)
    assert not inside[0]


def test_one_that_raises_leaves_the_rotation_with_its_error():
    timer, calls = FakeTimer(), []

    def call(i):
        calls.append(i)
        timer.spend(1.0)
        if len(calls) > 20:
            raise RuntimeError("out of luck")

    timed = interleave([Runner("bad", call), _runner("good", timer, 1.0)], PLAN, timer)
    assert timed["bad"].error == "RuntimeError: out of luck"
    assert timed["bad"].samples == []
    assert len(calls) == 21
    assert len(timed["good"].samples) == 6
    assert timed["good"].error is None


def test_a_lost_device_ends_everything():
    timer = FakeTimer()

    def call(i):
        timer.lost = True
        raise RuntimeError("the kernel faulted")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        interleave([Runner("bad", call), _runner("good", timer, 1.0)], PLAN, timer)


def test_the_device_timer_queues_the_calls_behind_a_spinning_kernel(monkeypatch):
    """Start is recorded after the spin, end after the last call, and only then it waits."""
    log = []

    class Event:
        made = 0

        def __init__(self, *, enable_timing):
            assert enable_timing
            self.name = ("start", "end")[Event.made]
            Event.made += 1

        def record(self):
            log.append(f"record {self.name}")

        def synchronize(self):
            log.append(f"wait {self.name}")

        def elapsed_time(self, other):
            assert (self.name, other.name) == ("start", "end")
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"spin {cycles}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("finish"))
    timer = DeviceTimer(torch.device("cpu"))
    sample = timer.sample(lambda i: log.append(i), 3, 2.5)
    assert sample.device_ms == 4.0
    assert 0 < sample.host_us < 1e5
    assert log == ["spin 5000000", "record start", 0, 1, 2, "record end", "wait end"]
    log.clear()
    timer.pause(0.0)
    timer.warm(lambda i: log.append(i), 2)
    assert log == ["finish", 0, 1]
    assert gc.isenabled()


def test_rounds_shrink_only_as_far_as_verdicts_are_possible():
    plan = Plan(9, sample_ms=40.0, warm_ms=20.0, pause_s=0.03)
    assert affordable_rounds(plan, 6, 18, 230.0) == 9
    assert affordable_rounds(plan, 6, 18, 100.0) == 6
    assert affordable_rounds(plan, 6, 18, 10.0) == 5
    assert affordable_rounds(plan, 6, 18, -10.0) == 5
    assert affordable_rounds(Plan(3), 6, 18, -10.0) == 3
