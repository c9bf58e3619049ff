from __future__ import annotations

import math

import pytest
import torch

from tileloom.testing import CanaryError, Guarded, poison_, poisoned_memory


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int32, 2**31 - 1), (torch.uint8, 255), (torch.bool, True), (torch.int64, 2**63 - 1)],
)
def test_poison_of_integers(dtype, value):
    assert (poison_(torch.zeros(5, dtype=dtype)) == value).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_poison_of_floats(dtype):
    assert poison_(torch.zeros(5, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("strides", [None, (40, 8, 1), (1, 3, 15), (0, 8, 1)])
def test_writes_inside_are_allowed(dtype, strides):
    guarded = Guarded((3, 5, 7), dtype=dtype, strides=strides)
    assert guarded.tensor.dtype == dtype
    assert guarded.tensor.stride() == (strides or (35, 7, 1))
    assert guarded.tensor.data_ptr() % 16 == 0
    guarded.tensor.fill_(1)
    guarded.check()


@pytest.mark.parametrize("offset", [-1, -100, 105, 300])
def test_writes_outside_are_found(offset):
    guarded = Guarded((3, 5, 7), dtype=torch.bfloat16)
    beside = guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + offset)
    beside.fill_(2.0)
    with pytest.raises(CanaryError, match=rf"dk: 1 elements .* offsets {offset}..{offset} from"):
        guarded.check("dk")


def test_writes_in_the_gaps_of_strides_are_found():
    guarded = Guarded((3, 5), strides=(8, 1))
    guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + 13).fill_(0)
    with pytest.raises(CanaryError, match=r"offsets 13..13 .* strides \(8, 1\)"):
        guarded.check()


def test_empty_shape():
    guarded = Guarded((0, 4))
    guarded.tensor.fill_(1)
    guarded.check()


def test_poisoned_memory_covers_each_way_to_allocate():
    like = torch.zeros(2, 3, dtype=torch.float16)
    with poisoned_memory() as guard:
        made = [
            torch.empty(2, 3),
            torch.empty((2, 3), dtype=torch.bfloat16),
            torch.empty_like(like),
            torch.empty_like(like.t()),
            torch.empty_strided((2, 3), (4, 1)),
            like.new_empty(2, 3),
            torch.empty(4, requires_grad=True),
        ]
        assert guard.allocations == len(made)
    assert all(bool(t.isnan().all()) for t in made)
    assert made[2].dtype == torch.float16
    assert made[3].stride() == like.t().stride()
    assert made[4].stride() == (4, 1)
    assert made[6].requires_grad
    assert torch.empty(1 << 16).zero_().sum() == 0


def test_poisoned_memory_leaves_others_alone():
    with poisoned_memory() as guard:
        assert torch.empty(3, device="meta").is_meta
        out = torch.zeros(3)
        torch.empty(3, out=out)
    assert guard.allocations == 0
    assert not out.isnan().any()


def test_poisoned_memory_finds_a_write_past_the_end():
    def kernel():
        out = torch.empty(10)
        out.as_strided((11,), (1,), out.storage_offset()).fill_(1.0)
        return out

    expected = pytest.raises(CanaryError, match=r"allocation 0: 1 elements .* offsets 10..10")
    with expected, poisoned_memory():
        kernel()


def test_poisoned_memory_shows_what_was_never_written():
    with poisoned_memory():
        out = torch.empty(4, 4)
        out[:3] = 1.0
    assert out[3].isnan().all()
    assert not out[:3].isnan().any()


def test_original_functions_come_back_after_an_exception():
    before = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty
    with pytest.raises(ZeroDivisionError), poisoned_memory():
        _ = 1 / 0
    assert before == (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    assert not math.isnan(float(torch.zeros(1)))
