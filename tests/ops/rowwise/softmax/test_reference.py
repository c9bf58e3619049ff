"""The specification itself: against torch's own softmax, and its gradient by finite differences."""

from __future__ import annotations

import pytest
import torch

from tileloom.ops.rowwise.softmax import softmax_reference
from tileloom.testing import Case, assert_accurate

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 6), (4, 1)])
def test_it_is_torchs_softmax(shape):
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(softmax_reference(x), torch.softmax(x, -1))


def test_precisions():
    x = Case("ref", {"R": 9, "N": 33}, torch.bfloat16).tensor("x", "R N")
    out = softmax_reference(x)
    assert out.dtype == torch.bfloat16
    exact = softmax_reference(x, compute_dtype=torch.float64)
    assert_accurate(out, exact, softmax_reference(x, compute_dtype=torch.bfloat16))
    assert exact.dtype == torch.float64


def test_hidden_elements_give_zero_and_may_hold_anything():
    x = torch.tensor([[1.0, NAN, 1.0, INF], [2.0, 3.0, NAN, -INF]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, False], [False, False, False, True]])
    x.requires_grad_()
    out = softmax_reference(x, mask=mask)
    assert out.tolist() == [[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    out.backward(torch.randn(2, 4, dtype=torch.float64))
    assert x.grad is not None
    assert x.grad[~mask].tolist() == [0.0] * 5
    assert x.grad[1].tolist() == [0.0] * 4


def test_a_row_of_minus_infinity_gives_zero_as_torchs_safe_softmax():
    x = torch.full((2, 3), -INF)
    x[1, 1] = 5.0
    torch.testing.assert_close(softmax_reference(x), torch._safe_softmax(x, -1))
    assert softmax_reference(x).tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("row", [[NAN, 1.0], [INF, 1.0], [INF, INF]])
def test_a_visible_nan_or_infinity_spoils_its_row(row):
    assert softmax_reference(torch.tensor(row)).isnan().any()
    assert torch.softmax(torch.tensor(row), -1).isnan().any()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(shape):
    assert softmax_reference(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("mask_shape", [None, (5,), (3, 5), (2, 1, 5), (2, 3, 1)])
def test_gradient(mask_shape):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = None
    if mask_shape is not None:
        mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) > 0.3
    assert torch.autograd.gradcheck(lambda t: softmax_reference(t, mask=mask), (x,))
