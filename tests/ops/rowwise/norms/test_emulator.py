"""The kernels of both norms on the emulator: right by the accuracy rule, no race, no misuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import LONG, NormCase

from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.testing import poisoned_memory

SCHEDULES = [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]


def judged(
    case: NormCase, schedule: str, seed: int, level: str = "machine"
) -> dict[str, torch.Tensor]:
    inputs = case.inputs()
    with (
        emulator.run(schedule=schedule, level=level, seed=seed, sms=8) as run,
        poisoned_memory(),
        record_choices() as made,
    ):
        results = cases.run(inputs)
    assert [choice.backend for choice in made] == ["triton"] * 2
    assert [launch.kernel for launch in run.launches] == _kernels(case)
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    cases.check(inputs, results)
    return results


def _kernels(case: NormCase) -> list[str]:
    names = ["norm_fwd", "norm_bwd", "norm_vectors"]
    if case.config in (LONG, cases.LONG_AGAIN):
        names = ["norm_fwd_split", "norm_bwd_split", "norm_vectors"]
    if case in cases.RINGS:
        names[1] = "norm_bwd_ring"
    if case in cases.CLUSTERS:
        names[0] = "norm_fwd_cluster"
    if case in cases.WALKS:
        names[:2] = ["norm_fwd_walk", "norm_bwd_walk"]
    if not {"weight", "bias"} & set(case.has):
        names.pop()
    elif case.config is None or case in cases.CLUSTERS:
        names[1:] = ["norm_bwd_few"]
    return [f"{name}_kernel" for name in names]


CASES = cases.WHOLE + cases.WALKED + cases.LONG_ROWS + cases.RINGS + cases.CLUSTERS + cases.WALKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernels(case):
    """Compiled once for a case, then played under every schedule."""
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize("case", cases.WHOLE + cases.LONG_ROWS, ids=lambda case: case.id)
def test_kernels_before_their_memory_is_placed(case):
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed, "ttgir")


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize("op", ["rms", "layer"])
def test_narrow_rows(op, width):
    # The gradient of a layer norm of one element is 0, which no rule can judge.
    case = NormCase(op, (40, width), cases.FP32, ("weight",))
    inputs = case.inputs()
    with emulator.run(sms=8):
        results = cases.run(inputs)
    if width > 1:
        cases.check(inputs, results)
        return
    expected = cases.answer(inputs, cases.FP32)
    for name, actual in results.items():
        torch.testing.assert_close(actual, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [LONG, cases.LONG_AGAIN], ids=["ahead", "again"])
@pytest.mark.parametrize("op", ["rms", "layer"])
def test_shared_rows_of_several_groups(op, config):
    """Programs go on to further rows, and find their shares again."""
    judged(NormCase(op, (7, 150), cases.BF16, cases.everything(op), config=config), "late", 0)


@pytest.mark.parametrize("config", [None, LONG], ids=["whole", "long"])
@pytest.mark.parametrize("op", ["rms", "layer"])
def test_a_nan_spoils_its_row_only(op, config):
    inputs = NormCase(op, (3, 100), config=config).inputs()
    inputs.tensors["x"][1, 70] = float("nan")
    with emulator.run(sms=8):
        results = cases.run(inputs)
    for name in ("out", "dx"):
        assert results[name].isnan().any(1).tolist() == [False, True, False]


def test_a_nan_spoils_the_rows_of_its_cluster_only():
    inputs = NormCase("layer", (3, 8192), config=cases.CLUSTER_ROWS).inputs()
    inputs.tensors["x"][1, 70] = float("nan")
    with emulator.run(sms=8):
        results = cases.run(inputs)
    assert results["out"].isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
@pytest.mark.parametrize("op", ["rms", "layer"])
def test_empty(op, shape):
    inputs = NormCase(op, shape, has=("weight", "residual")).inputs()
    with emulator.run() as run:
        results = cases.run(inputs)
    assert results["out"].shape == results["dx"].shape == shape
    assert results["dweight"].tolist() == [0.0] * shape[-1]
    assert not run.launches


@pytest.mark.parametrize("config", [None, LONG], ids=["whole", "long"])
@pytest.mark.parametrize("wanted", ["x", "weight", "residual", "stream"])
def test_one_gradient_alone(wanted, config):
    """Only x, only the weight, only the residual; or only the stream is used."""
    case = NormCase("rms", (5, 72), cases.FP32, ("weight", "residual"), config=config)
    inputs = case.inputs()
    leaves = dict(inputs.tensors)
    name = "x" if wanted == "stream" else wanted
    leaves[name] = leaves[name].detach().requires_grad_()
    x = leaves.pop("x")
    with emulator.run(sms=8):
        outs = cases.FUNCTIONS["rms"][0](x, **leaves, config=config)
        which = 1 if wanted == "stream" else 0
        leaf = x if name == "x" else leaves[name]
        (grad,) = torch.autograd.grad(outs[which], leaf, inputs.grads[which])
    if wanted == "stream":
        assert torch.equal(grad, inputs.grads[1])
        return
    own = replace(inputs, grads=[inputs.grads[0], torch.zeros_like(inputs.grads[1])])
    expected = [cases.answer(own, dtype)[f"d{name}"] for dtype in (torch.float64, cases.FP32)]
    cases.assert_accurate(grad, *expected, name=name)


@pytest.mark.parametrize("dout", [torch.arange(72.0).expand(4, 72), torch.randn(72, 4).t()])
def test_a_gradient_and_a_weight_of_any_strides_are_read_in_place(dout):
    inputs = NormCase("layer", (4, 72), cases.FP32, ("weight", "bias")).inputs()
    inputs.grads[0] = dout
    wide = torch.zeros(72, 3)
    for name in ("weight", "bias"):
        wide[:, 1] = inputs.tensors[name]
        inputs.tensors[name] = wide.clone()[:, 1]
    with emulator.run(sms=8):
        results = cases.run(inputs)
    cases.check(inputs, results)
