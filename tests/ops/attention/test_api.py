"""`tileloom.attention`: sizes, layouts and dtypes of all kinds, on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import AttentionCase

import tileloom
from tileloom import masks
from tileloom.ops.attention.config import ReferenceConfig
from tileloom.testing import poisoned_memory

CASES = [case for group in cases.GROUPS.values() for case in group]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_shared_cases_are_right_on_the_cpu(case):
    inputs = case.inputs()
    before = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    with poisoned_memory():
        out, lse = tileloom.attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True
        )
    cases.check(inputs, out, lse)
    for tensor, copy in zip((inputs.q, inputs.k, inputs.v), before):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    q, k, v = (torch.randn(1, 2, 5, 8).to(dtype) for _ in range(3))
    out, lse = tileloom.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out, tileloom.attention(q, k, v))


def test_the_output_lies_as_q_does():
    case = AttentionCase("transposed", (2, 3, 3, 5, 7, 8, 4), layouts=("transposed",) * 3)
    inputs = case.inputs()
    out = tileloom.attention(inputs.q, inputs.k, inputs.v)
    assert out.transpose(1, 2).is_contiguous()
    assert tileloom.attention(inputs.q.contiguous(), inputs.k, inputs.v).is_contiguous()


def test_the_scale_is_by_default_one_over_the_root_of_the_head_dim():
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    assert torch.equal(tileloom.attention(q, k, v), tileloom.attention(q, k, v, scale=0.25))


def test_is_causal_and_mask_combine():
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    both = tileloom.attention(q, k, v, is_causal=True, mask=masks.window(2, None))
    assert torch.equal(both, tileloom.attention(q, k, v, mask=masks.window(2, 0)))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 1, 5, 7), (1, 3, 1, 1), ()])
def test_masks_and_biases_broadcast(shape):
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    bias, visible = torch.randn(shape), torch.rand(shape) < 0.8
    expected = tileloom.attention(
        q, k, v, bias=bias.expand(2, 3, 5, 7).clone(), mask=visible.expand(2, 3, 5, 7).clone()
    )
    assert torch.equal(tileloom.attention(q, k, v, bias=bias, mask=visible), expected)


def test_no_head_at_all():
    none = torch.randn(2, 0, 5, 8)
    assert tileloom.attention(none, none, none).shape == (2, 0, 5, 8)


def test_a_head_dim_of_zero_gives_the_mean():
    q, k, v = torch.randn(1, 1, 2, 0), torch.randn(1, 1, 4, 0), torch.randn(1, 1, 4, 8)
    out = tileloom.attention(q, k, v)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(1, 1, 2, 8))


def test_the_reference_can_be_forced():
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    forced = tileloom.attention(q, k, v, config=ReferenceConfig())
    assert torch.equal(forced, tileloom.attention(q, k, v))
