"""Gradients of `tileloom.attention` on the CPU, through all of PyTorch that asks for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP32, AttentionCase
from torch.utils.checkpoint import checkpoint

import tileloom
from tileloom import errors, masks
from tileloom.ops import record_choices
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.config import ReferenceConfig
from tileloom.ops.attention.reference import attention_reference_backward
from tileloom.testing import poisoned_memory

CASES = [case for group in cases.GROUPS.values() for case in group]
FP64 = torch.float64
_SIZES = (2, 4, 2, 9, 13, 16, 8)
_TINY = (2, 2, 1, 3, 5, 4, 2)  # gradcheck calls once for each element
_MASK = masks.window(5, 3, anchor="bottom_right") & masks.key_lengths(torch.tensor([13, 4]))


def leaves(dtype: torch.dtype = FP64, sizes: tuple[int, ...] = _SIZES) -> list[torch.Tensor]:
    """q, k, v and a bias for each head and key."""
    batch, heads, heads_kv, len_q, len_k, dim, dim_v = sizes
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (batch, heads, len_q, dim), (batch, heads_kv, len_k, dim), (batch, heads_kv, len_k, dim_v),
        (heads, 1, len_k),
    )  # fmt: skip
    made = (torch.randn(shape, generator=generator, dtype=FP64).to(dtype) for shape in shapes)
    return [t.requires_grad_() for t in made]


def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: Any = _MASK):
    """O and LSE, 0 where LSE is -inf."""
    out, lse = tileloom.attention(q, k, v, bias=bias, mask=mask, return_lse=True)
    return out, torch.where(lse == -math.inf, 0.0, lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_shared_cases_have_right_gradients_on_the_cpu(case):
    inputs = case.inputs()
    given = gradients.upstream(inputs)
    with poisoned_memory():
        results = gradients.of_attention(inputs, given)
    gradients.check(inputs, given, results)


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal("bottom_right"), _MASK, masks.key_lengths(torch.tensor([0, 3]))],
    ids=["none", "causal", "window-lengths", "no-key"],
)
def test_gradcheck(mask):
    assert torch.autograd.gradcheck(lambda *args: both(*args, mask=mask), leaves(sizes=_TINY))


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (2, 1, 1), (2, 1, 3, 5), (2, 2, 3, 5)])
def test_gradients_of_broadcast_biases(shape):
    q, k, v, _ = leaves(sizes=_TINY)
    bias = torch.randn(shape, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradcheck(both, (q, k, v, bias))


def test_formulas_and_autograd_agree():
    q, k, v, bias = leaves()
    out, lse = attention_reference(q, k, v, bias=bias, mask=_MASK, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v, bias), (dout, dlse))
    results = attention_reference_backward(dout, dlse, q, k, v, bias=bias, mask=_MASK)
    for name, result, right in zip(gradients.NAMES, results, expected):
        torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-12, msg=name)


def test_the_gradient_of_lse_is_exact_where_lse_has_lost_the_logarithm():
    """A row of -1e30 weighs all keys alike; exp(S - LSE) would be 1 for each."""
    q, k, v, _ = leaves(FP32)
    bias = torch.full((9, 13), -1e30, requires_grad=True)
    _, lse = tileloom.attention(q, k, v, bias=bias, return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), bias)
    torch.testing.assert_close(gradient, torch.full((9, 13), 8 / 13))


@pytest.mark.parametrize("which", range(4))
def test_each_gradient_comes_alone(which):
    every = leaves()
    expected = torch.autograd.grad(both(*every)[0].sum(), every)
    alone = [t.detach().requires_grad_(i == which) for i, t in enumerate(every)]
    out = both(*alone)[0]
    out.sum().backward()
    assert torch.equal(alone[which].grad, expected[which])
    assert all(t.grad is None for i, t in enumerate(alone) if i != which)


def test_a11_only_the_bias_has_a_gradient():
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    bias = torch.randn(64, 64, requires_grad=True)
    (result,) = torch.autograd.grad(tileloom.attention(q, k, v, bias=bias).sum(), bias)
    (expected,) = torch.autograd.grad(attention_reference(q, k, v, bias=bias).sum(), bias)
    torch.testing.assert_close(result, expected)


def test_a4_one_key_passes_dout_on():
    q, k, v = (3 * torch.randn(1, 1, 1, 16).half() for _ in range(3))
    every = [t.requires_grad_() for t in (q, k, v)]
    dout = torch.randn(1, 1, 1, 16).half()
    dq, dk, dv = torch.autograd.grad(tileloom.attention(*every), every, dout)
    assert not bool(dq.any())
    assert not bool(dk.any())
    assert torch.equal(dv, dout)


def test_only_lse_is_used():
    every = leaves()
    _, lse = tileloom.attention(*every[:3], bias=every[3], return_lse=True)
    _, expected_lse = attention_reference(*every[:3], bias=every[3], return_lse=True)
    results = torch.autograd.grad(lse.sum(), every)
    expected = torch.autograd.grad(expected_lse.sum(), every, allow_unused=True)
    for result, right in zip(results, expected):
        torch.testing.assert_close(result, torch.zeros_like(result) if right is None else right)


@pytest.mark.parametrize("layout", ["transposed", "gapped", "expanded", "last_strided"])
def test_gradients_lie_as_their_inputs_do(layout):
    inputs = AttentionCase("layout", (2, 4, 4, 9, 13, 16, 16), FP32, (layout,) * 3).inputs()
    given = gradients.upstream(inputs, with_lse=False)
    results = gradients.of_attention(inputs, given)
    gradients.check(inputs, given, results)
    for own, result in zip((inputs.q, inputs.k, inputs.v), results):
        assert result.stride(3) == 1
        assert (result.stride(1) < result.stride(2)) == (own.stride(1) < own.stride(2))
        assert own.shape == result.shape


def test_a24_views_of_one_tensor_get_the_gradients_of_copies():
    whole = torch.randn(1, 2, 228, 32, requires_grad=True)
    q = torch.randn(1, 2, 64, 32)
    for cut in (128, 64):
        part = whole[:, :, :-cut]
        (result,) = torch.autograd.grad(tileloom.attention(q, part, part).sum(), whole)
        copy = part.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(tileloom.attention(q, copy, copy).sum(), copy)
        torch.testing.assert_close(result[:, :, :-cut], expected)
        assert not bool(result[:, :, -cut:].any())


def _arguments(dtype: torch.dtype, layout: str, *, with_extras: bool) -> tuple[Any, ...]:
    inputs = AttentionCase("opcheck", _SIZES, dtype, (layout,) * 3).inputs()
    extras: tuple[Any, ...] = (None, None, None)
    if with_extras:
        visible = torch.ones(2, 1, 9, 13, dtype=torch.bool)
        extras = (visible, torch.randn(4, 9, 13, requires_grad=True), torch.tensor([13, 4]))
    tensors = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    return (*tensors, *extras, 3, None, None, 2, 0.25, 0.0, None, None, "", "")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize("with_extras", [False, True], ids=["plain", "extras"])
def test_opcheck_of_both_operators(layout, with_extras):
    arguments = _arguments(FP32, layout, with_extras=with_extras)
    torch.library.opcheck(torch.ops.tileloom.attention_fwd.default, arguments)
    *tensors, _config, _backward_config = (
        a.detach() if isinstance(a, torch.Tensor) else a for a in arguments
    )
    q, k, v, mask, bias, lengths, *options = tensors
    out, lse = torch.ops.tileloom.attention_fwd(*tensors, "", "")
    backward = (
        torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, mask, bias, lengths,
        *options, True, True, with_extras, "",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.tileloom.attention_bwd.default, backward)


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    mask = masks.key_lengths(n) & masks.window(5, None, anchor="bottom_right")
    out, lse = tileloom.attention(q * 2, k, v, mask=mask, is_causal=True, return_lse=True)
    return out.square().sum() + torch.where(lse == -math.inf, 0.0, lse).sum()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training_compiles_to_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 12, 17) if dynamic else (9,):
        every = leaves(FP32, (2, 4, 2, length, length, 16, 8))[:3]
        n = torch.tensor([length, 4])
        expected = torch.autograd.grad(_block(*every, n), every)
        results = torch.autograd.grad(compiled(*every, n), every)
        for result, right in zip(results, expected):
            torch.testing.assert_close(result, right)


def test_checkpointing_gives_the_same_gradients():
    every = leaves()
    expected = torch.autograd.grad(both(*every)[0].sum(), every)
    out, _ = checkpoint(both, *every, use_reentrant=False)
    for result, right in zip(torch.autograd.grad(out.sum(), every), expected):
        assert torch.equal(result, right)


def test_autocast_gives_gradients_in_the_inputs_dtype():
    q, k, v, bias = leaves(FP32)
    with torch.autocast("cpu", dtype=BF16):
        out = tileloom.attention(q, k, v, bias=bias)
    assert out.dtype == BF16
    half = [t.detach().to(BF16).requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(tileloom.attention(*half, bias=bias.detach()).sum(), half)
    for result, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected):
        assert result.dtype == FP32
        assert torch.equal(result, right.float())


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v, bias = leaves()
    out = tileloom.attention(q, k, v, bias=bias)
    with pytest.raises(errors.GradientError, match="a gradient of its gradient"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_an_input_changed_in_place_is_noticed():
    q, k, v, _ = leaves()
    copy = k * 1
    out = tileloom.attention(q, copy, v)
    copy.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_gradient_is_kept_where_none_is_asked_for():
    with torch.no_grad():
        assert not tileloom.attention(*leaves()[:3]).requires_grad
    assert tileloom.attention(*(t.detach() for t in leaves()[:3])).grad_fn is None


def test_choices_of_both_directions_are_recorded():
    every = leaves()
    with record_choices() as made:
        tileloom.attention(*every[:3], config=ReferenceConfig()).sum().backward()
    assert [(choice.op, choice.source) for choice in made] == [
        ("attention", "explicit"),
        ("attention_bwd", "explicit"),
    ]


def test_every_gradient_is_the_same_in_every_run():
    inputs = AttentionCase("again", (2, 4, 2, 33, 40, 16, 16), FP32).inputs()
    given = gradients.upstream(inputs)
    first = gradients.of_attention(inputs, given)
    for _ in range(3):
        again = gradients.of_attention(inputs, given)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
