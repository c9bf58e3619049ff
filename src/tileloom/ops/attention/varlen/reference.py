"""The specification of packed attention: `attention_reference` on one sequence after the other.

Rows and keys are counted inside their sequence; a mask, a bias and dropout's random numbers are
those of the padded batch `[S, Hq, max_q, max_k]`, of which each sequence takes its corner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tileloom.ops.attention.masks import Band, Mask, dense
from tileloom.ops.attention.reference import (
    Philox,
    attention_reference,
    attention_reference_backward,
    dropout_uniforms,
)


def attention_varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    philox: Philox | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute packed attention by its formula; the arguments are those of `attention_varlen`.

    Args:
        q: Queries, `[Tq, Hq, D]`, any floating dtype and strides.
        k: Keys, `[Tk, Hkv, D]`; Hkv divides Hq.
        v: Values, `[Tk, Hkv, Dv]`.
        cu_seqlens_q: `[S + 1]` integers; sequence s has the rows `cu[s] .. cu[s + 1] - 1` of q.
        cu_seqlens_k: `[S + 1]`, likewise for k and v.
        max_q: At least the largest number of rows of a sequence.
        max_k: At least the largest number of keys.
        mask: Bool tensor, broadcastable to `[S, Hq, max_q, max_k]`, or a value of
            `tileloom.masks`.
        bias: Added to the scaled scores, broadcastable to `[S, Hq, max_q, max_k]`.
        is_causal: Means `mask & masks.causal("top_left")`.
        scale: Multiplier of the scores; default `1 / sqrt(D)`.
        dropout_p: Probability that a score is dropped, below 1.
        philox: Seed and offset, as of a padded batch; needed where `dropout_p` is not 0.
        return_lse: Whether to return the log-sum-exp as well.
        compute_dtype: As in `attention_reference`.

    Returns:
        Output `[Tq, Hq, Dv]`; with `return_lse` also the natural log-sum-exp `[Hq, Tq]`.

    Memory: that of `attention_reference` for the longest sequence. The lengths come to the host.
    Gradients: by autograd, to any order.
    """
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    draw = _draws(dropout_p, philox, (q.shape[1], max_q, max_k), q.device)
    parts = _sequences(cu_seqlens_q, cu_seqlens_k, mask, bias)
    for s, (rows, keys, shown, part) in enumerate(parts):
        out, lse = attention_reference(
            *(_alone(t, place) for t, place in ((q, rows), (k, keys), (v, keys))),
            mask=shown, bias=part, is_causal=is_causal, scale=scale, dropout_p=dropout_p,
            philox=draw(s, rows, keys), return_lse=True, compute_dtype=compute_dtype,
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    if not outs:
        wide = torch.promote_types(compute_dtype or q.dtype, torch.float32)
        outs = [q.new_empty((0, q.shape[1], v.shape[2]), dtype=compute_dtype or q.dtype)]
        lses = [q.new_empty((q.shape[1], 0), dtype=wide)]
    out = torch.cat(outs)
    return (out, torch.cat(lses, 1)) if return_lse else out


def attention_varlen_reference_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    philox: Philox | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of `attention_varlen_reference` by their formulas, without autograd.

    Args:
        dout: Gradient of the output, `[Tq, Hq, Dv]`.
        dlse: Gradient of the log-sum-exp, `[Hq, Tq]`, or None.
        q: Queries, `[Tq, Hq, D]`.
        k: Keys, `[Tk, Hkv, D]`.
        v: Values, `[Tk, Hkv, Dv]`.
        cu_seqlens_q: As in `attention_varlen_reference`; so are all that follow.
        cu_seqlens_k: See `cu_seqlens_q`.
        max_q: See `cu_seqlens_q`.
        max_k: See `cu_seqlens_q`.
        mask: See `cu_seqlens_q`.
        bias: See `cu_seqlens_q`.
        is_causal: See `cu_seqlens_q`.
        scale: See `cu_seqlens_q`.
        dropout_p: See `cu_seqlens_q`.
        philox: See `cu_seqlens_q`.
        compute_dtype: Precision of every step; default: that of the inputs, at least float32.

    Returns:
        dq, dk, dv and dbias (None without a bias), each of its input's shape, in `compute_dtype`
        when that is given, else in its input's dtype.

    Memory: that of `attention_reference_backward` for the longest sequence, and a copy of the bias.
    """
    draw = _draws(dropout_p, philox, (q.shape[1], max_q, max_k), q.device)
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (q, k, v))
    dbias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
    parts = _sequences(cu_seqlens_q, cu_seqlens_k, mask, bias)
    sums = _sequences(cu_seqlens_q, cu_seqlens_k, None, dbias)
    for s, ((rows, keys, shown, part), (_, _, _, total)) in enumerate(zip(parts, sums)):
        grads = attention_reference_backward(
            _alone(dout, rows), None if dlse is None else dlse[None, :, rows],
            *(_alone(t, place) for t, place in ((q, rows), (k, keys), (v, keys))),
            mask=shown, bias=part, is_causal=is_causal, scale=scale, dropout_p=dropout_p,
            philox=draw(s, rows, keys), compute_dtype=dtype,
        )  # fmt: skip
        for whole, place, grad in zip((dq, dk, dv), (rows, keys, keys), grads[:3]):
            whole[place] = grad[0].transpose(0, 1)
        if total is not None and grads[3] is not None:
            total += grads[3]
    if compute_dtype is None:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        dbias = None if bias is None or dbias is None else dbias.to(bias.dtype)
    return dq, dk, dv, dbias


def _draws(
    dropout_p: float, philox: Philox | None, full: tuple[int, int, int], device: torch.device
) -> Callable[[int, slice, slice], torch.Tensor | None]:
    """Give the uniforms of one sequence: its corner of those of the padded batch."""

    def draw(sequence: int, rows: slice, keys: slice) -> torch.Tensor | None:
        if not dropout_p or philox is None:
            return None
        seed, offset = philox
        offset = offset + sequence * full[0] * full[1] * full[2]
        uniforms = dropout_uniforms(seed, offset, (1, *full), device=device)
        return uniforms[:, :, : rows.stop - rows.start, : keys.stop - keys.start]

    return draw


def _alone(tensor: torch.Tensor, place: slice) -> torch.Tensor:
    """One sequence of `[T, H, D]` as a batch of one, `[1, H, L, D]`."""
    return tensor[place].transpose(0, 1)[None]


def _sequences(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Iterator[tuple[slice, slice, Mask, torch.Tensor | None]]:
    """Give of each sequence its rows, its keys, and its part of mask and bias, as views."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    shown = dense(mask) if isinstance(mask, torch.Tensor) else mask or Mask(Band())
    for s in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
        sizes = (rows.stop - rows.start, keys.stop - keys.start)
        lengths = None if shown.lengths is None else shown.lengths[s : s + 1]
        visible = None if shown.visible is None else _corner(shown.visible, s, sizes)
        part = None if bias is None else _corner(bias, s, sizes)
        yield rows, keys, Mask(shown.band, lengths, visible), part


def _corner(tensor: torch.Tensor, sequence: int, sizes: tuple[int, int]) -> torch.Tensor:
    """Of what broadcasts to `[S, Hq, max_q, max_k]` the part of one sequence, as a view."""
    whole = tensor[(None,) * (4 - tensor.dim())]
    if whole.shape[0] > 1:
        whole = whole[sequence : sequence + 1]
    for dimension, size in zip((2, 3), sizes):
        if whole.shape[dimension] > 1:
            whole = whole.narrow(dimension, 0, size)
    return whole
