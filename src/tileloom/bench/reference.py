"""What is right, and what plain PyTorch achieves: the formula in chunks, so that 16k keys fit.

Written down here a second time, on purpose: a benchmark that took an operator's own reference could
not notice that one is wrong. A test holds the two together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from tileloom.bench.case import AttentionCase
from tileloom.bench.contender import Inputs
from tileloom.bench.gradients import head_gradients
from tileloom.bench.scores import Kept, bias_of, hide, none_kept

# Scores of one chunk: 512 MiB in float64, of which a few copies live at a time.
CHUNK = 2**26


@contextlib.contextmanager
def _plain_arithmetic() -> Generator[None]:
    """Turn TF32 and reduced-precision reductions off."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        (
            matmul.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ) = before


def chunked_attention(
    inputs: Inputs,
    case: AttentionCase,
    kept: Kept = none_kept,
    *,
    compute_dtype: torch.dtype,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute `softmax(Q K^T / sqrt(D) + bias) V` with every step in `compute_dtype`.

    Args:
        inputs: q `[B, Hq, L, D]`, k and v `[B, Hkv, L, D]`; Hkv divides Hq; a bias or none.
        case: Masks and dropout.
        kept: Gives the scores that dropout keeps.
        compute_dtype: Dtype of every step and of the result.
        chunk: Most scores that are held at a time.

    Returns:
        Output `[B, Hq, L, D]` in `compute_dtype`.

    Memory: the result, and about four times `chunk` elements.
    """
    batch, heads, len_q, head_dim = inputs.q.shape
    len_k, group = inputs.k.shape[2], heads // inputs.k.shape[1]
    out = torch.empty(inputs.q.shape, dtype=compute_dtype, device=inputs.q.device)
    some_rows = max(1, min(len_q, chunk // len_k))
    with _plain_arithmetic(), torch.no_grad():
        for index in range(batch * heads):
            b, h = divmod(index, heads)
            keys, values = (t[b, h // group].to(compute_dtype) for t in (inputs.k, inputs.v))
            for first in range(0, len_q, some_rows):
                rows = slice(first, min(first + some_rows, len_q))
                seen = min(len_k, rows.stop) if case.is_causal else len_k
                scores = torch.matmul(inputs.q[b, h, rows].to(compute_dtype), keys[:seen].t())
                scores *= head_dim**-0.5
                if inputs.bias is not None:
                    scores += bias_of(inputs.bias, b, h, rows)[:, :seen].to(compute_dtype)
                hide(scores, case, rows)
                weights = torch.softmax(scores, 1)
                if case.dropout_p:
                    weights *= kept(case, index, rows, out.device)[:, :seen]
                    weights /= 1 - case.dropout_p
                out[b, h, rows] = torch.matmul(weights, values[:seen])
    return out


def reference_pair(
    inputs: Inputs, case: AttentionCase, kept: Kept = none_kept
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Give what the accuracy rule compares with.

    Args:
        inputs: q, k and v; dout where it is about the backward; a bias or none.
        case: Masks, dropout, and whether dbias is wanted.
        kept: Gives the scores that dropout keeps.

    Returns:
        The right results in float64, and the plain formula with every step in the inputs' dtype:
        O alone, or dq, dk and dv, and dbias.
    """
    both = (torch.float64, inputs.q.dtype)
    if inputs.dout is None:
        right, plain = (
            (chunked_attention(inputs, case, kept, compute_dtype=dtype),) for dtype in both
        )
        return right, plain
    with _plain_arithmetic(), torch.no_grad():
        right, plain = (head_gradients(inputs, case, kept, compute_dtype=dtype) for dtype in both)
    return right, plain
