"""The specification of softmax, in plain torch: any precision, differentiable, on any device.

    y_i = exp(x_i - max x) / sum_j exp(x_j - max x)      over the visible elements of a row

An element is hidden where the mask says so, or where it is -inf. Hidden elements give 0, get
gradient 0, and may hold anything, NaN included. A row that shows nothing gives 0, as in attention
and in `torch._safe_softmax`; `torch.softmax` gives NaN for a row of -inf.
"""

from __future__ import annotations

import torch


def softmax_reference(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute softmax by its formula; the arguments are those of `tileloom.softmax`.

    Args:
        x: `[..., N]`, any floating dtype and strides.
        mask: Bool tensor that broadcasts to x (True = visible), or None.
        compute_dtype: Precision of every step; default: that of x, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `x.dtype` their baseline.

    Returns:
        `[..., N]` in `compute_dtype` when that is given, else in x's dtype.

    Memory: a few tensors of x's shape in `compute_dtype`.
    Determinism: bitwise repeatable.
    Gradients: by autograd, to any order.
    """
    dtype = compute_dtype or torch.promote_types(x.dtype, torch.float32)
    out_dtype = compute_dtype or x.dtype
    if x.numel() == 0:
        return x.to(out_dtype)
    visible = x != float("-inf")
    if mask is not None:
        visible = visible & mask
    shown = torch.where(visible, x.to(dtype), float("-inf"))
    peak = shown.amax(-1, keepdim=True).detach()  # its gradient is 0
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    e = torch.where(visible, torch.exp(shown - peak), 0.0)
    total = e.sum(-1, keepdim=True)
    return (e / torch.where(total == 0.0, 1.0, total)).to(out_dtype)


def softmax_backward_reference(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of softmax from its output: `y (dy - sum(dy y))` along the rows.

    Args:
        y: What softmax returned, `[..., N]`, any floating dtype and strides.
        dy: The gradient of y, y's shape and dtype.

    Returns:
        The gradient of x, `[..., N]` in y's dtype; computed at least in float32.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    p, g = y.to(dtype), dy.to(dtype)
    return (p * (g - (p * g).sum(-1, keepdim=True))).to(y.dtype)
