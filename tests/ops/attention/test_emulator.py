"""Both kernels on the emulator: right by the accuracy rule, and no race, deadlock or misuse."""

from __future__ import annotations

import pytest
from tests.ops.attention import cases

import tileloom
from tileloom import emulator
from tileloom.ops.attention.config import gluon_rule, triton_rule
from tileloom.target import H100

ALL = {case.id: case for group in cases.GROUPS.values() for case in group}
HOPPER = [
    case
    for case in ALL.values()
    if not gluon_rule(cases.problem_of(case.inputs())).reasons_against(
        cases.problem_of(case.inputs()), H100
    )
]
SOME = [case for n, case in enumerate(HOPPER) if n % 6 == 0 or "contradiction" in case.id]
RUNS = [
    ("late", "ttgir", 0),
    ("eager", "ttgir", 0),
    ("random", "ttgir", 1),
    ("random", "machine", 2),
]


def judged(case, config, schedule, level, seed):
    inputs = case.inputs()
    with emulator.run(schedule=schedule, level=level, seed=seed, sms=4) as run:
        out, lse = tileloom.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, config=config
        )
    cases.check(inputs, out, lse)
    assert run.launches
    assert [r.text() for r in run.reports if r.severity != "info"] == []


@pytest.mark.parametrize(("schedule", "level", "seed"), RUNS, ids=str)
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_hopper_kernel(case, schedule, level, seed):
    config = gluon_rule(cases.problem_of(case.inputs()))
    judged(case, config, schedule, level, seed)


@pytest.mark.parametrize("case", list(ALL.values())[::6], ids=lambda case: case.id)
def test_portable_kernel(case):
    config = triton_rule(cases.problem_of(case.inputs()), H100)
    judged(case, config, "late", "machine", 0)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "level", "seed"), RUNS, ids=str)
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.id)
def test_hopper_kernel_on_every_case(case, schedule, level, seed):
    test_hopper_kernel(case, schedule, level, seed)
