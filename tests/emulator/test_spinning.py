"""Loops that wait by atomics of every order: right kernels end, and those that cannot are named."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom import emulator
from tileloom.device.compat import thread_barrier

SCHEDULES = ["late", "eager", "random"]
LEVELS = ["ttir", "ttgir", "machine"]
ORDERS = ["relaxed", "acquire", "release", "acq_rel"]
FULL = ["acquire", "acq_rel"]  # those after which the waiting program may read


@triton.jit
def look(flag, HOW: tl.constexpr, SEM: tl.constexpr):
    """Read a flag by a read-modify-write that leaves it as it was, as long as it is 0."""
    if HOW == "cas":
        return tl.atomic_cas(flag, 1, 1, sem=SEM)
    elif HOW == "add":
        return tl.atomic_add(flag, 0, sem=SEM)
    elif HOW == "or":
        return tl.atomic_or(flag, 0, sem=SEM)
    elif HOW == "and":
        return tl.atomic_and(flag, 3, sem=SEM)
    elif HOW == "xor":
        return tl.atomic_xor(flag, 0, sem=SEM)
    elif HOW == "max":
        return tl.atomic_max(flag, 0, sem=SEM)
    elif HOW == "min":
        return tl.atomic_min(flag, 3, sem=SEM)
    else:
        return tl.atomic_cas(flag, 7, 8, sem=SEM)


LOOKS = ["cas", "add", "or", "and", "xor", "max", "min", "cas that fails"]


@triton.jit
def handed_over(part, flag, out, HOW: tl.constexpr, SEM: tl.constexpr, SIGNAL: tl.constexpr):
    at = tl.arange(0, 64)
    if tl.program_id(0) == 0:
        while look(flag, HOW, SEM) != 1:
            pass
        tl.store(out + at, tl.load(part + at) + 1)
    else:
        tl.store(part + at, at.to(tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(flag, SIGNAL)


@gluon.jit
def handed_over_in_gluon(
    part, flag, out, HOW: gl.constexpr, SEM: gl.constexpr, SIGNAL: gl.constexpr
):
    at = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    if gl.program_id(0) == 0:
        seen = gl.atomic_cas(flag, 1, 1, sem=SEM)
        while seen != 1:
            seen = gl.atomic_cas(flag, 1, 1, sem=SEM)
        gl.store(out + at, gl.load(part + at) + 1)
    else:
        gl.store(part + at, at.to(gl.float32))
        thread_barrier()
        gl.atomic_xchg(flag, SIGNAL)


@triton.jit
def handed_over_by_branches(
    part, flag, out, HOW: tl.constexpr, SEM: tl.constexpr, SIGNAL: tl.constexpr
):
    """An early return makes the compiler draw loops as branches."""
    at = tl.arange(0, 64)
    if tl.program_id(0) == 1:
        tl.store(part + at, at.to(tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(flag, SIGNAL)
        return
    while look(flag, HOW, SEM) != 1:
        pass
    tl.store(out + at, tl.load(part + at) + 1)


def play(kernel, how="cas", sem="acq_rel", signal=1, **options):
    flag, part, out = torch.zeros(1, dtype=torch.int32), torch.zeros(64), torch.zeros(64)
    with emulator.run(**{"max_steps": 5_000, **options}) as run:
        kernel[(2,)](part, flag, out, how, sem, signal)
    assert torch.equal(out, torch.arange(64.0) + 1)
    return run


KERNELS = [handed_over, handed_over_in_gluon, handed_over_by_branches]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_partial_sum_is_waited_for(schedule, level, kernel):
    if kernel is handed_over_in_gluon and level == "ttir":
        level = "ttgir"
    for sem in FULL:
        assert play(kernel, sem=sem, schedule=schedule, level=level).reports == []


@pytest.mark.parametrize("how", LOOKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_leaves_memory_as_it_was_is_a_look(schedule, how):
    for sem in FULL:
        assert play(handed_over, how, sem, schedule=schedule).reports == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_decides_about_the_race_and_not_about_the_end(schedule):
    for sem in ORDERS:
        run = play(handed_over, sem=sem, schedule=schedule, collect=True)
        assert [r.kind for r in run.reports] == ([] if sem in FULL else ["race"])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_signal_that_never_comes_is_a_deadlock(schedule, kernel):
    for sem in ORDERS:
        with pytest.raises(emulator.DeadlockError) as caught:
            play(kernel, sem=sem, signal=2, schedule=schedule, max_steps=500)
        text = str(caught.value)
        line = "seen != 1" if kernel is handed_over_in_gluon else "look(flag, HOW, SEM)"
        assert f"while {line}" in text
        assert "spins on global memory" in text
        assert "nobody that is left writes what a loop reads again and again" in text


@triton.jit
def counted(lock, serving, count, HOW: tl.constexpr, LEAVE: tl.constexpr):
    """Add 1 under a lock; the last but `LEAVE` programs give it back."""
    if HOW == "mutex":
        while tl.atomic_cas(lock, 0, 1) != 0:
            pass
    elif HOW == "test and set":
        while tl.atomic_xchg(lock, 1) != 0:
            pass
    else:
        ticket = tl.atomic_add(lock, 1)
        while tl.atomic_add(serving, 0) != ticket:
            pass
    seen = tl.load(count)
    tl.store(count, seen + 1)
    tl.debug_barrier()
    if seen < LEAVE:
        if HOW == "ticket":
            tl.atomic_add(serving, 1)
        else:
            tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("how", ["mutex", "test and set", "ticket"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_locks(schedule, how):
    for level in LEVELS:
        lock, serving, count = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
        with emulator.run(schedule=schedule, level=level, max_steps=20_000) as run:
            counted[(6,)](lock, serving, count, how, 6)
        assert (count.item(), run.reports) == (6, [])
    lock, serving, count = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    line = {"mutex": "atomic_cas", "test and set": "atomic_xchg", "ticket": "serving, 0"}[how]
    with (
        pytest.raises(emulator.DeadlockError, match=f"{line}.*spins on global memory"),
        emulator.run(schedule=schedule, max_steps=20_000),
    ):
        counted[(6,)](lock, serving, count, how, 2)
    assert count.item() == 3


@triton.jit
def beating(flag, beats, out, BOUND: tl.constexpr):
    """A loop that waits and writes too: it counts its turns in memory."""
    if tl.program_id(0) == 0:
        if BOUND:
            seen = 0
            for _ in range(6_000):
                if seen == 0:
                    seen = tl.atomic_add(flag, 0)
                    tl.atomic_add(beats, 1)
        else:
            seen = tl.atomic_add(flag, 0)
            while seen == 0:
                seen = tl.atomic_add(flag, 0)
                tl.atomic_add(beats, 1)
        tl.store(out, seen)
    else:
        tl.atomic_add(flag, 5)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_that_waits_and_writes_lets_others_act(schedule, bound):
    flag, beats, out = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    with emulator.run(schedule=schedule, max_steps=50_000) as run:
        beating[(2,)](flag, beats, out, bound)
    assert (out.item(), run.reports) == (5, [])


@triton.jit
def counts_down(flag, out, N: tl.constexpr):
    left = N
    while (tl.atomic_add(flag, 0) == 0) & (left > 0):
        left -= 1
    tl.store(out, left)


def test_a_loop_that_gives_up_is_no_deadlock():
    flag, out = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with emulator.run(max_steps=20_000):
        counts_down[(1,)](flag, out, 500)
    assert out.item() == 0


def test_the_hint_names_who_has_had_no_turn():
    flag, beats, out = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    with pytest.raises(emulator.StepLimitError) as caught, emulator.run(max_steps=1_000):
        beating[(2,)](flag, beats, out, False)
    assert "partition 'main' of program (1, 0, 0): not started" in str(caught.value)
    assert (
        "hint partition 'main' of program (1, 0, 0) has had no turn yet: if the loop waits for it"
    ) in str(caught.value)


@triton.jit
def polled_in_ptx(flag, out, SIGNAL: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.inline_asm_elementwise(
            "{.reg .pred p; .reg .b32 v; L: atom.acq_rel.gpu.global.cas.b32 v, [$1], 1, 1; "
            "fence.acq_rel.gpu; setp.ne.s32 p, v, 1; @p bra L; mov.b32 $0, v;}",
            "=r,l", [flag], tl.int32, False, 1,
        )  # fmt: skip
        tl.store(out, tl.load(out) + 1)
    else:
        tl.store(out, 3)
        tl.debug_barrier()
        tl.atomic_xchg(flag, SIGNAL)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_in_ptx(schedule):
    flag, out = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    with emulator.run(schedule=schedule, max_steps=5_000) as run:
        polled_in_ptx[(2,)](flag, out, 1)
    assert (out.item(), run.reports) == (4, [])
    with (
        pytest.raises(emulator.DeadlockError, match="spins on global memory"),
        emulator.run(schedule=schedule),
    ):
        polled_in_ptx[(2,)](torch.zeros_like(flag), out, 2)


@triton.jit
def waits_for_the_top(top, out):
    if tl.program_id(0) == 0:
        while tl.atomic_max(top, 0.0) < 1:
            pass
        tl.store(out, 1)
    else:
        tl.atomic_max(top, 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_maximum_of_floats_is_a_look(schedule):
    out = torch.zeros(1)
    with emulator.run(schedule=schedule, max_steps=5_000):
        waits_for_the_top[(2,)](torch.zeros(1), out)
    assert out.item() == 1
    with pytest.raises(emulator.DeadlockError), emulator.run(schedule=schedule, max_steps=5_000):
        waits_for_the_top[(1,)](torch.zeros(1), out)
