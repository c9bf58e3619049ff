"""Calls that go straight to their plans, as on a GPU: checked once for each kind, never less."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.cross_entropy import cases

from tileloom import emulator, knobs
from tileloom.errors import DtypeError, OptionError, ShapeError
from tileloom.ops._plans import Plans
from tileloom.ops.rowwise.config import ReferenceConfig
from tileloom.ops.rowwise.cross_entropy import api, cross_entropy


@pytest.fixture
def checked(monkeypatch):
    """Number of checks made so far, as a list of their arguments."""
    made = []
    check = api._check
    monkeypatch.setattr(api, "is_eager", lambda tensors: True)
    monkeypatch.setattr(api, "forward_plans", Plans())
    monkeypatch.setattr(api, "_check", lambda *args: (made.append(args), check(*args)))
    with emulator.run():
        yield made


def test_a_call_is_checked_once_for_each_kind(checked):
    logits, labels = torch.randn(6, 40), torch.tensor([0, 5, -100, 39, 7, 7])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    for _ in range(3):
        torch.testing.assert_close(cross_entropy(logits, labels), expected)
    assert len(checked) == 1
    different = [
        {"label_smoothing": 0.1},
        {"ignore_index": 7},
        {"soft_cap": 2.0},
        {"reduction": "sum"},
        {"config": ReferenceConfig()},
    ]
    for count, options in enumerate(different, 2):
        for _ in range(2):
            cross_entropy(logits, labels, **options)
        assert len(checked) == count
    cross_entropy(logits, labels.int())
    assert len(checked) == 7


def test_a_training_call_has_the_plan_of_the_same_call_without(checked):
    inputs = cases.CrossEntropyCase("short", (9, 40), options={"soft_cap": 3.0}).inputs()
    cross_entropy(inputs.logits, inputs.labels, **inputs.options)
    loss, grad = cases.run(inputs)
    cases.check(inputs, loss, grad)
    assert len(checked) == 1


def test_a_wrong_call_beside_a_kept_plan_is_refused(checked):
    logits, labels = torch.randn(6, 40), torch.randint(40, (6,))
    cross_entropy(logits, labels)
    for wrong, error in (
        (lambda: cross_entropy(logits, labels[:5]), ShapeError),
        (lambda: cross_entropy(logits, [1]), DtypeError),
        (lambda: cross_entropy(logits, labels, soft_cap=0.0), OptionError),
        (lambda: cross_entropy(logits, labels, soft_cap=[3.0]), OptionError),
        (lambda: cross_entropy(logits, labels, label_smoothing=2.0), OptionError),
        (lambda: cross_entropy(logits, labels, config="triton"), OptionError),
    ):
        with pytest.raises(error):
            wrong()
    assert len(checked) == 7
    with pytest.raises(OptionError, match="inplace_backward is None"):
        cross_entropy(logits, labels, inplace_backward=None)
    bad = torch.full_like(labels, 40)
    assert cross_entropy(logits, bad).isnan()
    with (
        knobs.scope({"debug.labels": True}),
        pytest.raises(OptionError, match=r"labels\[0\] is 40"),
    ):
        cross_entropy(logits, bad)
    assert len(checked) == 7
