"""PyTorch's memory-efficient attention in the words of its specification: float64, in a loop.

Differentiable by autograd, so that it is the reference of gradients as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tileloom.testing import assert_accurate


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: which rows of `[B, M, ...]` are its queries and keys."""

    batch: int
    queries: slice
    keys: slice


def sequences(query, key, cu_seqlens_q=None, cu_seqlens_k=None, seqlen_k=None) -> list[Sequence]:
    if cu_seqlens_q is None:
        every = slice(0, query.shape[1]), slice(0, key.shape[1])
        return [Sequence(b, *every) for b in range(query.shape[0])]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    ends_k = starts_k[1:]
    if seqlen_k is not None:
        ends_k = [start + n for start, n in zip(starts_k, seqlen_k.tolist())]
    return [
        Sequence(0, slice(*starts_q[s : s + 2]), slice(starts_k[s], ends_k[s]))
        for s in range(len(starts_q) - 1)
    ]


def visible(rows: int, columns: int, custom_mask_type: int, window_size: int | None):
    """Which key each query of a sequence sees: section 2.3."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    offset = columns - rows if custom_mask_type == 2 else 0
    shown = torch.ones((rows, columns), dtype=torch.bool)
    if custom_mask_type:
        shown = j <= i + offset
        if window_size:
            shown = shown & (j > i + offset - window_size)
    return shown


def uniforms(seed: int, first: int, count: int) -> torch.Tensor:
    """Random numbers number `first` to `first + count` of a Philox4x32-10: section 2.5."""
    place = numpy.arange(first, first + count, dtype=numpy.uint64)
    low = numpy.uint64(0xFFFFFFFF)
    shift = numpy.uint64(32)
    counter = place // numpy.uint64(4)
    c = [counter & low, counter >> shift, numpy.zeros_like(place), numpy.zeros_like(place)]
    key = [numpy.uint64(seed & 0xFFFFFFFF), numpy.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(10):
        a, b = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ key[0], b & low, (a >> shift) ^ c[3] ^ key[1], a & low]
        key = [
            (key[0] + numpy.uint64(0x9E3779B9)) & low,
            (key[1] + numpy.uint64(0xBB67AE85)) & low,
        ]
    words = numpy.choose((place % numpy.uint64(4)).astype(numpy.int64), c)
    return torch.from_numpy(words.astype(numpy.float64) * 2.0**-32 + 2.0**-33)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    custom_mask_type: int = 0,
    scale: float | None = None,
    window_size: int | None = None,
    seqlen_k: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the output `[B, M, H, Kv]` and the padded log-sum-exp, in a precision."""
    heads = query.shape[2]
    group = heads // key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    whole = sequences(query, key, cu_seqlens_q, cu_seqlens_k, seqlen_k)
    longest_q = query.shape[1] if max_seqlen_q is None else max_seqlen_q
    longest_k = key.shape[1] if max_seqlen_k is None else max_seqlen_k
    rows = -(-longest_q // 32) * 32
    out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=dtype, device=query.device)
    lse = torch.full((len(whole), heads, rows), math.inf, dtype=dtype, device=query.device)
    for s, one in enumerate(whole):
        for h in range(heads):
            q = query[one.batch, one.queries, h].to(dtype)
            k = key[one.batch, one.keys, h // group].to(dtype)
            v = value[one.batch, one.keys, h // group].to(dtype)
            scores = q @ k.T * scale
            if bias is not None:
                scores = scores + bias[one.batch, h].to(dtype)
            shown = visible(*scores.shape, custom_mask_type, window_size).to(query.device)
            shown = shown & (scores != -math.inf)
            scores = scores.masked_fill(~shown, -math.inf)
            blind = ~shown.any(1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(blind, 0.0), 1).masked_fill(blind, 0.0)
            lse[s, h, : len(q)] = (
                torch.logsumexp(scores.masked_fill(blind, 0.0), 1).masked_fill(blind[:, 0], 0.0)
                if len(k)
                else 0.0
            )
            if dropout_p:
                first = offset + (s * heads + h) * longest_q * longest_k
                drawn = uniforms(seed, first, longest_q * longest_k)
                drawn = drawn.reshape(longest_q, longest_k)[: len(q), : len(k)].to(query.device)
                weights = weights * (drawn > dropout_p) / (1 - dropout_p)
            out[one.batch, one.queries, h] = weights @ v
    return out, lse


def gradients(
    grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], dtype=torch.float64, **options: Any
) -> list[torch.Tensor]:
    """Give the gradients of query, key, value and, if it is the fourth, bias."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out, _ = forward(*leaves, dtype=dtype, **options)
    return list(torch.autograd.grad(out, leaves, grad_out.to(dtype)))


def check_forward(results: Any, tensors: tuple[torch.Tensor, ...], **options: Any) -> None:
    """Judge output and log-sum-exp by the accuracy rule, padding and empty rows exactly."""
    out, lse = results[:2]
    reference = forward(*tensors, **options)
    baseline = forward(*tensors, dtype=tensors[0].dtype, **options)
    assert out.is_contiguous()
    assert out.dtype == tensors[0].dtype
    assert_accurate(out, reference[0], baseline[0], name="out")
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == reference[1].shape
    assert torch.equal(lse == math.inf, reference[1] == math.inf)
    assert torch.equal(lse == 0.0, reference[1] == 0.0)
    seen = lse != math.inf
    assert_accurate(lse[seen], reference[1][seen], baseline[1][seen].float(), name="lse")


def check_gradients(
    results: Any, grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], **options: Any
) -> None:
    """Judge gradients by the accuracy rule."""
    reference = gradients(grad_out, tensors, **options)
    baseline = gradients(grad_out, tensors, tensors[0].dtype, **options)
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    for name, result, r, b in zip(names, results, reference, baseline):
        assert_accurate(result, r, b, name=name)
