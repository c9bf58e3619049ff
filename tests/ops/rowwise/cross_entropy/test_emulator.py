"""The kernels on the emulator: right by the accuracy rule, and no race or misuse."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.cross_entropy import cases
from tests.ops.rowwise.cross_entropy.cases import CrossEntropyCase

from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.ops.rowwise.cross_entropy import cross_entropy, cross_entropy_reference, plans
from tileloom.testing import assert_accurate, poisoned_memory

NAN, INF = float("nan"), float("inf")
SCHEDULES = [("late", 0), ("eager", 0), ("random", 1), ("random", 2)]


def judged(
    case: CrossEntropyCase, schedule: str, seed: int, level: str = "machine", *,
    inplace: bool = False,
) -> None:  # fmt: skip
    inputs = case.inputs()
    with (
        emulator.run(schedule=schedule, level=level, seed=seed, sms=4) as run,
        poisoned_memory(),
        record_choices() as made,
    ):
        loss, grad = cases.run(inputs, case.config, inplace=inplace)
    assert [choice.backend for choice in made] == ["triton"] * 2
    is_reduced = inputs.options.get("reduction", "mean") != "none"
    names = ["fwd", "sum", "bwd"] if is_reduced else ["fwd", "bwd"]
    assert [r.kernel for r in run.launches] == [f"cross_entropy_{n}_kernel" for n in names]
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    cases.check(inputs, loss, grad)


@pytest.mark.parametrize("case", cases.ONE_BLOCK + cases.WALKED, ids=lambda case: case.id)
def test_kernels(case):
    """Compiled once for a case, then played under every schedule."""
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed)


@pytest.mark.full
@pytest.mark.parametrize("case", cases.ONE_BLOCK + cases.WALKED, ids=lambda case: case.id)
def test_kernels_before_their_memory_is_placed(case):
    for schedule, seed in SCHEDULES:
        judged(case, schedule, seed, "ttgir")


@pytest.mark.parametrize("case", [cases.ONE_BLOCK[0], *cases.WALKED[:3]], ids=lambda case: case.id)
def test_the_gradient_over_the_logits(case):
    judged(case, "late", 0, inplace=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_infinite_logits_give_what_the_formula_gives(smoothing):
    """-inf is a class that cannot be; +inf, NaN and a row of -inf alone give NaN."""
    logits = torch.randn(8, 100)
    logits[0, 3:60] = -INF
    logits[1, 99], logits[2, 5], logits[3, 98], logits[4] = -INF, INF, NAN, -INF
    labels = torch.tensor([99, 99, 7, 98, 1, -100, 2, 5])
    options = {"reduction": "none", "label_smoothing": smoothing}
    leaf = logits.clone().requires_grad_()
    with emulator.run():
        loss = cross_entropy(leaf, labels, **options, config=cases.WALK)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
    reference = cross_entropy_reference(logits.double(), labels, **options)
    assert_accurate(
        loss.detach(), reference, cross_entropy_reference(logits, labels, **options), name="loss"
    )
    assert grad.isnan().any(1).tolist() == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_labels_out_of_range_give_nan_and_read_nothing(reduction):
    logits = torch.randn(6, 100, requires_grad=True)
    labels = torch.tensor([5, 100, -1, 2**40, -(2**62), 99])
    with emulator.run() as run:  # it reports what leaves a tensor
        loss = cross_entropy(logits, labels, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not run.reports
    bad = torch.tensor([False, True, True, True, True, False])
    assert torch.equal(loss.isnan(), bad if reduction == "none" else torch.tensor(True))
    assert torch.equal(grad.isnan().all(1), bad)
    assert torch.equal(grad.isnan().any(1), bad)


@pytest.mark.parametrize("config", [None, cases.WALK], ids=["one-block", "walked"])
def test_only_ignored_rows_give_nan_for_the_mean_and_no_gradient(config):
    logits = torch.full((5, 100), NAN, requires_grad=True)
    labels = torch.full((5,), -100)
    with emulator.run():
        loss = cross_entropy(logits, labels, config=config)
        (grad,) = torch.autograd.grad(loss, logits)
        total = cross_entropy(logits, labels, reduction="sum", config=config)
    assert loss.isnan()
    assert total == 0
    assert not grad.any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 7)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_empty(shape, reduction):
    logits = torch.randn(shape, requires_grad=True)
    labels = torch.zeros(shape[:-1], dtype=torch.int64)
    with emulator.run() as run:
        loss = cross_entropy(logits, labels, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not run.launches
    expected = cross_entropy_reference(logits, labels, reduction=reduction)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(loss.nan_to_num(), expected.nan_to_num())
    assert grad.shape == shape


def test_more_rows_than_the_sum_takes_at_a_time(monkeypatch):
    monkeypatch.setattr(plans, "SUM_BLOCK", 16)
    inputs = CrossEntropyCase("rows", (5, 15, 16)).inputs()
    with emulator.run():
        loss, grad = cases.run(inputs)
    cases.check(inputs, loss, grad)


def test_shifted_logits_and_labels_are_read_in_place():
    logits, labels = torch.randn(2, 5, 33), torch.randint(33, (2, 5))
    inputs = cases.Inputs(logits[:, :-1], labels[:, 1:], {"label_smoothing": 0.1})
    with emulator.run():
        loss, grad = cases.run(inputs, cases.WALK)
    cases.check(inputs, loss, grad)
