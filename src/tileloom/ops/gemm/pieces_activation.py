"""The activations of an epilogue, one source for Triton's kernels and Gluon's, in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_2_PI = tl.constexpr(0.7978845608028654)


def _activate(x, ACTIVATION: tl.constexpr):
    """relu, gelu (by erf), gelu_tanh, silu, or x itself for ""."""
    if ACTIVATION == "relu":
        x = tl.where(x > 0, x, x * 0)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.math.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        inner = _SQRT_2_PI * (x + 0.044715 * x * x * x)
        x = x / (1 + tl.math.exp(-2 * inner))
    elif ACTIVATION == "silu":
        x = x / (1 + tl.math.exp(-x))
    return x


activate_triton = triton.jit(_activate)
activate_gluon = gluon.jit(_activate)
