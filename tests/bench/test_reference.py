from dataclasses import replace

import pytest
import torch

from tileloom import masks
from tileloom.bench import AttentionCase, reference_pair
from tileloom.bench.reference import chunked_attention
from tileloom.cli.bench_ours import DROPOUT_SEED, kept_by_dropout
from tileloom.ops.attention.reference import attention_reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("chunk", [1, 37 * 5, 2**26])
def test_any_chunk_gives_what_the_operators_reference_gives(is_causal, heads_kv, chunk):
    case = AttentionCase("c", 2, 4, heads_kv, 29, 37, 16, is_causal, "float32")
    x = case.inputs(CPU, 3)
    mine = chunked_attention(x, case, compute_dtype=torch.float64, chunk=chunk)
    other = attention_reference(x.q, x.k, x.v, is_causal=is_causal, compute_dtype=torch.float64)
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_baseline_is_the_formula_in_the_dtype_of_the_inputs(dtype, is_causal):
    case = AttentionCase("c", 1, 2, 2, 96, 96, 32, is_causal, dtype)
    x = case.inputs(CPU, 0)
    (right,), (plain,) = reference_pair(x, case)
    other = attention_reference(x.q, x.k, x.v, is_causal=is_causal, compute_dtype=case.dtype)
    assert (right.dtype, plain.dtype) == (torch.float64, case.dtype)
    error = (plain.double() - right).abs().max()
    assert 0 < error < 0.05  # rounded, so not the reference; but near it
    torch.testing.assert_close(plain, other, rtol=0, atol=float(2 * error))


def test_flags_are_given_back():
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction)
    case = AttentionCase("c", 1, 1, 1, 8, 8, 8, False, "float32")
    reference_pair(case.inputs(CPU, 0), case)
    assert (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction) == before


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_gradients_are_those_of_the_operators_reference(is_causal, heads_kv):
    case = AttentionCase("c", 2, 4, heads_kv, 29, 37, 16, is_causal, "float32", "backward")
    x = case.inputs(CPU, 3)
    right, plain = reference_pair(x, case)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attention_reference(*leaves, is_causal=is_causal)
    for mine, rounded, other in zip(right, plain, torch.autograd.grad(out, leaves, x.dout)):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded.double(), other, rtol=1e-4, atol=1e-5)


FEATURES = {
    "bias of heads": {"bias": "heads", "bias_gradient": True},
    "whole bias": {"bias": "full"},
    "bias of keys": {"bias": "keys", "bias_gradient": True},
    "window": {"is_causal": True, "window": 7},
    "dropout": {"dropout_p": 0.3},
    "all": {"is_causal": True, "window": 9, "bias": "heads", "dropout_p": 0.2},
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_features_are_those_of_the_operators_reference(feature, direction):
    case = replace(AttentionCase("c", 2, 4, 2, 37, 37, 16, False, "float32", direction), **feature)
    x = case.inputs(CPU, 3)
    right, _ = reference_pair(x, case, kept_by_dropout)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    options = {"is_causal": case.is_causal}
    if case.window:
        options = {"mask": masks.window(case.window, 0)}
    if x.bias is not None:
        bias = x.bias.double().requires_grad_(case.bias_gradient)
        options["bias"] = bias
        leaves += [bias] if case.bias_gradient else []
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "philox": (DROPOUT_SEED, 0)}
    out = attention_reference(*leaves[:3], **options)
    others = [out] if direction == "forward" else torch.autograd.grad(out, leaves, x.dout)
    assert len(right) == len(others)
    for mine, other in zip(right, others):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
