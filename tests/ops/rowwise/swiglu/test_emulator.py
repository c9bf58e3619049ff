"""SwiGLU's kernels on the emulator: right by the accuracy rule, no race, no misuse."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.swiglu import cases

from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.ops.rowwise.swiglu import swiglu
from tileloom.testing import poisoned_memory

SCHEDULES = [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]


def judged(case: cases.SwigluCase, schedule: str, seed: int, level: str = "machine") -> None:
    inputs = case.inputs()
    with (
        emulator.run(schedule=schedule, level=level, seed=seed, sms=2) as run,
        poisoned_memory(),
        record_choices() as made,
    ):
        results = cases.run(case, inputs)
    assert [choice.backend for choice in made] == ["triton"] * 2
    assert [launch.kernel for launch in run.launches] == ["swiglu_fwd_kernel", "swiglu_bwd_kernel"]
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    cases.check(inputs, results)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_kernels(case):
    """Compiled once for a case, then played under every schedule."""
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_kernels_before_their_memory_is_placed(case):
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed, "ttgir")


def test_contiguous_tensors_are_one_long_row():
    x = torch.randn(300, 3)
    with emulator.run() as run:
        swiglu(x, x)
    assert run.launches[0].grid == (1, 1, 1)


def test_infinities_are_those_of_the_formula():
    gate = torch.tensor([[float("inf"), -float("inf"), 1e30, -1e30, float("nan"), 0.0]])
    up = torch.full_like(gate, 2.0)
    with emulator.run():
        out = swiglu(gate, up)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(shape):
    case = cases.SwigluCase(shape)
    inputs = [torch.randn(shape) for _ in range(3)]
    with emulator.run() as run:
        results = cases.run(case, inputs)
    assert [r.shape for r in results] == [shape] * 3
    assert not run.launches
