"""Packed calls on the emulator: what plays them, and judges O, LSE and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.ops.attention.emulated import SCHEDULES, SMS
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase

from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.testing import poisoned_memory


def play(
    case: VarlenCase,
    config: Any,
    backward: Any,
    *,
    level: str = "ttgir",
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    arch: str = "sm_90a",
) -> None:
    """Run a call and its backward under several schedules, in poisoned memory."""
    inputs = case.inputs()
    before = [t.clone() for t in inputs.tensors]
    for schedule, seed in schedules:
        with (
            emulator.run(arch=arch, schedule=schedule, level=level, seed=seed, sms=SMS) as run,
            poisoned_memory(),
            record_choices() as made,
        ):
            out, lse = cases.call(inputs, config=config)
            found = cases.gradients(inputs, config=config, backward_config=backward)
        assert {choice.config for choice in made} == {config, backward}
        for tensor, copy in zip(inputs.tensors, before):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
        try:
            cases.check(inputs, out, lse)
            cases.check_gradients(inputs, found)
        except AssertionError as error:
            error.add_note(f"under schedule {schedule!r}, seed {seed}, level {level!r}")
            raise
        assert [r.text() for r in run.reports if r.severity != "info"] == []
