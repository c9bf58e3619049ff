"""Programs that share a row and meet: right in every schedule, and the emulator sees each fault."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.split_kernels import sum_kernel

from tileloom import emulator
from tileloom.launch.launcher import prepare

ROWS, PARTS, BLOCK = 5, 3, 32


def run(meeting: str, schedule: str = "late", seed: int = 0, level: str = "machine"):
    x = torch.arange(ROWS * PARTS * BLOCK, dtype=torch.float32)
    out = torch.full((ROWS, PARTS), float("nan"))
    words = torch.full((1 + ROWS * PARTS,), -1, dtype=torch.int32)
    with emulator.run(schedule=schedule, seed=seed, level=level, sms=4, max_steps=2_000) as done:
        prepare(sum_kernel, num_warps=1)[(ROWS * PARTS,)](x, out, words, PARTS, meeting, 4, BLOCK)
    return out, x.view(ROWS, -1).sum(1), done.reports


@pytest.mark.parametrize(
    ("schedule", "seed"), [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]
)
def test_every_part_sees_all_others(schedule, seed):
    out, expected, reports = run("right", schedule, seed)
    assert out.tolist() == expected[:, None].expand(-1, PARTS).tolist()
    assert not reports


@pytest.mark.parametrize(
    ("meeting", "error"),
    [
        ("plain store", emulator.RaceError),
        ("plain load", emulator.RaceError),
        ("one is silent", emulator.ReportError),  # a deadlock, or steps without end
    ],
)
def test_a_meeting_that_is_none_is_reported(meeting, error):
    with pytest.raises(error):
        run(meeting)
