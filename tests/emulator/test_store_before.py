"""A TMA store whose box begins before 0: an illegal instruction on the hardware, an error here."""

from __future__ import annotations

import pytest
import torch

from tests.device.kernels import copy_box_kernel
from tileloom import emulator
from tileloom.emulator import OutOfBoundsError
from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor


def _copy(row: int, to_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 2, 100, 64).to(torch.bfloat16)
    y = torch.zeros_like(x)
    with emulator.run():
        copy_box_kernel[(1,)](
            descriptor(x, 64, 64), descriptor(y, 64, 64), 0, 1, row, 0, 1, to_row, num_warps=4
        )
    return x, y


def test_a_store_may_not_begin_before_0():
    with pytest.raises(OutOfBoundsError, match="begins before 0, where TMA loads zeros but may"):
        _copy(0, -10)


@pytest.mark.parametrize(("row", "to_row"), [(-10, 0), (60, 60)])
def test_a_load_may_and_a_store_may_reach_past_the_end(row, to_row):
    x, y = _copy(row, to_row)
    box = torch.zeros(64, 64, dtype=x.dtype)
    first, last = max(row, 0), min(row + 64, 100)
    box[first - row : last - row] = x[0, 1, first:last]
    kept = min(64, 100 - to_row)
    assert torch.equal(y[0, 1, to_row : to_row + kept], box[:kept])
