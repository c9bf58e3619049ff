"""The public function `matmul`: checks its arguments, then calls `tileloom::matmul_fwd`."""

from __future__ import annotations

import difflib
from typing import Any, get_args

import torch

from tileloom.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
)
from tileloom.ops._op import has_tangent, is_eager
from tileloom.ops._plans import Plans
from tileloom.ops.gemm.autograd import matmul_fwd, matmul_out
from tileloom.ops.gemm.config import MatmulConfig
from tileloom.ops.gemm.plans import Plan, key_of, output_shape, plans
from tileloom.ops.gemm.problem import ACTIVATIONS, Activation

_OPTIONS = ("bias", "activation", "residual", "out", "out_dtype", "config")
_ELSEWHERE = {  # what other libraries call it
    "alpha": "scaling a or b",
    "beta": "residual=, scaled beforehand",
    "c": "residual=",
    "epilogue": "activation=, bias= and residual=",
    "transpose_a": "a.mT, which copies nothing",
    "transpose_b": "b.mT, which copies nothing",
    "dtype": "out_dtype=",
    "output_dtype": "out_dtype=",
}
_CONFIGS = get_args(MatmulConfig)
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
            It may be `residual` itself, and must share no memory with a, b or bias.
        out_dtype: float16, bfloat16, float32 or float64; default: that of out, else a's.
        config: Forces a backend: a `ReferenceConfig`, `TritonConfig` or `GluonSm90Config` of
            `tileloom.ops.gemm.config`. Default: the fastest that takes the problem.
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

    Memory: the output; on CPU the reference a float32 copy of half-precision operands. The
        backward keeps a and b, and computes what an activation was given again.
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
            out = a.new_empty(output_shape(a, b), dtype=out_dtype or a.dtype)
            return plan.run(a, b, bias, residual, out)
    if unknown:
        raise UnknownOptionError(_unknown_option(next(iter(unknown))))
    a, b = _cast(a, b)
    _check_operands(a, b)
    shape = output_shape(a, b)
    _check_options(activation, out_dtype, config)
    dtype = _output_dtype(a, out, out_dtype)
    _check_extras(a, bias, residual, shape)
    if has_tangent((a, b, bias, residual)):
        raise GradientError(
            "matmul: a forward-mode derivative is asked for, and there is only the backward. Try: "
            "torch.autograd.grad, or tileloom.ops.gemm.matmul_reference."
        )
    text = "" if config is None else config.encode()
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if out is not None:
        _check_out(out, a, b, bias, residual, shape)
        matmul_out(a, b, bias, residual, out, activation or "", text)
        return out
    result = matmul_fwd(a, b, bias, residual, activation or "", dtype, text)
    plan = None if key is None else plans.get(key)
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
    """The key of a call that may go straight to its plan; None if it takes the long way."""
    tensors = (a, b, bias, residual)
    if not isinstance(a, torch.Tensor) or not is_eager(tensors):
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return None
    dtype = a.dtype if out_dtype is None else out_dtype
    return key_of(a, b, bias, residual, None, dtype, activation or "", "")


def _unknown_option(name: str) -> str:
    remedy = _ELSEWHERE.get(name)
    if remedy is None:
        near = difflib.get_close_matches(name, _OPTIONS, n=1)
        remedy = f"{near[0]}=" if near else "one of these"
    return f"matmul: there is no option '{name}'; options: {', '.join(_OPTIONS)}. Try: {remedy}."


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply autocast: floating tensors but those of float64, which it leaves alone."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if kind in ("", "meta") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(
            f"matmul: {name} is a {type(tensor).__name__}; it must be a torch.Tensor. "
            f"Try: torch.as_tensor({name})."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise DtypeError(
            f"matmul: {name} is a {kind} tensor; supported: dense strided tensors. "
            f"Try: {name}.to_dense()."
        )
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise DtypeError(
            f"matmul: {name} has dtype {tensor.dtype}; supported: torch.float16, torch.bfloat16, "
            f"torch.float32, torch.float64. Try: {name}.to(torch.bfloat16)."
        )


def _check_device(name: str, tensor: torch.Tensor, a: torch.Tensor) -> None:
    if tensor.device != a.device:
        raise DeviceError(
            f"matmul: {name} is on {tensor.device}, a on {a.device}; they must be on the same "
            f"device. Try: {name}.to(a.device)."
        )


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        _check_tensor(name, tensor)
        if tensor.dim() not in (2, 3):
            remedy = f"{name}.unsqueeze(0) for a vector"
            if tensor.dim() > 3:
                remedy = f"{name}.flatten(0, {tensor.dim() - 3}) for one dimension of batches"
            raise ShapeError(
                f"matmul: {name} has {tensor.dim()} dimensions; it must have 2, or 3 with a batch. "
                f"Try: {remedy}."
            )
    if b.dtype != a.dtype:
        raise DtypeError(
            f"matmul: b has dtype {b.dtype}, a has {a.dtype}; they must be the same. "
            "Try: b.to(a.dtype)."
        )
    _check_device("b", b, a)
    if a.shape[-1] != b.shape[-2]:
        flips = b.dim() == 2 and a.shape[-1] == b.shape[-1]
        remedy = "b.mT: it looks like the weight of a linear layer" if flips else "a.mT or b.mT"
        raise ShapeError(
            f"matmul: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; a's last size (K) must "
            f"be b's last but one. Try: {remedy}."
        )
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"matmul: a has {a.shape[0]} batches, b has {b.shape[0]}; they must be the same. "
            "Try: b[0] where all share one."
        )


def _check_extras(
    a: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
) -> None:
    for name, tensor, expected, remedy in (
        ("bias", bias, shape[-1:], "bias.flatten(), or residual= for what has rows"),
        ("residual", residual, shape, "residual.expand(shape of the output)"),
    ):
        if tensor is None:
            continue
        _check_tensor(name, tensor)
        _check_device(name, tensor, a)
        if tuple(tensor.shape) != tuple(expected):
            raise ShapeError(
                f"matmul: {name} has shape {tuple(tensor.shape)}; it must be {tuple(expected)}. "
                f"Try: {remedy}."
            )


def _check_options(
    activation: object, out_dtype: torch.dtype | None, config: MatmulConfig | None
) -> None:
    if activation is not None and activation not in ACTIVATIONS[1:]:
        raise OptionError(
            f"matmul: activation is {activation!r}; it must be one of "
            f"{', '.join(map(repr, ACTIVATIONS[1:]))}, or None."
        )
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise DtypeError(
            f"matmul: out_dtype is {out_dtype}; supported: {', '.join(map(str, _OUT_DTYPES))}."
        )
    if config is not None and not isinstance(config, _CONFIGS):
        raise OptionError(
            f"matmul: config is a {type(config).__name__}; it must be one of "
            f"{', '.join(c.__name__ for c in _CONFIGS)}, or None."
        )


def _output_dtype(
    a: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    if out is None:
        return a.dtype if out_dtype is None else out_dtype
    _check_tensor("out", out)
    if out_dtype is not None and out.dtype != out_dtype:
        raise DtypeError(
            f"matmul: out has dtype {out.dtype}, and out_dtype is {out_dtype}. Try: leaving "
            "out_dtype away."
        )
    return out.dtype


def _check_out(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
) -> None:
    _check_device("out", out, a)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(
            f"matmul: out has shape {tuple(out.shape)}, and the product {tuple(shape)}. "
            f"Try: torch.empty({tuple(shape)})."
        )
    if torch._debug_has_internal_overlap(out) == 1:
        raise OptionError(
            "matmul: out has elements that share memory (a stride of 0). Try: out.clone()."
        )
    for name, tensor in (("a", a), ("b", b), ("bias", bias), ("residual", residual)):
        if tensor is None or not _may_overlap(out, tensor):
            continue
        if name == "residual" and _is_same(out, tensor):
            continue
        raise OptionError(
            f"matmul: out shares memory with {name}, which is still read while it is written. "
            f"Try: {name}.clone()."
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last one."""
    size = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * size


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or one.numel() == 0 or other.numel() == 0:
        return False
    (first, end), (other_first, other_end) = _span(one), _span(other)
    return first < other_end and other_first < end


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
