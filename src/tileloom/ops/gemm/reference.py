"""The matrix product in plain torch, for any device and precision: the specification."""

from __future__ import annotations

import torch

from tileloom.ops.gemm.problem import Activation


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation by its name; None and "" leave x as it is."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return x


def matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `activation(a @ b + bias) + residual`, rounded once.

    Args:
        a: `[M, K]` or `[L, M, K]`.
        b: `[K, N]` or `[L, K, N]`, a's dtype.
        bias: `[N]` or None.
        activation: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"` or None.
        residual: The output's shape, or None.
        out_dtype: Default: a's dtype.

    Returns:
        `[M, N]` or `[L, M, N]`. Half-precision inputs are computed in float32, others in their own
        precision; differentiable to any order.
    """
    wide = torch.float32 if a.dtype.itemsize < 4 else a.dtype
    x = torch.matmul(a.to(wide), b.to(wide))
    if bias is not None:
        x = x + bias.to(wide)
    x = activate(x, activation)
    if residual is not None:
        x = x + residual.to(wide)
    return x.to(a.dtype if out_dtype is None else out_dtype)
