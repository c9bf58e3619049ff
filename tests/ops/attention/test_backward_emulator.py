"""The portable backward on the emulator: right gradients, no stray access, no race, same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.emulated import SCHEDULES

import tileloom
from tileloom import emulator, masks
from tileloom.ops import record_choices
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import (
    Tile,
    TritonBackwardConfig,
    triton_backward_rule,
)
from tileloom.target import H100
from tileloom.testing import poisoned_memory

ALL = {case.id: case for group in cases.GROUPS.values() for case in group}
SMALL = TritonBackwardConfig(Tile(32, 32, 4), Tile(32, 32, 4))
CHUNKED = TritonBackwardConfig(Tile(16, 32, 4, 1, 16), Tile(32, 16, 4, 1, 16))
named = {"ids": lambda value: getattr(value, "id", None)}


def config_for(case: AttentionCase) -> TritonBackwardConfig:
    """A small config, so that small calls have several tiles; float32 and wide heads in chunks."""
    is_wide = max(case.sizes[5:]) > 128
    return CHUNKED if is_wide or case.dtype == FP32 else SMALL


def play(case, config, level, schedules=SCHEDULES, arch="sm_90a"):
    """Run the backward under several schedules: right, clean, and the same bits in all."""
    inputs = case.inputs()
    given = gradients.upstream(inputs)
    clean = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    first = None
    for schedule, seed in schedules:
        with (
            emulator.run(arch=arch, schedule=schedule, level=level, seed=seed, sms=2) as run,
            poisoned_memory(),
            record_choices() as made,
        ):
            results = gradients.of_operator(inputs, given, config.encode())
        assert [choice.config for choice in made] == [config]
        assert [r.text() for r in run.reports if r.severity != "info"] == []
        for tensor, copy in zip((inputs.q, inputs.k, inputs.v), clean):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results))
    gradients.check(inputs, given, first)


_WINDOW = cases.lengths(90, 41, dtype=torch.int32, then=masks.window(40, 3, anchor="bottom_right"))
_SIZES = (2, 2, 1, 70, 90, 32, 32)
FORMS = [
    AttentionCase("full", (1, 2, 1, 70, 90, 40, 24), BF16),
    AttentionCase("causal", (1, 2, 2, 70, 90, 32, 32), options={"is_causal": True}),
    AttentionCase("window-lengths", _SIZES, BF16, mask=_WINDOW),
    AttentionCase("mask-nan", _SIZES, mask=cases.visible((2, 70, 90)), hide=slice(33, 61)),
    AttentionCase(
        "bias", _SIZES, bias=cases.added((2, 2, 70, 90), layout="unaligned"), mask=_WINDOW
    ),
    AttentionCase("bias-of-heads", _SIZES, bias=cases.added((2, 70, 90))),
    AttentionCase("bias-of-keys", _SIZES, bias=cases.added((2, 1, 90)), mask=_WINDOW),
    AttentionCase("bias-of-all", _SIZES, bias=cases.added((1, 1))),
    AttentionCase("strided", _SIZES, FP16, ("last_strided", "transposed", "expanded")),
    AttentionCase(
        "float", (1, 2, 1, 40, 50, 24, 24), FP32, options={"is_causal": True},
        bias=cases.added((40, 50), rows=(slice(3, 9), -1e30)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FORMS, **named)
def test_every_form_under_every_schedule(case):
    play(case, config_for(case), "machine")


@pytest.mark.parametrize("form", ["full", "window-lengths", "strided"])
def test_forms_on_sm_80(form):
    case = next(case for case in FORMS if case.name == form)
    config = config_for(case)
    staged = TritonBackwardConfig(
        replace(config.dkv, num_stages=2), replace(config.dq, num_stages=2)
    )
    play(case, staged, "machine", arch="sm_80")


@pytest.mark.full
@pytest.mark.parametrize("level", ["ttgir", "machine"])
@pytest.mark.parametrize("case", ALL.values(), **named)
def test_every_case_under_every_schedule(case, level):
    play(case, config_for(case), level)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL.values(), **named)
def test_the_rules_config_on_every_case(case):
    play(
        case, triton_backward_rule(cases.problem_of(case.inputs()), H100), "machine", [("late", 0)]
    )


@pytest.mark.parametrize("forward", [TritonConfig(32, 32, 4), GluonSm90Config(2, 64, 2)])
def test_it_follows_either_forward(forward):
    """A user's call, forced to a forward, differentiated by autograd."""
    case = AttentionCase("follows", (1, 2, 1, 70, 90, 64, 64), BF16, options={"is_causal": True})
    inputs = case.inputs()
    given = gradients.upstream(inputs)
    with emulator.run() as run, poisoned_memory(), record_choices() as made:
        results = gradients.of_attention(inputs, given, config=forward, backward_config=SMALL)
    assert [choice.config for choice in made] == [forward, SMALL]
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    gradients.check(inputs, given, results)


def test_a_sums_gradient_of_stride_0_is_taken():
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 2, 33, 16).half().unbind(0))
    with emulator.run(arch="sm_80"):
        out = tileloom.attention(q, k, v, backward_config=SMALL)
        results = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for result, right in zip(results, expected):
        assert torch.equal(result, right)


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (90,), ()])
def test_a_few_programs_share_a_broadcast_bias(shape):
    """More blocks of scores than programs, so that partial sums are added up."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    case = AttentionCase(
        "shared", (2, 4, 4, 70, 90, 16, 16), FP16, bias=lambda case, device: values.to(device)
    )
    play(case, TritonBackwardConfig(Tile(16, 16, 4), Tile(16, 16, 4)), "ttgir", [("late", 0)])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias"])
def test_a11_each_gradient_comes_alone(wanted):
    """As in A11, where only the bias has one; nothing that is not asked for is computed."""
    q, k, v = (torch.randn(1, 1, 40, 16).half() for _ in range(3))
    given = {"q": q, "k": k, "v": v, "bias": torch.randn(40, 40).half()}
    every = {name: t.clone().requires_grad_() for name, t in given.items()}
    alone = {name: t.clone().requires_grad_(name == wanted) for name, t in given.items()}
    with emulator.run(arch="sm_80"), poisoned_memory():
        out = tileloom.attention(**every, backward_config=SMALL)
        expected = torch.autograd.grad(out.square().sum(), every[wanted])
        out = tileloom.attention(**alone, backward_config=SMALL)
        result = torch.autograd.grad(out.square().sum(), alone[wanted])
    assert torch.equal(result[0], expected[0])
