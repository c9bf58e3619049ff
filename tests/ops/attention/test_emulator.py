"""Both kernels on the emulator: right by the accuracy rule, and no race, deadlock or misuse.

A kernel is compiled once for each test, then played under every schedule.
"""

from __future__ import annotations

import pytest
from tests.ops.attention import cases
from tests.ops.attention.emulated import (
    SCHEDULES,
    constants,
    forward_specs,
    gluon_calls,
    play,
    triton_calls,
)

from tileloom.ops.attention.config import gluon_rule, triton_rule
from tileloom.target import H100

LEVELS = ("ttgir", "machine")
CALLS = [*gluon_calls(), *triton_calls()]
ALL = {case.id: case for group in cases.GROUPS.values() for case in group}
HOPPER = [
    case
    for case in ALL.values()
    if not gluon_rule(cases.problem_of(case.inputs())).reasons_against(
        cases.problem_of(case.inputs()), H100
    )
]
named = {"ids": lambda value: getattr(value, "name", None) or getattr(value, "id", None)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("call", CALLS, **named)
def test_every_shipped_kernel(call, level):
    play(call.inputs(), call.config, level, arch=call.arch)


def test_the_calls_take_every_shipped_kernel():
    specs = {spec.name: spec for spec in forward_specs()}
    taken = set()
    for call in CALLS:
        spec = specs[call.name.removesuffix(f"-{call.arch}")]
        assert {name: spec.constexprs[name] for name, _ in constants(call)} == dict(constants(call))
        taken.add(spec.name)
    forward = [spec for spec in forward_specs() if spec.function.endswith(":attention_fwd_kernel")]
    rest = [spec for spec in forward if spec.name not in taken]
    assert {arch for spec in rest for arch in spec.archs} <= {"sm_100"}  # not emulated


@pytest.mark.parametrize("case", HOPPER, **named)
def test_hopper_kernel_on_every_case(case):
    inputs = case.inputs()
    play(inputs, gluon_rule(cases.problem_of(inputs)), "ttgir")


@pytest.mark.parametrize("case", ALL.values(), **named)
def test_portable_kernel_on_every_case(case):
    inputs = case.inputs()
    play(inputs, triton_rule(cases.problem_of(inputs), H100), "machine", [("late", 0)])


@pytest.mark.full
@pytest.mark.parametrize("case", HOPPER, **named)
def test_hopper_kernel_on_every_case_at_machine_level(case):
    inputs = case.inputs()
    play(inputs, gluon_rule(cases.problem_of(inputs)), "machine")


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", ALL.values(), **named)
def test_portable_kernel_on_every_case_and_schedule(case, level):
    inputs = case.inputs()
    play(inputs, triton_rule(cases.problem_of(inputs), H100), level, SCHEDULES)
