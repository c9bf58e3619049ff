import pytest
import torch

from tileloom.bench import AttentionCase, reference_pair
from tileloom.bench.reference import chunked_attention
from tileloom.ops.attention.reference import attention_reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("chunk", [1, 37 * 5, 37 * 29, 37 * 29 * 3, 2**26])
def test_any_chunk_gives_what_the_operators_reference_gives(is_causal, heads_kv, chunk):
    case = AttentionCase("c", 2, 4, heads_kv, 29, 37, 16, is_causal, "float32")
    x = case.inputs(CPU, 3)
    mine = chunked_attention(x, is_causal=is_causal, compute_dtype=torch.float64, chunk=chunk)
    other = attention_reference(x.q, x.k, x.v, is_causal=is_causal, compute_dtype=torch.float64)
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_baseline_is_the_formula_in_the_dtype_of_the_inputs(dtype, is_causal):
    case = AttentionCase("c", 1, 2, 2, 96, 96, 32, is_causal, dtype)
    x = case.inputs(CPU, 0)
    (right,), (plain,) = reference_pair(x, is_causal=is_causal)
    other = attention_reference(x.q, x.k, x.v, is_causal=is_causal, compute_dtype=case.dtype)
    assert (right.dtype, plain.dtype) == (torch.float64, case.dtype)
    error = (plain.double() - right).abs().max()
    assert 0 < error < 0.05  # rounded, so not the reference; but near it
    torch.testing.assert_close(plain, other, rtol=0, atol=float(2 * error))


def test_flags_are_given_back():
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction)
    x = AttentionCase("c", 1, 1, 1, 8, 8, 8, False, "float32").inputs(CPU, 0)
    reference_pair(x, is_causal=False)
    assert (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction) == before


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_gradients_are_those_of_the_operators_reference(is_causal, heads_kv):
    case = AttentionCase("c", 2, 4, heads_kv, 29, 37, 16, is_causal, "float32", "backward")
    x = case.inputs(CPU, 3)
    right, plain = reference_pair(x, is_causal=is_causal)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attention_reference(*leaves, is_causal=is_causal)
    for mine, rounded, other in zip(right, plain, torch.autograd.grad(out, leaves, x.dout)):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded.double(), other, rtol=1e-4, atol=1e-5)
