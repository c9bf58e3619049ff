"""The portable kernels on packed sequences, on the emulator: forward and all gradients."""

from __future__ import annotations

import pytest
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.emulated import play

from tileloom.ops.attention.config import TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig

_TILE = Tile(16, 16, 4)
_PORTABLE = (TritonConfig(32, 16), TritonBackwardConfig(Tile(16, 32, 4), Tile(32, 16, 4)))
CASES = [
    case
    for group in ("reported", "plain", "shown", "biased")
    for case in cases.GROUPS[group]
    if case.lens_q
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_portable_kernels(case):
    play(case, *_PORTABLE, schedules=(("late", 0),), arch="sm_90")
