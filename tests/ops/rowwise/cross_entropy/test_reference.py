"""The specification itself: against torch's own cross entropy, and gradcheck."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tileloom.ops.rowwise.cross_entropy import cross_entropy_reference

NAN = float("nan")


def _inputs(rows=6, size=11):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, size, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, size, (rows,), generator=generator)
    labels[1] = labels[rows - 2] = -100
    return logits, labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_it_is_torchs_cross_entropy(reduction, smoothing):
    logits, labels = _inputs()
    logits.requires_grad_()
    results = []
    for function in (cross_entropy_reference, functional.cross_entropy):
        loss = function(logits, labels, label_smoothing=smoothing, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        results.append((loss, grad))
    torch.testing.assert_close(results[0], results[1])


def test_the_soft_cap_is_applied_first():
    logits, labels = _inputs()
    capped = 2.5 * torch.tanh(logits / 2.5)
    torch.testing.assert_close(
        cross_entropy_reference(logits, labels, soft_cap=2.5),
        functional.cross_entropy(capped, labels),
    )


def test_leading_dimensions_and_another_ignore_index():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    labels = torch.tensor([[0, 1, 2], [3, 4, 2]], dtype=torch.int32)
    torch.testing.assert_close(
        cross_entropy_reference(logits, labels, ignore_index=2, reduction="none"),
        functional.cross_entropy(
            logits.transpose(1, 2), labels.long(), ignore_index=2, reduction="none"
        ),
    )


def test_ignored_rows_count_for_nothing_whatever_they_hold():
    logits, labels = _inputs()
    expected = cross_entropy_reference(logits, labels)
    logits[1] = NAN
    logits.requires_grad_()
    loss = cross_entropy_reference(logits, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert logits.grad is not None
    assert not logits.grad[labels == -100].any()
    assert logits.grad.isfinite().all()


def test_only_ignored_rows_give_nan_for_the_mean_as_in_torch():
    logits, labels = _inputs()
    labels[:] = -100
    logits.requires_grad_()
    for function in (cross_entropy_reference, functional.cross_entropy):
        loss = function(logits, labels)
        assert loss.isnan()
        (grad,) = torch.autograd.grad(loss, logits)
        assert grad.tolist() == torch.zeros_like(logits).tolist()
    assert cross_entropy_reference(logits, labels, reduction="sum") == 0


def test_a_label_out_of_range_gives_nan():
    logits, labels = _inputs()
    labels[0], labels[3] = 11, -1
    loss = cross_entropy_reference(logits, labels, reduction="none")
    assert loss.isnan().tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty(shape):
    loss = cross_entropy_reference(
        torch.randn(shape), torch.zeros(shape[0], dtype=torch.long), reduction="none"
    )
    assert loss.shape == shape[:1]
    assert loss.isnan().all()


def test_dtypes():
    logits, labels = _inputs()
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert cross_entropy_reference(logits.to(dtype), labels).dtype == expected


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradient(reduction, soft_cap, smoothing):
    logits, labels = _inputs(4, 5)
    logits.requires_grad_()
    options = {"soft_cap": soft_cap, "label_smoothing": smoothing, "reduction": reduction}
    assert torch.autograd.gradcheck(
        lambda t: cross_entropy_reference(t, labels, **options), (logits,)
    )
