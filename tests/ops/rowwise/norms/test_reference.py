"""Both specifications against PyTorch's own norms, and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import FUNCTIONS, NormCase

from tileloom.ops.rowwise.layer_norm import layer_norm_reference
from tileloom.ops.rowwise.norm.reference import norm_backward_reference, norm_reference
from tileloom.ops.rowwise.rms_norm import rms_norm_reference

F64 = torch.float64


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 1), (0, 4), (3, 0)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_they_are_pytorch_s_formulas(shape, eps):
    x = torch.randn(shape, dtype=F64)
    weight, bias = torch.randn(2, shape[-1], dtype=F64).unbind(0)
    ours = layer_norm_reference(x, weight, bias, eps=eps)
    torch.testing.assert_close(ours, F.layer_norm(x, shape[-1:], weight, bias, eps))
    ours = rms_norm_reference(x, weight, eps=eps)
    torch.testing.assert_close(ours, F.rms_norm(x, shape[-1:], weight, eps))


@pytest.mark.parametrize("dtype", [cases.FP16, cases.BF16, cases.FP32, F64])
def test_the_default_eps_of_rms_norm_is_pytorch_s(dtype):
    x = torch.full((1, 4), 3e-4, dtype=dtype)  # as large as the root of float32's eps
    torch.testing.assert_close(rms_norm_reference(x), F.rms_norm(x, (4,)))
    wide = x.to(F64)
    told = rms_norm_reference(wide, eps=torch.finfo(torch.promote_types(dtype, cases.FP32)).eps)
    torch.testing.assert_close(rms_norm_reference(x), told.to(dtype))


@pytest.mark.parametrize("op", ["rms", "layer"])
def test_a_residual_is_added_and_rounded_first(op):
    function, reference = FUNCTIONS[op]
    x, residual = torch.randn(2, 4, 40, dtype=cases.BF16).unbind(0)
    for call in (function, reference):
        out, stream = call(x, residual=residual)
        assert torch.equal(stream, x + residual)
        assert torch.equal(out, call(x + residual))


@pytest.mark.parametrize("is_centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("with_weight", [False, True])
def test_the_formula_of_the_gradients_is_that_of_autograd(is_centred, with_weight):
    x = torch.randn(2, 3, 8, dtype=F64, requires_grad=True)
    weight = torch.randn(8, dtype=F64, requires_grad=True) if with_weight else None
    bias = torch.zeros(8, dtype=F64, requires_grad=True)
    out, _, mean, rstd = norm_reference(x, weight, bias, None, 1e-3, is_centred=is_centred)
    grad = torch.randn_like(out)
    leaves = [x, bias, *([] if weight is None else [weight])]
    expected = torch.autograd.grad(out, leaves, grad)
    with torch.no_grad():
        dh, dweight, dbias = norm_backward_reference(
            grad, None, x, weight, mean if is_centred else None, rstd
        )
    torch.testing.assert_close([dh, dbias, dweight][: len(leaves)], list(expected))


@pytest.mark.parametrize("op", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(3, 2, 5), (6,)])
def test_gradcheck_of_the_public_functions(op, shape):
    case = NormCase(op, shape, F64, ("weight", "bias", "residual")[:: 2 if op == "rms" else 1])
    tensors = {name: t.requires_grad_() for name, t in case.inputs().tensors.items()}

    def call(*values):
        return FUNCTIONS[op][0](**dict(zip(tensors, values)), eps=1e-3)

    assert torch.autograd.gradcheck(call, tuple(tensors.values()))


@pytest.mark.parametrize("op", ["rms", "layer"])
def test_the_references_have_gradients_of_any_order(op):
    x = torch.randn(2, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(FUNCTIONS[op][1], (x,))
