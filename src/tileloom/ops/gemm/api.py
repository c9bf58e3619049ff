"""The public function `matmul`: checks its arguments, then calls `tileloom::matmul_fwd`."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.errors import GradientError, unknown_option
from tileloom.ops._op import has_tangent, is_eager
from tileloom.ops._plans import Plans, layout_key
from tileloom.ops.gemm import checks
from tileloom.ops.gemm.autograd import matmul_fwd, matmul_out
from tileloom.ops.gemm.config import MatmulConfig
from tileloom.ops.gemm.plans import Plan, key_of, output_shape, plans
from tileloom.ops.gemm.problem import Activation

_OPTIONS = ("bias", "activation", "residual", "out", "out_dtype", "config")


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | None = None,
    **unknown: object,
) -> torch.Tensor:
    """Multiply matrices, with what follows the product done in the same kernel.

    Math: `out = activation(a @ b + bias) + residual`, summed in float32 and rounded once.
    Equivalent: `torch.matmul(a, b)`; with a weight `w` `[N, K]` of a linear layer, `b = w.mT`.

    Args:
        a: `[M, K]` or `[L, M, K]`, float16, bfloat16 or float32 (float64 by the reference), any
            strides; any size may be 0.
        b: `[K, N]` or `[L, K, N]`, a's dtype and device, any strides.
        bias: `[N]`, a floating tensor: added to every row before the activation.
        activation: `"relu"`, `"gelu"` (by erf), `"gelu_tanh"`, `"silu"` or None.
        residual: Of the output's shape, floating: added after the activation.
        out: Is written and returned: of the output's shape and dtype, any strides without overlap.
            It may be `residual` itself, and must share no element with a, b or bias; columns
            beside theirs in one matrix it may be.
        out_dtype: float16, bfloat16, float32 or float64; default: that of out, else a's.
        config: Forces a backend: a `ReferenceConfig`, `TritonConfig`, `MatvecConfig` or
            `GluonSm90Config` of `tileloom.ops.gemm.config`. Default: the fastest that takes the
            problem.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        `[M, N]`, or `[L, M, N]` if a or b has batches, contiguous unless `out` is given.

    Raises:
        ShapeError: If sizes do not fit each other.
        DtypeError: If dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If an option is out of range, or `out` shares memory it may not.
        UnknownOptionError: If there is no such option.
        GradientError: If a forward-mode derivative is asked for, or a gradient through `out`.
        ConfigError: If `config` cannot run the problem; it lists the reasons.
        UnsupportedError: If no backend can.

    Memory: the output; on CPU the reference a float32 copy of half-precision operands. Split-K
        keeps its partial sums' workspace for each device and stream: what the largest call took,
        64 MiB at most. The backward keeps a and b, and computes what an activation was given again.
    Determinism: bitwise repeatable on one GPU model, gradients included.
    Gradients: of a, b, bias and residual, to any order.
    Autocast: a and b are cast to autocast's dtype, as by `torch.matmul`; bias and residual keep
        their own.
    Hardware: fast on Hopper (sm_90) in half precision where rows start at multiples of 16 bytes;
        portable kernel from sm_80 on; the CPU by the reference.
    Source: CUTLASS's persistent cooperative GEMM; Triton's matmul tutorials.

    Example:
        >>> x, w = torch.randn(4, 16), torch.randn(32, 16)
        >>> matmul(x, w.mT, bias=torch.zeros(32), activation="relu").shape
        torch.Size([4, 32])
    """
    key = None
    if not unknown and config is None and out is None:
        key = _short_key(a, b, bias, activation, residual, out_dtype)
        plan = None if key is None else _short.get(key)
        if plan is not None:
            return plan.call(a, b, bias, residual)
    if unknown:
        raise unknown_option("matmul", next(iter(unknown)), _OPTIONS, checks.ELSEWHERE)
    a, b = checks.autocast(a, b)
    checks.check_operands("matmul", a, b)
    shape = output_shape(a, b)
    checks.check_options("matmul", activation, out_dtype, config)
    dtype = checks.output_dtype("matmul", a, out, out_dtype)
    checks.check_extras("matmul", a, bias, residual, shape)
    if has_tangent((a, b, bias, residual)):
        raise GradientError(
            "matmul: a forward-mode derivative is asked for, and there is only the backward. Try: "
            "torch.autograd.grad, or tileloom.ops.gemm.matmul_reference."
        )
    text = "" if config is None else config.encode()
    packed = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    if out is not None:
        checks.check_out("matmul", out, a, b, bias, residual, shape)
        matmul_out(a, b, packed, residual, out, activation or "", text)
        return out
    result = matmul_fwd(a, b, packed, residual, activation or "", dtype, text)
    if key is not None and packed is bias:  # else every call packs it
        plan = plans.get(key_of(a, b, bias, residual, None, dtype, activation or "", text))
        if plan is not None:
            _short.put(key, plan)
    return result


_short: Plans[Plan] = Plans()
"""Plans of calls whose arguments have passed the checks."""


def _short_key(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Any:
    """The key of a call that may go straight to its plan; None if it takes the long way.

    It says what `plans.key_of` says, flat: nearly all the time of a short call goes into its parts.
    """
    if not isinstance(a, torch.Tensor) or not is_eager((a, b, bias, residual)):
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    try:
        if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
            return None
        key = (
            a.shape, a.stride(), a.dtype, a.get_device(), a.data_ptr() & 15, b.shape, b.stride(),
            b.dtype, b.get_device(), b.data_ptr() & 15, activation, out_dtype,
        )  # fmt: skip
        if bias is None and residual is None:
            return key
        if torch.is_grad_enabled() and torch._C._any_requires_grad(bias, residual):
            return None
        return (*key, layout_key(bias), layout_key(residual))
    except (AttributeError, RuntimeError):  # no tensor, or one without strides: the checks say so
        return None
