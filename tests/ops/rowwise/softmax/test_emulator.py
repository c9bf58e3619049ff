"""The kernels on the emulator: right by the accuracy rule, and no race or misuse."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.softmax import cases
from tests.ops.rowwise.softmax.cases import SoftmaxCase

from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.testing import poisoned_memory

SCHEDULES = [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]


def judged(case: SoftmaxCase, schedule: str, seed: int, level: str = "machine") -> None:
    inputs = case.inputs()
    with (
        emulator.run(schedule=schedule, level=level, seed=seed, sms=8) as run,
        poisoned_memory(),
        record_choices() as made,
    ):
        y, dx = cases.run(inputs, case.config)
    assert [choice.backend for choice in made] == ["triton"] * 2
    assert [launch.kernel for launch in run.launches] == _kernels(case)
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    cases.check(inputs, y, dx)


def _kernels(case: SoftmaxCase) -> list[str]:
    form = {cases.WALK: "_walk", cases.SPLIT: "_split"}.get(case.config, "")
    names = [f"softmax_{direction}{form}_kernel" for direction in ("fwd", "bwd")]
    if case in cases.CLUSTERS:
        names[0] = "softmax_fwd_cluster_kernel"
    return names


@pytest.mark.parametrize(
    "case", cases.WHOLE + cases.WALKED + cases.SHARED + cases.CLUSTERS, ids=lambda case: case.id
)
def test_kernels(case):
    """Compiled once for a case, then played under every schedule."""
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", cases.WHOLE + cases.WALKED + cases.SHARED, ids=lambda case: case.id
)
def test_kernels_before_their_memory_is_placed(case):
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed, "ttgir")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("config", [None, cases.WALK, cases.SPLIT], ids=["whole", "walk", "split"])
def test_a_visible_nan_or_infinity_spoils_its_row_only(value, config):
    x = torch.randn(3, 100)
    x[1, 70] = value
    with emulator.run():
        y, dx = cases.run(cases.Inputs(x, None, torch.randn(3, 100)), config)
    for result in (y, dx):
        assert result.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("config", [cases.CLUSTER, cases.CLUSTER_KEPT], ids=["x", "kept"])
def test_a_cluster_tells_a_part_of_minus_infinity_from_a_nan(config):
    x = torch.randn(4, 8192, dtype=cases.BF16)
    x[0, :7000] = -float("inf")
    x[0, 7000:] -= 300  # beside a part that shows nothing, exponentials of the others only
    x[1, 70] = float("nan")
    x[2, 7000] = float("inf")
    with emulator.run():
        y, _ = cases.run(cases.Inputs(x, None, torch.randn(4, 8192, dtype=cases.BF16)), config)
    assert y.isnan().any(1).tolist() == [False, True, True, False]
    torch.testing.assert_close(y[0].float(), x[0].float().softmax(0), atol=1e-5, rtol=0.01)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(shape):
    with emulator.run() as run:
        y, dx = cases.run(cases.Inputs(torch.randn(shape), None, torch.randn(shape)))
    assert y.shape == dx.shape == shape
    assert not run.launches


@pytest.mark.parametrize("dy", [torch.arange(72.0).expand(4, 72), torch.randn(72, 4).t()])
def test_a_gradient_of_any_strides_is_read_in_place(dy):
    inputs = cases.Inputs(torch.randn(4, 72), None, dy)
    with emulator.run():
        y, dx = cases.run(inputs)
    cases.check(inputs, y, dx)
