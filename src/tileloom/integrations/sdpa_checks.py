"""Which calls of the replaced operators are tileloom's, and which PyTorch's own kernels get."""

from __future__ import annotations

import math

import torch

from tileloom.integrations.sdpa_conventions import Asked, Call, Given
from tileloom.ops._op import Choice

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Refused(Exception):
    """tileloom does not take a call, for the reason in the text; nothing has been computed."""


def check_call(call: Call) -> None:
    """Refuse what no kernel of tileloom computes, and what PyTorch's own has to refuse."""
    fault = _malformed(call)
    if fault is not None:
        raise Refused(fault)
    if call.seqlen_k is not None and not call.is_packed:
        raise Refused("seqlen_k is given without cu_seqlens_k; PyTorch's kernel ignores it there")


def check_backward(call: Call, given: Given, asked: Asked) -> None:
    """Refuse a backward that does not fit its forward, and what only PyTorch's kernel decides."""
    batch, rows, heads, _ = call.query.shape
    expected = (batch, rows, heads, call.value.shape[3])
    for name, tensor in (("grad_out", given.grad_out), ("out", given.out)):
        if tuple(tensor.shape) != expected or tensor.dtype != call.query.dtype:
            raise Refused(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}")
    lse, sizes = given.logsumexp, call.sizes()
    if lse.dim() != 3 or lse.dtype != torch.float32:
        raise Refused("logsumexp is not a float32 tensor of three dimensions")
    if tuple(lse.shape[:2]) != sizes[:2] or lse.shape[2] < sizes[2]:
        raise Refused(f"logsumexp has shape {tuple(lse.shape)}")
    if asked.bias_requires_grad and call.bias is None:
        raise Refused("bias_requires_grad without a bias")
    if (asked.num_splits_key or 1) > 1 and torch.are_deterministic_algorithms_enabled():
        raise Refused(
            f"num_splits_key is {asked.num_splits_key} where algorithms are deterministic"
        )
    is_alike = call.query.shape == call.key.shape == call.value.shape
    if asked.shared_storage_dqdkdv and not is_alike:
        raise Refused("shared_storage_dqdkdv for gradients of different shapes")


def check_choice(choice: Choice) -> None:
    """Refuse what only the reference takes where there are kernels: it needs all scores."""
    if choice.backend == "reference" and choice.refused:
        raise Refused("; ".join(choice.refused["triton"]))


def _malformed(call: Call) -> str | None:
    """Say what PyTorch's kernel has to refuse in a call, None if nothing.

    Such a call is not tileloom's to judge: PyTorch's kernel gets it, and raises in its own words.
    """
    query, key, value = call.query, call.key, call.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            return f"{name} has {tensor.dim()} dimensions, not 4"
        if tensor.dtype != query.dtype or tensor.dtype not in _DTYPES:
            return f"{name} has dtype {tensor.dtype}, query {query.dtype}"
        if tensor.device != query.device or tensor.layout is not torch.strided:
            return f"{name} is not a dense tensor on query's device"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "query, key and value differ in their batch"
    if key.shape[1] != value.shape[1]:
        return "key and value differ in their lengths"
    heads = key.shape[2]
    if heads != value.shape[2] or (query.shape[2] % heads if heads else query.shape[2]):
        return "the heads of query, key and value do not fit each other"
    if query.shape[3] != key.shape[3]:
        return "query and key differ in their head dim"
    return _malformed_options(call)


def _malformed_options(call: Call) -> str | None:
    if call.custom_mask_type not in (0, 1, 2):
        return f"custom_mask_type is {call.custom_mask_type}, not 0, 1 or 2"
    if call.window and not call.custom_mask_type:
        return f"window_size is {call.window} without a causal custom_mask_type"
    if not 0.0 <= call.dropout_p < 1.0 - 2.0**-25:  # in float32, which decides, that is 1
        return f"dropout_p is {call.dropout_p}, not in [0, 1)"
    if not math.isfinite(call.multiplier):
        return f"scale is {call.scale}"
    bias, query = call.bias, call.query
    if bias is not None:
        expected = (query.shape[0], query.shape[2], query.shape[1], call.key.shape[1])
        if tuple(bias.shape) != expected:
            return f"bias has shape {tuple(bias.shape)}, not {expected}"
        if bias.dtype != query.dtype or bias.device != query.device:
            return f"bias has dtype {bias.dtype}, query {query.dtype}, or is on another device"
    return _malformed_packing(call)


def _malformed_packing(call: Call) -> str | None:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    if starts_q is None and starts_k is None:
        return None
    if starts_q is None or starts_k is None:
        return "only one of cu_seqlens_q and cu_seqlens_k is given"
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.is_contiguous():
            return f"{name} is not a contiguous int32 tensor of one dimension"
        if starts.device != call.query.device:
            return f"{name} is not on query's device"
    if starts_q.shape != starts_k.shape or not starts_q.shape[0]:
        return "cu_seqlens_q and cu_seqlens_k differ in their sizes, or are empty"
    lengths = call.seqlen_k
    if lengths is not None and (
        lengths.dtype != torch.int32
        or tuple(lengths.shape) != (starts_k.shape[0] - 1,)
        or lengths.device != call.query.device
    ):
        return "seqlen_k is not an int32 tensor on query's device with an entry for each sequence"
    if call.query.shape[0] != 1:
        return f"packed sequences in a batch of {call.query.shape[0]}, not 1"
    if call.max_seqlen_q is None:
        return "max_seqlen_q is missing"
    if call.bias is not None:
        return "a bias with packed sequences"
    return None
