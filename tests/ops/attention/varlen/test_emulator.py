"""The kernels on packed sequences, on the emulator: forward and all gradients, no report."""

from __future__ import annotations

import pytest
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase
from tests.ops.attention.varlen.emulated import Play, hopper_plays

from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig

LEVELS = ("ttgir", "machine")
_PORTABLE = (TritonConfig(32, 16), TritonBackwardConfig(Tile(16, 32, 4), Tile(32, 16, 4)))
CASES = [
    case
    for group in ("reported", "plain", "shown", "biased", "dropped")
    for case in cases.GROUPS[group]
    if case.lens_q
]
HOPPER = [
    case
    for case in CASES
    if case.dtype != cases.FP32
    and case.layout in ("contiguous", "gapped")
    and case.options.get("scale", 1.0) > 0
    and not case.options.get("dropout_p")
]


def _hopper(case: VarlenCase) -> Play:
    """The play on small tiles; the backward takes no bias and no bool mask."""
    is_scored = case.bias is not None or case.name.startswith("mask")
    store = "tma" if case.sizes[2] == case.sizes[3] else "registers"
    backward = None if is_scored else GluonSm90BackwardConfig(64, 2)
    return Play(case, GluonSm90Config(2, 32, 2, store), backward)


named = {"ids": lambda value: getattr(value, "name", None) or getattr(value, "id", None)}


@pytest.mark.parametrize("case", CASES, **named)
def test_the_portable_kernels(case):
    Play(case, *_PORTABLE, arch="sm_90").run("ttgir", [("late", 0)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("play", hopper_plays(), **named)
def test_every_shipped_hopper_kernel(play, level):
    play.run(level)


@pytest.mark.parametrize("case", HOPPER, **named)
def test_the_hopper_kernels_on_every_case(case):
    _hopper(case).run("machine", [("late", 0), ("random", 1)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases.DROPPED, **named)
def test_dropout_in_the_hopper_kernels(case, level):
    _hopper(case).run(level, [("late", 0), ("random", 1)])
