"""The specification of layer norm, in plain torch: any precision, differentiable, on any device.

h = x, or the stream x + residual;   mean = sum h / n
out = (h - mean) / sqrt(sum (h - mean)^2 / n + eps) * weight + bias
"""

from __future__ import annotations

import torch

from tileloom.ops.rowwise.norm.reference import norm_reference


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows by mean and standard deviation; arguments as `tileloom.layer_norm`.

    Args:
        x: `[..., n]`, any floating dtype and strides.
        weight: `[n]`, any floating dtype, or None for ones.
        bias: `[n]`, any floating dtype, or None for zeros.
        eps: Added to the variance.
        residual: Added to x first: x's shape and dtype, or None.
        compute_dtype: Precision of every step; default: that of x, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `x.dtype` their baseline.

    Returns:
        `[..., n]` in `compute_dtype` when that is given, else in x's dtype; with a residual also
        the stream, x + residual.

    Memory: a few tensors like x in the precision of the steps.
    Gradients: by autograd, to any order.
    """
    out, stream, _, _ = norm_reference(
        x, weight, bias, residual, eps, is_centred=True, compute_dtype=compute_dtype
    )
    return out if residual is None else (out, stream)
