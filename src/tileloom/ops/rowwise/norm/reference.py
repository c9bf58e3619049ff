"""The specification of both normalisations, in plain torch: any precision, on any device.

For a row h of n elements, where h is x, or the stream s = x + residual rounded to its dtype:

    mean = sum h / n  (0 for rms norm),   rstd = 1 / sqrt(sum (h - mean)^2 / n + eps)
    out = (h - mean) * rstd * weight + bias
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    *,
    is_centred: bool,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise the rows of a tensor.

    Args:
        x: `[..., n]`, any floating dtype and strides.
        weight: `[n]`, any floating dtype, or None for ones.
        bias: `[n]`, likewise, or None for zeros.
        residual: x's shape and dtype, or None.
        eps: Added to the mean square.
        is_centred: Whether the mean is taken off.
        compute_dtype: Precision of every step; default: that of x, at least float32.

    Returns:
        Output and stream (x where there is no residual) `[..., n]`, in `compute_dtype` when that is
        given, else in x's dtype; mean and rstd `[...]` in the precision of the steps.

    Gradients: by autograd, to any order.
    """
    dtype = compute_dtype or torch.promote_types(x.dtype, torch.float32)
    stream = x if compute_dtype is None else x.to(dtype)
    if residual is not None:
        stream = stream + residual.to(stream.dtype)
    h = stream.to(dtype)
    # The mean of no element is 0 here: a row of none has no output.
    mean = h.sum(-1) / max(x.shape[-1], 1) if is_centred else h.new_zeros(h.shape[:-1])
    away = h - mean[..., None]
    rstd = torch.rsqrt(away.square().sum(-1) / max(x.shape[-1], 1) + eps)
    out = away * rstd[..., None]
    if weight is not None:
        out = out * weight.to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(stream.dtype), stream, mean, rstd


def norm_backward_reference(
    grad: Tensor,
    stream_grad: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of `norm_reference` by their formula, for where autograd does not run.

    Args:
        grad: Gradient of the output, `[..., n]`.
        stream_grad: Gradient of the stream, `[..., n]`, or None for zeros.
        h: The rows that were normalised, `[..., n]`.
        weight: `[n]` or None.
        mean: `[...]`, or None where it was not taken off.
        rstd: `[...]`; its dtype is the precision of every step.

    Returns:
        The gradients of the stream `[..., n]`, weight `[n]` and bias `[n]`, in rstd's dtype.
    """
    dtype, scale = rstd.dtype, rstd[..., None]
    width = max(h.shape[-1], 1)
    g = grad.to(dtype)
    xhat = (h.to(dtype) if mean is None else h.to(dtype) - mean[..., None]) * scale
    a = g if weight is None else g * weight.to(dtype)
    dh = a - xhat * ((a * xhat).sum(-1, keepdim=True) / width)
    if mean is not None:
        dh = dh - a.sum(-1, keepdim=True) / width
    dh = dh * scale
    if stream_grad is not None:
        dh = dh + stream_grad.to(dtype)
    leading = tuple(range(h.dim() - 1))
    if not leading:
        return dh, g * xhat, g
    return dh, (g * xhat).sum(leading), g.sum(leading)
