"""How the leading dimensions of a call's tensors become rows."""

from __future__ import annotations

import pytest
import torch

from tileloom.ops.rowwise.rows import Rows, rows_of


def rows(*tensors: torch.Tensor | None) -> Rows:
    first = tensors[0]
    assert first is not None
    strides = [None if t is None else t.stride() for t in tensors]
    return rows_of(first.shape, strides, first.dtype.itemsize)


def offsets(found: Rows, tensor: int) -> list[int]:
    """Offset of each row's first element, as the kernels take it from their arguments."""
    size_1, size_2 = found.size_arguments()
    s_0, s_1, s_2, _ = ((s or 0) * found.unit for s in found.stride_arguments(tensor))
    return [
        r % (size_2 or found.count) * s_2
        + (r // size_2 % (size_1 or found.count) * s_1 if size_2 else 0)
        + (r // size_2 // size_1 * s_0 if size_1 and size_2 else 0)
        for r in range(found.count)
    ]


def expected(tensor: torch.Tensor) -> list[int]:
    """The same from PyTorch's own indexing."""
    place = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return place.as_strided(tensor.shape, tensor.stride())[..., 0].flatten().tolist()


A = torch.empty(4, 3, 2, 16)
CASES = {
    "contiguous": ((A,), 1, 4),
    "vector": ((torch.empty(16),), 1, 4),
    "one row": ((torch.empty(1, 1, 16),), 1, 4),
    "transposed": ((A.transpose(0, 1), torch.empty(3, 4, 2, 16)), 3, 4),
    "transposed, both": ((A.transpose(0, 1), A.transpose(0, 1)), 3, 4),
    "gapped": ((torch.empty(4, 3, 24)[..., :16],), 1, 4),
    "unaligned": ((torch.empty(4, 3, 17)[..., :16],), 1, 1),
    "odd": ((torch.empty(4, 3, 17),), 1, 1),
    "expanded": ((torch.empty(16).expand(4, 3, 16),), 1, 4),
    "expanded in part": ((torch.empty(3, 16).expand(4, 3, 16), A[:, :, 0]), 2, 4),
    "half": ((torch.empty(4, 3, 16, dtype=torch.float16),), 1, 8),
    "strided": ((torch.empty(4, 3, 32)[..., ::2],), 1, 0),
    "of one element": ((torch.empty(5, 7)[:, :1],), 1, 1),
    "with one that is not given": ((A, None, A), 1, 4),
    "four groups": ((torch.empty(5, 4, 3, 2, 16).permute(3, 2, 1, 0, 4),), 4, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_lie_where_pytorch_puts_them(name):
    tensors, groups, vector = CASES[name]
    found = rows(*tensors)
    assert (found.groups, found.vector) == (groups, vector)
    assert (found.count, found.width) == (tensors[0][..., 0].numel(), tensors[0].shape[-1])
    assert found.width_units * found.unit == found.width
    if groups > 3:
        assert "merge into 4 groups of common strides, more than 3" in found.reasons[0]
        return
    assert found.reasons == ()
    for place, tensor in enumerate(tensors):
        arguments = found.stride_arguments(place)
        if tensor is None:
            assert arguments == (None,) * 4
            continue
        assert offsets(found, place) == expected(tensor)
        assert arguments[3] == (tensor.stride(-1) if vector == 0 else None)


def test_no_rows_and_no_columns():
    assert rows(torch.empty(0, 5)).count == 0
    assert rows(torch.empty(3, 0)).width == 0


def test_a_strided_weight_takes_away_the_unit_stride():
    assert rows_of((4, 16), [(16, 1)], 4, dense=False).vector == 0
