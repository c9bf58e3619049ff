"""The activations of an epilogue, one source for Triton's kernels and Gluon's, in float32.

An epilogue's time is its instructions, and an exponential or a reciprocal takes the time of eight:
each activation has one of both at most, in the form that is one instruction, and no branch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

_EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_2_PI = tl.constexpr(0.7978845608028654)
_P = tl.constexpr(0.4 * 0.7071067811865476)


def _activate(x, ACTIVATION: tl.constexpr):
    """relu, gelu (by erf), gelu_tanh, silu, or x itself for "".

    gelu: x times the normal distribution's integral, which is t 2^(P(t) - x^2 log2(e) / 2) for
    x < 0 with t = 1 / (1 + 0.4 |x| / sqrt(2)). P was fitted to log2(erfc(z) e^(z^2) / (2 t)),
    z = |x| / sqrt(2) up to 10, to a relative error of 9e-8: no digit is lost in the tail.
    """
    if ACTIVATION == "relu":
        x = tl.where(x > 0, x, x * 0)
    elif ACTIVATION == "gelu":
        t = tl.abs(x) * _P + 1
        t = tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [t], tl.float32, True, 1)
        p = -0.29869720339775085 * t + 1.3305491209030151
        p = p * t - 2.136185884475708
        p = p * t + 1.4319767951965332
        p = p * t - 0.6326231360435486
        p = p * t + 0.430057168006897
        p = p * t + 0.5776590704917908
        p = p * t + 1.4450122117996216
        p = p * t - 3.1477482318878174
        p -= x * x * (0.5 * _LOG2_E)
        t *= tl.inline_asm_elementwise(_EXP2, "=f,f", [p], tl.float32, True, 1)
        x *= tl.where(x > 0, 1 - t, t)
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "silu":
        p = x * -_LOG2_E
        if ACTIVATION == "gelu_tanh":
            p *= (x * x * 0.044715 + 1) * (2 * _SQRT_2_PI)
        p = 1 + tl.inline_asm_elementwise(_EXP2, "=f,f", [p], tl.float32, True, 1)
        x *= tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [p], tl.float32, True, 1)
    return x


activate_triton = triton.jit(_activate)
activate_gluon = gluon.jit(_activate)
