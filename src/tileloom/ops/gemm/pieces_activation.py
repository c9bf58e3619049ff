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
_TANH_1 = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634)
_TANH_3 = tl.constexpr(0.044715 * -2 * 0.7978845608028654 * 1.4426950408889634)
_P = tl.constexpr(0.4 * 0.7071067811865476)


def _activate(x, ACTIVATION: tl.constexpr, MANTISSA: tl.constexpr):
    """relu, gelu (by erf), gelu_tanh, silu, or x itself for ""; MANTISSA bits are stored.

    gelu: max(x, 0) - z Q(z), z = |x|, Q the normal distribution's integral above z.

    For half precision log2(Q) is a polynomial. That of bf16 has a relative error of 5e-4 up to
    z = 3.5 and beyond an absolute one, of z Q, of 4e-7: what x (1 + erf(x / sqrt(2))) / 2 has in
    float32. That of fp16 is good to 3.3e-6 up to z = 6. Further on both fall to 0. For float32 Q
    is t 2^(P(t) - z^2 log2(e) / 2) with t = 1 / (1 + 0.4 z / sqrt(2)), P fitted to
    log2(erfc(y) e^(y^2) / (2 t)), y = z / sqrt(2) up to 10, to 9e-8: no digit is lost in the tail.
    """
    if ACTIVATION == "relu":
        x = tl.where(x > 0, x, x * 0)
    elif ACTIVATION == "gelu":
        if MANTISSA == 23:
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
        else:
            z = tl.minimum(tl.abs(x), 16.0)
            if MANTISSA == 7:
                p = 0.0026678100 * z - 0.03735597
                p = p * z - 0.47937335
                p = p * z - 1.14172527
                p = p * z - 1.00070191
            else:
                p = -1.8348144976698677e-06 * z + 6.159835174912587e-05
                p = p * z - 0.0009305253042839468
                p = p * z + 0.008507892489433289
                p = p * z - 0.05396007373929024
                p = p * z - 0.4584643840789795
                p = p * z - 1.1512510776519775
                p = p * z - 0.9999952912330627
            p = tl.inline_asm_elementwise(_EXP2, "=f,f", [p], tl.float32, True, 1)
            x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * p
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "silu":
        if ACTIVATION == "gelu_tanh":
            p = (x * x * _TANH_3 + _TANH_1) * x
        else:
            p = x * -_LOG2_E
        p = 1 + tl.inline_asm_elementwise(_EXP2, "=f,f", [p], tl.float32, True, 1)
        x *= tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [p], tl.float32, True, 1)
    return x


activate_triton = triton.jit(_activate)
activate_gluon = gluon.jit(_activate)
