"""The specification of SwiGLU, in plain torch: any precision, differentiable, on any device.

out = silu(gate) * up,   silu(g) = g * sigmoid(g)
"""

from __future__ import annotations

import torch


def swiglu_reference(
    gate: torch.Tensor, up: torch.Tensor, *, compute_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gate one tensor by another; arguments as `tileloom.swiglu`.

    Args:
        gate: `[..., n]`, any floating dtype and strides.
        up: gate's shape and dtype.
        compute_dtype: Precision of every step; default: that of gate, at least float32.
            `torch.float64` gives the reference of the accuracy tests, `gate.dtype` their baseline.

    Returns:
        `[..., n]` in `compute_dtype` when that is given, else in gate's dtype.

    Gradients: by autograd, to any order.
    """
    dtype = compute_dtype or torch.promote_types(gate.dtype, torch.float32)
    out = torch.nn.functional.silu(gate.to(dtype)) * up.to(dtype)
    return out if compute_dtype else out.to(gate.dtype)


def swiglu_backward_reference(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the gradients of gate and up by their formula, for where autograd does not run.

    Args:
        grad: Gradient of the output, `[..., n]`.
        gate: `[..., n]`.
        up: `[..., n]`.

    Returns:
        Both gradients `[..., n]`, in gate's precision, at least float32.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u, dout = gate.to(dtype), up.to(dtype), grad.to(dtype)
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    return dout * u * (sigmoid + silu * (1.0 - sigmoid)), dout * silu
