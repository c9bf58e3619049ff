"""Launches with `launch_pdl`: what they touch of those ahead before `gdc_wait` is named."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tileloom import emulator
from tileloom.device.grids import gdc_launch_dependents, gdc_wait


@triton.jit
def doubled(x_ptr, y_ptr, BLOCK: tl.constexpr, DEPENDENTS: tl.constexpr, WAITS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENTS == "first":
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    if DEPENDENTS == "last":
        gdc_launch_dependents()
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


FIRST, LAST, NEVER = "first", "last", "never"
# source, target, when dependents may start, whether it waits, launch_pdl
RIGHT = {
    "waits": [("x", "a", FIRST, False, False), ("a", "b", NEVER, True, True)],
    "launched as ever": [("x", "a", FIRST, False, False), ("a", "b", NEVER, False, False)],
    "other tensors": [("x", "a", FIRST, False, False), ("x", "b", NEVER, False, True)],
    "overwrites what has been read, for all have ended": [
        ("x", "a", NEVER, False, False), ("b", "x", NEVER, False, True)
    ],
    "the middle one waits": [
        ("x", "a", FIRST, False, False), ("x", "b", FIRST, True, True),
        ("a", "c", NEVER, True, True),
    ],
    "the middle one waits before it lets others start": [
        ("x", "a", FIRST, False, False), ("x", "b", LAST, True, True),
        ("a", "c", NEVER, False, True),
    ],
    "a launch as ever waits for all": [
        ("x", "a", FIRST, False, False), ("x", "b", FIRST, False, True),
        ("a", "c", NEVER, False, False),
    ],
}  # fmt: skip
WRONG = {
    "reads": [("x", "a", FIRST, False, False), ("a", "b", NEVER, False, True)],
    "reads, and all have ended": [("x", "a", NEVER, False, False), ("a", "b", NEVER, False, True)],
    "overwrites": [("x", "a", FIRST, False, False), ("b", "x", NEVER, False, True)],
    "writes twice": [("x", "a", FIRST, False, False), ("b", "a", NEVER, False, True)],
    "the middle one does not wait": [
        ("x", "a", FIRST, False, False), ("x", "b", FIRST, False, True),
        ("a", "c", NEVER, True, True),
    ],
    "the middle one lets others start first": [
        ("x", "a", FIRST, False, False), ("x", "b", FIRST, True, True),
        ("a", "c", NEVER, False, True),
    ],
}  # fmt: skip


def launch(launches, **options):
    tensors = {name: torch.zeros(256) for name in "abc"} | {"x": torch.randn(256)}
    with emulator.run(**options) as run:
        for source, target, dependents, waits, early in launches:
            doubled[(2,)](
                tensors[source], tensors[target], 128, dependents, waits, launch_pdl=early
            )
    return run


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_no_race(name):
    assert launch(RIGHT[name]).reports == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_ordered_is_a_race(name):
    with pytest.raises(emulator.RaceError) as caught:
        launch(WRONG[name])
    text = str(caught.value)
    assert "by partition 'main', program (0, 0, 0) of the kernel 'doubled' launched before)" in text
    assert "hint a launch with launch_pdl begins while those ahead of it" in text
    assert "gdc_wait() must come first" in text
    assert "| tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)" in text


def test_runs_know_nothing_of_one_another():
    x, y, z = torch.randn(256), torch.zeros(256), torch.zeros(256)
    with emulator.run():
        doubled[(2,)](x, y, 128, FIRST, False)
    with emulator.run() as run:
        doubled[(2,)](y, z, 128, NEVER, False, launch_pdl=True)
    assert run.reports == []
    assert torch.equal(z, x * 4)


def test_a_long_row_of_such_launches_is_judged_to_its_end():
    right = [("x", "a", FIRST, True, True), ("a", "x", FIRST, True, True)] * 40
    assert launch(right).reports == []
    with pytest.raises(emulator.RaceError):
        launch([*right, ("a", "b", NEVER, False, True)])
