"""What the tests of attention on a GPU share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def exact_products():
    """References and baselines in full precision."""
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)
