"""The specification of attention, in plain torch: any precision, differentiable, on any device.

    S = scale * Q K^T + bias,  hidden keys -> -inf
    P = softmax(S),  LSE = log(sum(exp(S))),  O = P V

A row that sees no key gives 0 and LSE -inf. A key that no query of its head sees is selected away
from K and V and may hold anything, NaN included.
"""

from __future__ import annotations

import torch

from tileloom.ops.attention.masks import Band, Mask, causal, dense


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by its formula; the arguments are those of `tileloom.attention`.

    Args:
        q: Queries, `[B, Hq, Lq, D]`, any floating dtype and strides.
        k: Keys, `[B, Hkv, Lk, D]`; Hkv divides Hq.
        v: Values, `[B, Hkv, Lk, Dv]`.
        mask: Bool tensor (True = visible) or a value of `tileloom.masks`.
        bias: Added to the scaled scores, broadcastable to `[B, Hq, Lq, Lk]`.
        is_causal: Means `mask & masks.causal("top_left")`.
        scale: Multiplier of the scores; default `1 / sqrt(D)`.
        return_lse: Whether to return the log-sum-exp as well.
        compute_dtype: Precision of every step; default: that of the inputs, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `q.dtype` their baseline.

    Returns:
        Output `[B, Hq, Lq, Dv]` in `compute_dtype` when that is given, else in q's dtype; with
        `return_lse` also the natural log-sum-exp `[B, Hq, Lq]`, at least float32.

    Memory: three tensors of `[B, Hq, Lq, Lk]` in `compute_dtype`.
    Determinism: that of torch's matmul.
    Gradients: by autograd, to any order; `attention_reference_backward` has them as formulas.
    """
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    scores, visible, _, v = _scores(q, k, v, mask, bias, is_causal, scale, dtype)
    empty = ~visible.any(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(empty, 0.0)
    out = torch.matmul(p, v)
    out = out if compute_dtype else out.to(q.dtype)
    if not return_lse:
        return out
    scores = scores.masked_fill(empty, 0.0).to(torch.promote_types(dtype, torch.float32))
    # Not torch.logsumexp, whose gradient exp(S - LSE) is wrong where LSE has lost the logarithm.
    peak = scores.detach().amax(3, keepdim=True) if scores.shape[3] else scores.sum(3, keepdim=True)
    lse = (scores - peak).exp().sum(3).log() + peak[..., 0]
    return out, lse.masked_fill(empty[..., 0], float("-inf"))


def attention_reference_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of `attention_reference` by their formulas, without autograd.

        dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(P * dP) + dLSE)
        dQ = scale * dS K,  dK = scale * dS^T Q,  dbias = dS, summed where the bias broadcasts

    Args:
        dout: Gradient of the output, `[B, Hq, Lq, Dv]`.
        dlse: Gradient of the log-sum-exp, `[B, Hq, Lq]`, or None. Ignored where a row sees no key.
        q: Queries, `[B, Hq, Lq, D]`.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.
        mask: As in `attention_reference`; so are bias, is_causal and scale.
        bias: See `mask`.
        is_causal: See `mask`.
        scale: See `mask`.
        compute_dtype: Precision of every step; default: that of the inputs, at least float32.

    Returns:
        dq, dk, dv and dbias (None without a bias), each of its input's shape, in `compute_dtype`
        when that is given, else in its input's dtype.

    Memory: five tensors of `[B, Hq, Lq, Lk]` in `compute_dtype`.
    Determinism: that of torch's matmul.
    """
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    batch, heads, _, head_dim = q.shape
    heads_kv, len_k = k.shape[1:3]
    width, dtypes = v.shape[3], (q.dtype, k.dtype, v.dtype)
    if scale is None:
        scale = float(head_dim**-0.5) if head_dim else 1.0
    scores, visible, k, v = _scores(q, k, v, mask, bias, is_causal, scale, dtype)
    empty = ~visible.any(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(~visible, 0.0)
    dout = dout.to(dtype)
    dp = torch.matmul(dout, v.transpose(2, 3))
    change = -(p * dp).sum(3, keepdim=True)
    if dlse is not None:
        change = change + dlse.to(dtype)[..., None]
    ds = (p * (dp + change)).masked_fill(~visible, 0.0)
    dq = torch.matmul(ds, k) * scale
    dk = torch.matmul(ds.transpose(2, 3), q.to(dtype)) * scale
    dv = torch.matmul(p.transpose(2, 3), dout)
    group = (batch, heads_kv, heads // max(heads_kv, 1), len_k)
    dk, dv = dk.reshape(*group, head_dim).sum(2), dv.reshape(*group, width).sum(2)
    dbias = None if bias is None else ds.sum_to_size(bias.shape)
    if compute_dtype is None:
        dq, dk, dv = (t.to(own) for t, own in zip((dq, dk, dv), dtypes))
        dbias = None if bias is None or dbias is None else dbias.to(bias.dtype)
    return dq, dk, dv, dbias


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give S (hidden keys -inf), what is visible, and k and v for each query head."""
    batch, heads, len_q, head_dim = q.shape
    len_k, group = k.shape[2], heads // max(k.shape[1], 1)
    if scale is None:
        scale = float(head_dim**-0.5) if head_dim else 1.0
    shown = (
        Mask(Band()) if mask is None else dense(mask) if isinstance(mask, torch.Tensor) else mask
    )
    if is_causal:
        shown = shown & causal()
    visible = shown.materialize(batch, len_q, len_k, q.device)
    if bias is not None:
        visible = visible & (bias != float("-inf"))
        # Finite in its own dtype is finite here: only -inf hides a key.
        bias = torch.where(visible, bias.to(dtype).clamp(min=torch.finfo(dtype).min), 0.0)
    visible = visible.expand(batch, heads, len_q, len_k)
    seen = visible.reshape(batch, k.shape[1], group * len_q, len_k).any(2)[..., None]
    k = torch.where(seen, k.to(dtype), 0.0).repeat_interleave(group, 1)
    v = torch.where(seen, v.to(dtype), 0.0).repeat_interleave(group, 1)
    scores = torch.matmul(q.to(dtype), k.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~visible, float("-inf")), visible, k, v
