"""What is right, and what plain PyTorch achieves: the formula in chunks, so that 16k keys fit.

Written down here a second time, on purpose: a benchmark that took an operator's own reference could
not notice that one is wrong. A test holds the two together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from tileloom.bench.contender import Inputs
from tileloom.bench.gradients import head_gradients

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
    *,
    is_causal: bool,
    compute_dtype: torch.dtype,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Compute `softmax(Q K^T / sqrt(D)) V` with every step in `compute_dtype`.

    Args:
        inputs: q `[B, Hq, L, D]`, k and v `[B, Hkv, L, D]`; Hkv divides Hq.
        is_causal: Whether row i sees only keys up to i.
        compute_dtype: Dtype of every step and of the result.
        chunk: Most scores that are held at a time.

    Returns:
        Output `[B, Hq, L, D]` in `compute_dtype`.

    Memory: the result, and about four times `chunk` elements.
    """
    batch, heads, len_q, head_dim = inputs.q.shape
    len_k, group = inputs.k.shape[2], heads // inputs.k.shape[1]
    q = inputs.q.reshape(batch * heads, len_q, head_dim)
    k, v = (
        t.repeat_interleave(group, 1).reshape(batch * heads, len_k, head_dim)
        if group > 1
        else t.reshape(batch * heads, len_k, head_dim)
        for t in (inputs.k, inputs.v)
    )
    out = torch.empty(batch * heads, len_q, head_dim, dtype=compute_dtype, device=q.device)
    some_heads = max(1, min(batch * heads, chunk // (len_q * len_k)))
    some_rows = max(1, min(len_q, chunk // (some_heads * len_k)))
    with _plain_arithmetic(), torch.no_grad():
        for h in range(0, batch * heads, some_heads):
            heads_of = slice(h, h + some_heads)
            keys, values = k[heads_of].to(compute_dtype), v[heads_of].to(compute_dtype)
            for r in range(0, len_q, some_rows):
                last = min(r + some_rows, len_q)
                seen = min(len_k, last) if is_causal else len_k
                scores = torch.matmul(
                    q[heads_of, r:last].to(compute_dtype), keys[:, :seen].transpose(1, 2)
                )
                scores *= head_dim**-0.5
                if is_causal:
                    row = torch.arange(r, last, device=q.device)[:, None]
                    hidden = torch.arange(seen, device=q.device)[None] > row
                    scores.masked_fill_(hidden, float("-inf"))
                out[heads_of, r:last] = torch.matmul(torch.softmax(scores, 2), values[:, :seen])
    return out.reshape(batch, heads, len_q, head_dim)


def reference_pair(
    inputs: Inputs, *, is_causal: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Give what the accuracy rule compares with.

    Args:
        inputs: q, k and v; dout where it is about the backward.
        is_causal: Whether row i sees only keys up to i.

    Returns:
        The right results in float64, and the plain formula with every step in the inputs' dtype:
        O alone, or dq, dk and dv.
    """
    both = (torch.float64, inputs.q.dtype)
    if inputs.dout is None:
        right, plain = (
            (chunked_attention(inputs, is_causal=is_causal, compute_dtype=dtype),) for dtype in both
        )
        return right, plain
    with _plain_arithmetic(), torch.no_grad():
        right, plain = (
            head_gradients(inputs, is_causal=is_causal, compute_dtype=dtype) for dtype in both
        )
    return right, plain
