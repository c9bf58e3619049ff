"""Calls that go straight to their plans, as on a GPU: checked once for each kind, never less."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.softmax import cases

from tileloom import emulator
from tileloom.errors import DtypeError, OptionError, ShapeError
from tileloom.ops._plans import Plans
from tileloom.ops.rowwise.config import ReferenceConfig
from tileloom.ops.rowwise.softmax import api, softmax


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
    inputs = cases.SoftmaxCase("short", (3, 40), mask=(40,)).inputs()
    x, mask = inputs.x, inputs.mask
    for _ in range(3):
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    assert len(checked) == 1
    different = [
        lambda: softmax(x, mask=mask),
        lambda: softmax(x[:2]),
        lambda: softmax(x.t()),
        lambda: softmax(x.half()),
        lambda: softmax(x, config=ReferenceConfig()),
    ]
    for count, call in enumerate(different, 2):
        for _ in range(2):
            call()
        assert len(checked) == count


def test_a_training_call_has_the_plan_of_the_same_call_without(checked):
    inputs = cases.SoftmaxCase("short", (3, 40)).inputs()
    softmax(inputs.x)
    y, dx = cases.run(inputs)
    cases.check(inputs, y, dx)
    assert len(checked) == 1


def test_a_wrong_call_beside_a_kept_plan_is_refused(checked):
    x = torch.randn(3, 40)
    softmax(x)
    for wrong, error in (
        (lambda: softmax(x, mask=x), DtypeError),
        (lambda: softmax(x, mask=torch.ones(4, dtype=torch.bool)), ShapeError),
        (lambda: softmax(x, mask=[True]), DtypeError),
        (lambda: softmax(x, config="triton"), OptionError),
        (lambda: softmax([1.0]), DtypeError),
    ):
        with pytest.raises(error):
            wrong()
    assert len(checked) == 6
