"""Packed calls on the emulator: what plays them, and judges O, LSE and every gradient.

tileloom check tests/ops/attention/varlen/emulated.py --sms 2 [--mutate --kernels KERNEL_FILE]

`CASES` are the forward's; `emulated_backward.py` has the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.ops.attention.cases import BF16
from tests.ops.attention.emulated import SCHEDULES, SMS, gluon_config, head_dims
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase

from tileloom import emulator, masks
from tileloom.ops import record_choices
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.kernels import shipped
from tileloom.testing import poisoned_memory


@dataclass(frozen=True)
class Play:
    """How a packed call is played, and by which configs; without one only the other runs."""

    case: VarlenCase
    config: Any = None
    backward: Any = None
    arch: str = "sm_90a"
    name: str = ""

    def run(self, level: str, schedules: Sequence[tuple[str, int]] = SCHEDULES) -> None:
        """Run it under several schedules, in poisoned memory; judge values and reports."""
        inputs = self.case.poisoned()
        before = [t.clone() for t in inputs.tensors]
        wanted = {config for config in (self.config, self.backward) if config is not None}
        for schedule, seed in schedules:
            out = lse = found = None
            with (
                emulator.run(
                    arch=self.arch, schedule=schedule, level=level, seed=seed, sms=SMS
                ) as run,
                poisoned_memory(),
                record_choices() as made,
            ):
                if self.config is not None:
                    out, lse = cases.call(inputs, config=self.config)
                if self.backward is not None:
                    found = cases.gradients_by(inputs, self.backward.encode())
            assert {choice.config for choice in made} == wanted
            for tensor, copy in zip(inputs.tensors, before):
                assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
            try:
                if out is not None and lse is not None:
                    cases.check(inputs, out, lse)
                if found is not None:
                    cases.check_gradients(inputs, found)
            except AssertionError as error:
                error.add_note(f"under schedule {schedule!r}, seed {seed}, level {level!r}")
                raise
            assert [r.text() for r in run.reports if r.severity != "info"] == []


def hopper_plays() -> list[Play]:
    """A call for each shipped form of the Hopper kernels for packed sequences.

    More tiles than programs, sequences of one tile and of several, an empty one and one without
    keys; the longest takes more steps than twice the pipeline's depth.
    """
    plays: list[Play] = []
    for spec in shipped():
        if "packed" not in spec.name or not spec.gluon:
            continue
        config = backward = None
        if spec.name.startswith("attention_fwd"):
            config = gluon_config(spec)
            rows, keys = config.block_m + 7, 2 * config.block_n * config.stages + 21
        else:
            found = re.search(r"-(\d+)x(\d+)\]$", spec.name)
            assert found is not None
            is_ordered = spec.signature.get("progress", "constexpr") != "constexpr"
            backward = GluonSm90BackwardConfig(
                int(found[1]),
                int(found[2]),
                is_ordered,
                persistent=spec.signature.get("counter") == "*i32",
            )
            rows, keys = backward.block_m * (2 * backward.stages) + 7, 150
        mask = masks.causal("bottom_right") if spec.constexprs["HAS_RIGHT"] else None
        sizes = (2, 1, *head_dims(spec))
        lens = ((rows, 0, 30, 65), (keys, 5, 0, 41))
        options = {"dropout_p": 0.3} if spec.constexprs.get("DROPOUT") else {}
        c = spec.constexprs
        has_bias = c.get("BIAS_MODE") or c.get("BIAS")
        dims = "HQK" if "BIAS_MODE" in c else "SHQK"  # with a gradient for each score
        bias = cases.added(*dims) if has_bias else None
        case = VarlenCase(spec.name, *lens, sizes, BF16, mask=mask, bias=bias, options=options)
        plays.append(Play(case, config, backward, name=spec.name))
    return plays


def checked(play: Play) -> None:
    """Run and judge a call inside a run of the emulator that is there already."""
    inputs = play.case.poisoned()
    with poisoned_memory():
        if play.config is not None:
            cases.check(inputs, *cases.call(inputs, config=play.config))
        if play.backward is not None:
            cases.check_gradients(inputs, cases.gradients_by(inputs, play.backward.encode()))


CASES = {
    play.name: partial(checked, play)
    for play in hopper_plays()
    if "d64-" in play.name and play.config is not None
}
