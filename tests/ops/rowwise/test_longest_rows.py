"""Rows of more than 2^20 elements, both ways, by the kernels that the rule gives them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tileloom import cross_entropy, emulator, layer_norm, rms_norm, softmax, swiglu
from tileloom.ops import record_choices
from tileloom.testing import assert_accurate, poisoned_memory

WIDTH = 2**20 + 3
LABELS = torch.tensor([WIDTH - 1])
WEIGHT = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))

OPERATORS = {  # ours, and the same by PyTorch
    "rms_norm": (
        lambda x: rms_norm(x, WEIGHT, eps=1e-6),
        lambda x: functional.rms_norm(x, (WIDTH,), WEIGHT.to(x.dtype), 1e-6),
    ),
    "layer_norm": (
        lambda x: layer_norm(x, WEIGHT),
        lambda x: functional.layer_norm(x, (WIDTH,), WEIGHT.to(x.dtype)),
    ),
    "softmax": (softmax, lambda x: torch.softmax(x, -1)),
    "swiglu": (lambda x: swiglu(x, x), lambda x: functional.silu(x) * x),
    "cross_entropy": (
        lambda x: cross_entropy(x, LABELS, label_smoothing=0.1),
        lambda x: functional.cross_entropy(x, LABELS, label_smoothing=0.1),
    ),
}


def _run(function, x):
    x = x.requires_grad_()
    out = function(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_of_more_than_2_to_the_20_elements(name):
    ours, torchs = OPERATORS[name]
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    with emulator.run(sms=64) as run, poisoned_memory(), record_choices() as made:
        found = _run(ours, x.clone())
    assert [choice.backend for choice in made] == ["triton"] * 2
    assert [report.text() for report in run.reports if report.severity != "info"] == []
    for mine, right, plain in zip(found, _run(torchs, x.double()), _run(torchs, x.clone())):
        if mine.dim() == 0:
            torch.testing.assert_close(mine.double(), right, rtol=1e-6, atol=0.0)
        else:
            assert_accurate(mine, right, plain)
