"""The gradient of a shared bias by its own kernel on the emulator; `CASES` for its mutants.

    tileloom check tests/ops/attention/emulated_dbias.py --sms 2 [--mutate --kernels KERNEL_FILE]

Of the backward only this kernel runs, on what the reference makes of the rest. A program takes
several tiles, odd ones too, and fills every slot of its ring more than twice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, AttentionCase
from tests.ops.attention.emulated_backward import modes_of

from tileloom import masks
from tileloom.bench.gradients import joined
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.launch_gluon_sm90_dbias import bind_dbias
from tileloom.testing import assert_accurate, poisoned_memory


def _checked(case: AttentionCase) -> None:
    """Run and judge the kernel inside a run of the emulator that is there already."""
    inputs, config = case.inputs(), GluonSm90BackwardConfig()
    given = gradients.upstream(inputs, with_lse=False)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.options["bias"]
    problem = replace(cases.problem_of(inputs), scale=q.shape[3] ** -0.5)
    mask = inputs.options.get("mask")
    lengths = None if mask is None else mask.lengths
    out, lse = attention_reference(q, k, v, **inputs.options, return_lse=True)
    padded = problem.blocks_q(config.block_m) // problem.batch * config.block_m
    delta = torch.zeros(*lse.shape[:2], padded)
    delta[..., : problem.len_q] = -(given.dout.float() * out.float()).sum(3)
    with poisoned_memory():
        dbias = torch.empty_like(bias)
        scores = modes_of(inputs, config)
        launch = bind_dbias(
            problem, scores, config.block_m, (q, k, v, given.dout), bias, dbias, lengths
        )
        assert launch is not None, "the kernel takes the case"
        tensors = (q, k, v, given.dout, bias, dbias, lse, torch.ones_like(lse), delta)
        launch(*tensors, *(() if lengths is None else (lengths,)))
    right = gradients.of_reference(inputs, given, torch.float64)[3]
    baseline = gradients.of_baseline(inputs, given)[3]
    assert_accurate(joined(dbias), joined(right), joined(baseline.to(bias.dtype)), name="dbias")


_WINDOW = masks.window(70, 9, anchor="bottom_right")
CASES = {
    case.name: partial(_checked, case)
    for case in (
        AttentionCase(
            "batches", (3, 2, 1, 71, 264, 64, 64), BF16, bias=cases.added((2, 71, 264))
        ),
        AttentionCase(
            "window-lengths", (3, 2, 1, 136, 264, 128, 128), FP16,
            mask=cases.lengths(264, 90, 0, dtype=torch.int32, then=_WINDOW),
            bias=cases.added((1, 136, 264)),
        ),
    )
}  # fmt: skip
