from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from tileloom.testing import Case, Layout, laid_out

SIZES = {"B": 2, "H": 3, "L": 5, "D": 8}
CASE = Case("odd", sizes=SIZES, dtype=torch.bfloat16, options={"is_causal": True})


def test_id_says_all():
    assert CASE.id == "odd-B2-H3-L5-D8-bf16-s0"
    assert dataclasses.replace(CASE, input_scale=30, seed=4).id == "odd-B2-H3-L5-D8-bf16-x30-s4"


def test_frozen_also_inside():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CASE.name = "even"
    with pytest.raises(TypeError):
        CASE.sizes["B"] = 3
    with pytest.raises(TypeError):
        CASE.options["is_causal"] = False
    assert hash(CASE) == hash(dataclasses.replace(CASE))


def test_inputs_depend_on_name_and_seed_only():
    q = CASE.tensor("q", "B H L D")
    assert q.shape == (2, 3, 5, 8)
    assert q.dtype == torch.bfloat16
    assert torch.equal(q, CASE.tensor("q", "B H L D"))
    assert not torch.equal(q, CASE.tensor("k", "B H L D"))
    assert not torch.equal(q, dataclasses.replace(CASE, seed=1).tensor("q", "B H L D"))
    # The same in every process and on every machine: inputs are part of a result's record.
    assert q[0, 0, 0, :2].tolist() == [-0.49609375, -2.234375]


def test_input_scale():
    big = dataclasses.replace(CASE, input_scale=100).tensor("q", "64 64")
    assert 90 < float(big.float().std()) < 110


def test_unknown_letter():
    with pytest.raises(KeyError):
        CASE.tensor("q", "B X")


@pytest.mark.parametrize("layout", get_args(Layout))
def test_layouts_keep_shape_and_values(layout):
    x = torch.randn(2, 3, 5, 8)
    y = laid_out(x, layout)
    assert y.shape == x.shape
    assert torch.equal(y, x[:, :1].expand(x.shape) if layout == "expanded" else x)
    assert y.data_ptr() != x.data_ptr()


def test_layouts_are_what_they_say():
    x = torch.randn(2, 3, 5, 8)
    assert laid_out(x, "contiguous").is_contiguous()
    assert laid_out(x, "transposed").transpose(1, 2).is_contiguous()
    assert laid_out(x, "expanded").stride() == (40, 0, 8, 1)
    assert laid_out(x, "gapped").stride() == (240, 80, 16, 1)
    assert laid_out(x, "last_strided").stride()[-1] == 2
    assert laid_out(x, "unaligned").data_ptr() % 16 == 4
    assert laid_out(x, "offset").storage_offset() == 64 * 8


def test_gaps_hold_nan():
    gapped = laid_out(torch.zeros(2, 3, 5, 8), "gapped")
    whole = gapped.as_strided((2, 3, 5, 16), (240, 80, 16, 1))
    assert whole[..., 8:].isnan().all()


def test_bad_layouts():
    with pytest.raises(ValueError, match="layout is 'sideways'; it must be one of contiguous"):
        laid_out(torch.zeros(2, 2), "sideways")
    with pytest.raises(ValueError, match=r"shape \(2, 2\); layout 'expanded' needs 3 dimensions"):
        laid_out(torch.zeros(2, 2), "expanded")
