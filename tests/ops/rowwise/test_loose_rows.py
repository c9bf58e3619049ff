"""Tensors that are walked along with the rows in a unit of their own: masks, one number a row."""

from __future__ import annotations

import pytest
import torch

from tileloom.ops.rowwise.rows import Rows, rows_of

X = torch.empty(2, 3, 4, 32, dtype=torch.bfloat16)


def along(x: torch.Tensor, *loose: torch.Tensor) -> Rows:
    strides = [t.stride() for t in loose]
    return rows_of(x.shape, (x.stride(),), x.element_size(), loose=strides)


def test_a_loose_tensor_splits_the_rows_but_takes_no_vectors_away():
    mask = torch.empty(2, 1, 4, 33, dtype=torch.bool)[..., :32].expand(X.shape)
    found = along(X, mask)
    assert (found.groups, found.vector) == (3, 8)
    assert found.stride_arguments(0) == (48, 16, 4, None)  # in units of 8
    assert found.loose_vector(0, 16) == 1
    assert found.loose_arguments(0, 1) == (132, 0, 33, None)


@pytest.mark.parametrize(
    ("mask", "vector", "strides"),
    [
        (torch.empty(2, 3, 4, 32), 16, (None, None, 2, None)),
        (torch.empty(32).expand(X.shape), 16, (None, None, 0, None)),
        (torch.empty(2, 3, 4, 1).expand(X.shape), 0, (None, None, 1, 0)),
        (torch.empty(2, 3, 4, 64)[..., ::2], 0, (None, None, 64, 2)),
    ],
)
def test_the_unit_of_a_loose_tensor_is_its_own(mask, vector, strides):
    found = along(X, mask)
    assert found.vector == 8
    assert found.loose_vector(0, 16) == vector
    assert found.loose_arguments(0, vector) == strides


def test_one_number_a_row():
    labels = torch.empty(2, 3, 5)[:, :, 1:]
    found = rows_of(X.shape, (X.stride(),), 2, loose=((*labels.stride(), 1), None))
    assert (found.groups, found.vector) == (2, 8)
    assert found.loose_arguments(0, 1) == (None, 5, 1, None)
    assert found.loose_arguments(1, 1) == (None,) * 4
