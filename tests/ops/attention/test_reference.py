"""The reference against the plainest formula, PyTorch's own, its gradients, and its properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileloom import masks
from tileloom.ops.attention import attention_reference

FP64 = torch.float64


def tensors(*sizes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = FP64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=FP64).to(dtype) for size in sizes]


def by_hand(q, k, v, visible, bias, scale):
    """One output element at a time, in Python's own floats."""
    batch, heads, len_q, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, len_q, v.shape[3], dtype=FP64)
    lse = torch.full((batch, heads, len_q), -math.inf, dtype=FP64)
    for b, h, i in itertools.product(range(batch), range(heads), range(len_q)):
        seen = [j for j in range(k.shape[2]) if visible[b, h, i, j]]
        if not seen:
            continue
        rows = k[b, h // group], v[b, h // group]
        scores = [
            scale * math.fsum((q[b, h, i] * rows[0][j]).tolist()) + float(bias[b, h, i, j])
            for j in seen
        ]
        total = math.fsum(math.exp(s) for s in scores)
        lse[b, h, i] = math.log(total)
        for s, j in zip(scores, seen):
            out[b, h, i] += math.exp(s) / total * rows[1][j]
    return out, lse


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_it_is_the_plainest_formula(heads_kv):
    q, k, v = tensors((2, 4, 5, 3), (2, heads_kv, 7, 3), (2, heads_kv, 7, 2))
    (bias,) = tensors((4, 5, 7), seed=1)
    visible = tensors((2, 1, 5, 7), seed=2)[0] > -0.3
    visible[1, :, 2] = False
    out, lse = attention_reference(
        q, k, v, mask=visible, bias=bias, scale=-0.7, return_lse=True, compute_dtype=FP64
    )
    expected = by_hand(
        q, k, v, visible.expand(2, 4, 5, 7), bias.expand(2, 4, 5, 7), -0.7
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["full", "causal", "mask", "bias", "gqa"])
def test_it_is_pytorchs_math_in_float64(form):
    q, k, v = tensors((2, 4, 33, 16), (2, 4, 47, 16), (2, 4, 47, 24))
    ours, theirs = {}, {}
    if form == "causal":
        ours = theirs = {"is_causal": True}
    elif form == "mask":
        visible = tensors((2, 1, 33, 47), seed=3)[0] > 0
        ours, theirs = {"mask": visible}, {"attn_mask": visible}
    elif form == "bias":
        (bias,) = tensors((33, 47), seed=4)
        ours, theirs = {"bias": bias}, {"attn_mask": bias}
    elif form == "gqa":
        k, v, theirs = k[:, :2], v[:, :2], {"enable_gqa": True}
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, **theirs)
    out = attention_reference(q, k, v, scale=0.3, **ours)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.window(2, 1, anchor="bottom_right"),
        masks.key_lengths(torch.tensor([0, 3])),
        masks.key_lengths(torch.tensor([4, 2])) & masks.causal("bottom_right"),
    ],
    ids=["none", "causal", "window", "lengths", "lengths-causal"],
)
def test_gradients_are_those_of_the_formula(mask):
    inputs = [
        t.requires_grad_() for t in tensors((2, 2, 4, 3), (2, 1, 5, 3), (2, 1, 5, 2), (1, 2, 4, 1))
    ]

    def call(q, k, v, bias):
        out, lse = attention_reference(q, k, v, mask=mask, bias=bias, return_lse=True)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda *args: call(*args)[0], inputs)


def test_rows_sum_to_one():
    q, k = tensors((2, 3, 17, 8), (2, 3, 29, 8))
    ones = torch.ones(2, 3, 29, 1, dtype=FP64)
    out = attention_reference(q, k, ones, mask=masks.window(5, 5))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-14, atol=0)


def test_the_order_of_keys_does_not_matter():
    q, k, v, bias = tensors((1, 2, 9, 8), (1, 2, 13, 8), (1, 2, 13, 8), (9, 13))
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    out = attention_reference(q, k, v, bias=bias)
    mixed = attention_reference(q, k[:, :, order], v[:, :, order], bias=bias[:, order])
    torch.testing.assert_close(out, mixed, rtol=1e-13, atol=1e-13)


def test_causal_rows_depend_on_their_prefix_alone():
    q, k, v = tensors((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    whole = attention_reference(q, k, v, is_causal=True)
    part = attention_reference(q[:, :, :7], k[:, :, :7], v[:, :, :7], is_causal=True)
    torch.testing.assert_close(whole[:, :, :7], part, rtol=1e-13, atol=1e-13)


def test_it_is_linear_in_the_values():
    q, k, v, w = tensors((1, 2, 6, 8), (1, 2, 11, 8), (1, 2, 11, 5), (1, 2, 11, 5))
    both = attention_reference(q, k, 2.0 * v - 3.0 * w)
    apart = 2.0 * attention_reference(q, k, v) - 3.0 * attention_reference(q, k, w)
    torch.testing.assert_close(both, apart, rtol=1e-12, atol=1e-12)


def test_adding_the_same_to_every_score_shifts_the_lse_alone():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 11, 8), (1, 2, 11, 5))
    shift = torch.full((6, 1), 2.5, dtype=FP64)
    out, lse = attention_reference(q, k, v, return_lse=True)
    shifted, shifted_lse = attention_reference(q, k, v, bias=shift, return_lse=True)
    torch.testing.assert_close(out, shifted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse + 2.5, shifted_lse, rtol=1e-13, atol=1e-13)


def test_rows_that_see_no_key_give_zero_and_minus_infinity():
    q, k, v = tensors((1, 1, 4, 8), (1, 1, 6, 8), (1, 1, 6, 8), dtype=torch.float32)
    visible = torch.ones(4, 6, dtype=torch.bool)
    visible[2] = False
    out, lse = attention_reference(q, k, v, mask=visible, return_lse=True)
    assert torch.equal(out[0, 0, 2], torch.zeros(8))
    assert lse[0, 0].isneginf().tolist() == [False, False, True, False]


@pytest.mark.parametrize("hide", ["mask", "bias", "lengths"])
def test_hidden_keys_may_hold_nan(hide):
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    expected = attention_reference(q, k[:, :, :4], v[:, :, :4])
    k[:, :, 4:], v[:, :, 4:] = math.nan, math.nan
    visible = torch.arange(6) < 4
    options = {
        "mask": {"mask": visible.view(1, 1, 1, 6)},
        "bias": {"bias": torch.where(visible, 0.0, -math.inf).view(1, 6)},
        "lengths": {"mask": masks.key_lengths(torch.tensor([4]))},
    }[hide]
    torch.testing.assert_close(attention_reference(q, k, v, **options), expected)


def test_a_finite_bias_never_hides_a_key():
    """Also where the compute dtype is narrower than the bias's: a row of such weighs all alike."""
    q, k, v = tensors((1, 1, 2, 8), (1, 1, 5, 8), (1, 1, 5, 8), dtype=torch.float32)
    bias = torch.full((2, 5), -1e300, dtype=FP64)
    out = attention_reference(q, k, v, bias=bias)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, FP64])
def test_dtypes_of_the_results(dtype):
    q, k, v = tensors((1, 1, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8), dtype=dtype)
    out, lse = attention_reference(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (FP64 if dtype == FP64 else torch.float32)
    out, lse = attention_reference(q, k, v, return_lse=True, compute_dtype=FP64)
    assert out.dtype == lse.dtype == FP64
