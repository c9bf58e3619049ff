"""The specification of RMS norm, in plain torch: any precision, differentiable, on any device.

h = x, or the stream x + residual
out = h / sqrt(sum h^2 / n + eps) * weight
"""

from __future__ import annotations

import torch

from tileloom.ops.rowwise.norm.reference import norm_reference

_EPS = {torch.float64: torch.finfo(torch.float64).eps}


def default_eps(dtype: torch.dtype) -> float:
    """The eps of `torch.nn.functional.rms_norm`: the spacing of the precision of the sums."""
    return _EPS.get(dtype, torch.finfo(torch.float32).eps)


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows by the root of their mean square; arguments as `tileloom.rms_norm`.

    Args:
        x: `[..., n]`, any floating dtype and strides.
        weight: `[n]`, any floating dtype, or None for ones.
        eps: Added to the mean square; default as `default_eps` says.
        residual: Added to x first: x's shape and dtype, or None.
        compute_dtype: Precision of every step; default: that of x, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `x.dtype` their baseline.

    Returns:
        `[..., n]` in `compute_dtype` when that is given, else in x's dtype; with a residual also
        the stream, x + residual.

    Memory: a few tensors like x in the precision of the steps.
    Gradients: by autograd, to any order.
    """
    eps = default_eps(x.dtype) if eps is None else eps
    out, stream, _, _ = norm_reference(
        x, weight, None, residual, eps, is_centred=False, compute_dtype=compute_dtype
    )
    return out if residual is None else (out, stream)
