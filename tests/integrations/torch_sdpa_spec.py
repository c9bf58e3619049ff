"""PyTorch's memory-efficient attention in the words of its specification: float64, in a loop.

Differentiable by autograd, so that it is the reference of gradients as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tileloom.bench.gradients import joined
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.masks import Band, Mask
from tileloom.testing import WeakCaseError, assert_accurate


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


@dataclass(frozen=True)
class Options:
    """What a call has beside its tensors; seed and offset are those of the random numbers."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    dropout_p: float = 0.0
    custom_mask_type: int = 0
    scale: float | None = None
    window_size: int | None = None
    seqlen_k: torch.Tensor | None = None
    seed: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Part:
    """One head of one sequence: its places in the tensors, and its weights in a precision."""

    sequence: int
    place: Any
    place_kv: Any
    weights: torch.Tensor
    lse: torch.Tensor
    factor: torch.Tensor | float


def parts(query, key, bias, options: Options, dtype: torch.dtype) -> Iterator[Part]:
    """Give the weights of each head of each sequence, before dropout, and dropout's factor."""
    heads = query.shape[2]
    group = heads // key.shape[2]
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    packing = (options.cu_seqlens_q, options.cu_seqlens_k, options.seqlen_k)
    longest_q = query.shape[1] if options.max_seqlen_q is None else options.max_seqlen_q
    longest_k = key.shape[1] if options.max_seqlen_k is None else options.max_seqlen_k
    for s, one in enumerate(sequences(query, key, *packing)):
        for h in range(heads):
            place, place_kv = (one.batch, one.queries, h), (one.batch, one.keys, h // group)
            scores = query[place].to(dtype) @ key[place_kv].to(dtype).T * scale
            if bias is not None:
                scores = scores + bias[one.batch, h].to(dtype)
            rows, columns = scores.shape
            shown = visible(rows, columns, options.custom_mask_type, options.window_size)
            shown = shown.to(query.device) & (scores != -math.inf)
            blind = ~shown.any(1, keepdim=True)
            scores = scores.masked_fill(~shown, -math.inf).masked_fill(blind, 0.0)
            weights = torch.softmax(scores, 1).masked_fill(blind, 0.0)
            lse = torch.logsumexp(scores, 1) if columns else scores.sum(1)
            factor = 1.0
            if options.dropout_p:
                first = options.offset + (s * heads + h) * longest_q * longest_k
                numbers = uniforms(options.seed, first, longest_q * longest_k)
                numbers = numbers.reshape(longest_q, longest_k)[:rows, :columns]
                factor = (numbers > options.dropout_p).to(query.device) / (1 - options.dropout_p)
            yield Part(s, place, place_kv, weights, lse.masked_fill(blind[:, 0], 0.0), factor)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the output `[B, M, H, Kv]` and the padded log-sum-exp, in a precision."""
    options = Options(**given)
    longest = query.shape[1] if options.max_seqlen_q is None else options.max_seqlen_q
    starts = options.cu_seqlens_q
    count = query.shape[0] if starts is None else starts.shape[0] - 1
    out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=dtype, device=query.device)
    size = (count, query.shape[2], -(-longest // 32) * 32)
    lse = torch.full(size, math.inf, dtype=dtype, device=query.device)
    for part in parts(query, key, bias, options, dtype):
        out[part.place] = (part.weights * part.factor).to(dtype) @ value[part.place_kv].to(dtype)
        lse[part.sequence, part.place[2], : len(part.lse)] = part.lse
    return out, lse


def gradients(
    grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], dtype=torch.float64, **given: Any
) -> list[torch.Tensor]:
    """Give the gradients of query, key, value and, if it is the fourth, bias, by autograd."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out, _ = forward(*leaves, dtype=dtype, **given)
    return list(torch.autograd.grad(out, leaves, grad_out.to(dtype)))


def formulas(
    grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, **given: Any
) -> list[torch.Tensor]:
    """Give the same by the formulas of section 2.7: a second plain baseline."""
    options = Options(**given)
    query, key, value = tensors[:3]
    scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
    bias = tensors[3] if len(tensors) > 3 else None
    results = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in tensors]
    for part in parts(query, key, bias, options, dtype):
        do, v = grad_out[part.place].to(dtype), value[part.place_kv].to(dtype)
        dropped = (part.weights * part.factor).to(dtype)
        delta = (do * (dropped @ v)).sum(1, keepdim=True)
        ds = (part.weights * ((do @ v.T) * part.factor - delta)).to(dtype)
        results[0][part.place] = ds @ key[part.place_kv].to(dtype) * scale
        results[1][part.place_kv] += ds.T @ query[part.place].to(dtype) * scale
        results[2][part.place_kv] += dropped.T @ do
        if bias is not None:
            results[3][part.place[0], part.place[2]] = ds
    return results


def by_attention_reference(
    tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give output and log-sum-exp of a dense batch by tileloom's reference: a second baseline."""
    options = Options(**given)
    query, key, value = (t.transpose(1, 2) for t in tensors[:3])
    left = options.window_size - 1 if options.window_size else None
    band = {
        0: Band(),
        1: Band(left_top=left, right_top=0),
        2: Band(left_bottom=left, right_bottom=0),
    }[options.custom_mask_type]
    out, lse = attention_reference(
        query, key, value, mask=Mask(band), bias=tensors[3] if len(tensors) > 3 else None,
        scale=options.scale, dropout_p=options.dropout_p, philox=(options.seed, options.offset),
        return_lse=True, compute_dtype=dtype,
    )  # fmt: skip
    padding = -lse.shape[2] % 32
    lse = torch.nn.functional.pad(lse.nan_to_num(neginf=0.0), (0, padding), value=math.inf)
    return out.transpose(1, 2), lse.to(dtype)


def worse(reference: torch.Tensor, *plain: torch.Tensor) -> torch.Tensor:
    """Of two plain baselines, the one that is further from the reference, number by number."""
    a, *others = plain
    for b in others:
        a = torch.where((b.double() - reference).abs() > (a.double() - reference).abs(), b, a)
    return a


def check_forward(results: Any, tensors: tuple[torch.Tensor, ...], **given: Any) -> None:
    """Judge output and log-sum-exp by the accuracy rule, padding and empty rows exactly."""
    out, lse = results[:2]
    dtype = tensors[0].dtype
    reference = forward(*tensors, **given)
    plain = [forward(*tensors, dtype=dtype, **given)]
    if given.get("cu_seqlens_q") is None:
        plain.append(by_attention_reference(tensors, dtype, **given))
    baseline = [worse(r, *both) for r, *both in zip(reference, *plain)]
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


def _plain_gradients(
    grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], **given: Any
) -> list[list[torch.Tensor]]:
    """Give the plain baselines; in float32 those of the CPU too.

    A row that sees a few keys has the error of a few sums, whose order is the library's: on one
    device it may be small by luck (causal, 64 columns: 2.9e-7 on a GPU, 7.2e-7 on a CPU).
    """
    dtype, device = tensors[0].dtype, grad_out.device
    found = [gradients(grad_out, tensors, dtype, **given)]
    found.append(formulas(grad_out, tensors, dtype, **given))
    if dtype == torch.float32 and device.type == "cuda":
        moved = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        there = _plain_gradients(grad_out.cpu(), tuple(t.cpu() for t in tensors), **moved)
        found += [[t.to(device) for t in each] for each in there]
    return found


def check_gradients(
    results: Any, grad_out: torch.Tensor, tensors: tuple[torch.Tensor, ...], **given: Any
) -> None:
    """Judge gradients by the accuracy rule, 16 rows joined, against the worst plain baseline."""
    dtype = tensors[0].dtype
    reference = gradients(grad_out, tensors, **given)
    plain = zip(*_plain_gradients(grad_out, tensors, **given))
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    for name, result, r, several in zip(names, results, reference, plain):
        baseline = worse(r, *several)
        assert result.shape == r.shape, name
        try:
            assert_accurate(joined(result), joined(r), joined(baseline), name=name)
        except WeakCaseError:
            # Rounding is all there is, as in dQ of rows that see one key.
            size = max(float(t.abs().max()) for t in (grad_out, *reference) if t.numel())
            limit = 4 * float((baseline.double() - r).abs().max())
            limit += float(torch.finfo(dtype).eps) * size
            assert float((result.double() - r).abs().max()) <= limit, name
