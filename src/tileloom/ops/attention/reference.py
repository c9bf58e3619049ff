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
    Gradients: by autograd, to any order.
    """
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
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
    scores = scores.masked_fill(~visible, float("-inf"))

    empty = ~visible.any(3, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), 3).masked_fill(empty, 0.0)
    out = torch.matmul(p, v)
    out = out if compute_dtype else out.to(q.dtype)
    if not return_lse:
        return out
    wide = torch.promote_types(dtype, torch.float32)
    lse = (
        torch.logsumexp(scores.masked_fill(empty, 0.0).to(wide), 3)
        if len_k
        else q.new_zeros(batch, heads, len_q, dtype=wide)
    )
    return out, lse.masked_fill(empty[..., 0], float("-inf"))
