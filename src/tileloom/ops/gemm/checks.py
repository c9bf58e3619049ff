"""The checks of the product's operators; each failure is a sentence about the caller's argument.

`op` is the public function's name, as it stands at the beginning of every text.
"""

from __future__ import annotations

import difflib
from typing import get_args

import torch

from tileloom.errors import DeviceError, DtypeError, OptionError, ShapeError, shown_value
from tileloom.launch.layout import elements_share_memory
from tileloom.ops.gemm.config import MatmulConfig
from tileloom.ops.gemm.problem import ACTIVATIONS

ELSEWHERE = {  # what other libraries call it
    "alpha": "scaling a or b",
    "beta": "residual=, scaled beforehand",
    "c": "residual=",
    "epilogue": "activation=, bias= and residual=",
    "transpose_a": "a.mT, which copies nothing",
    "transpose_b": "b.mT, which copies nothing",
    "dtype": "out_dtype=",
    "output_dtype": "out_dtype=",
    "signals": "chunk_signals, the third argument",
    "timeout": "timeout_s=",
}
CONFIGS = get_args(MatmulConfig)
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_OTHER_NAMES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu(approximate='tanh')": "gelu_tanh",
    "gelu(approximate='none')": "gelu",
}


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def check_tensor(op: str, name: str, tensor: object) -> None:
    """Refuse what is no dense tensor of floating numbers."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(
            f"{op}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor. "
            f"Try: torch.as_tensor({name})."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise DtypeError(
            f"{op}: {name} is a {kind} tensor; supported: dense strided tensors. "
            f"Try: {name}.to_dense()."
        )
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise DtypeError(
            f"{op}: {name} has dtype {tensor.dtype}; supported: torch.float16, torch.bfloat16, "
            f"torch.float32, torch.float64. Try: {name}.to(torch.bfloat16)."
        )


def check_device(op: str, name: str, tensor: torch.Tensor, a: torch.Tensor) -> None:
    """Refuse a tensor on another device than a."""
    if tensor.device != a.device:
        raise DeviceError(
            f"{op}: {name} is on {tensor.device}, a on {a.device}; they must be on the same "
            f"device. Try: {name}.to(a.device)."
        )


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse operands that cannot be multiplied."""
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(op, name, tensor)
        if tensor.dim() not in (2, 3):
            remedy = f"{name}.unsqueeze(0) for a vector"
            if tensor.dim() > 3:
                remedy = f"{name}.flatten(0, {tensor.dim() - 3}) for one dimension of batches"
            raise ShapeError(
                f"{op}: {name} has {tensor.dim()} dimensions; it must have 2, or 3 with a batch. "
                f"Try: {remedy}."
            )
    if b.dtype != a.dtype:
        raise DtypeError(
            f"{op}: b has dtype {b.dtype}, a has {a.dtype}; they must be the same. "
            "Try: b.to(a.dtype)."
        )
    check_device(op, "b", b, a)
    if a.shape[-1] != b.shape[-2]:
        remedy = f"a b of {a.shape[-1]} rows, or an a of {b.shape[-2]} columns"
        if a.shape[-1] == b.shape[-1]:
            looks = ": it looks like the weight of a linear layer" if b.dim() == 2 else ""
            remedy = f"b.mT{looks}"
        elif a.shape[-2] == b.shape[-2]:
            remedy = "a.mT"
        raise ShapeError(
            f"{op}: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; a's last size (K) must "
            f"be b's last but one. Try: {remedy}."
        )
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"{op}: a has {a.shape[0]} batches, b has {b.shape[0]}; they must be the same. "
            "Try: b[0] where all share one."
        )


def check_extras(
    op: str,
    a: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
) -> None:
    """Refuse a bias or a residual that does not fit the output."""
    for name, tensor, expected, remedy in (
        ("bias", bias, shape[-1:], "bias.flatten(), or residual= for what has rows"),
        ("residual", residual, shape, "residual.expand(shape of the output)"),
    ):
        if tensor is None:
            continue
        check_tensor(op, name, tensor)
        check_device(op, name, tensor, a)
        if tuple(tensor.shape) != tuple(expected):
            raise ShapeError(
                f"{op}: {name} has shape {tuple(tensor.shape)}; it must be {tuple(expected)}. "
                f"Try: {remedy}."
            )


def check_options(
    op: str, activation: object, out_dtype: torch.dtype | None, config: MatmulConfig | None
) -> None:
    """Refuse an activation, a dtype or a config that there is not."""
    is_text = isinstance(activation, str)  # an array would be compared element by element
    if activation is not None and not (is_text and activation in ACTIVATIONS[1:]):
        remedy = "one of these"
        if is_text or callable(activation):
            name = str(getattr(activation, "__name__", activation)).lower()
            near = difflib.get_close_matches(_OTHER_NAMES.get(name, name), ACTIVATIONS[1:], n=1)
            remedy = f"activation={near[0]!r}" if near else "activation=None, and yours afterwards"
        raise OptionError(
            f"{op}: activation is {shown_value(activation)}; it must be one of "
            f"{', '.join(map(repr, ACTIVATIONS[1:]))}, or None. Try: {remedy}."
        )
    is_dtype = isinstance(out_dtype, torch.dtype)
    if out_dtype is not None and not (is_dtype and out_dtype in _OUT_DTYPES):
        raise DtypeError(
            f"{op}: out_dtype is {shown_value(out_dtype)}; supported: "
            f"{', '.join(map(str, _OUT_DTYPES))}."
        )
    if config is not None and not isinstance(config, CONFIGS):
        raise OptionError(
            f"{op}: config is a {type(config).__name__}; it must be one of "
            f"{', '.join(c.__name__ for c in CONFIGS)}, or None."
        )


def output_dtype(
    op: str, a: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    """Say which dtype the output has; refuse `out` and `out_dtype` that differ."""
    if out is None:
        return a.dtype if out_dtype is None else out_dtype
    check_tensor(op, "out", out)
    if out_dtype is not None and out.dtype != out_dtype:
        raise DtypeError(
            f"{op}: out has dtype {out.dtype}, and out_dtype is {out_dtype}. Try: leaving "
            "out_dtype away."
        )
    return out.dtype


def check_out(
    op: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
) -> None:
    """Refuse an `out` that does not fit, or that shares memory which is still read."""
    check_device(op, "out", out, a)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(
            f"{op}: out has shape {tuple(out.shape)}, and the product {tuple(shape)}. "
            f"Try: torch.empty({tuple(shape)})."
        )
    if elements_share_memory(out):
        raise OptionError(
            f"{op}: out has shape {tuple(out.shape)} and strides {out.stride()}: elements share "
            "memory. Try: out.clone()."
        )
    if out.is_neg():
        raise OptionError(
            f"{op}: out is a view of a conjugated tensor, whose values are the negatives of what "
            "lies in memory. Try: out.resolve_neg(), which copies."
        )
    for name, tensor in (("a", a), ("b", b), ("bias", bias), ("residual", residual)):
        if tensor is None or not _may_overlap(out, tensor):
            continue
        if name == "residual" and _is_same(out, tensor):
            continue
        raise OptionError(
            f"{op}: out shares memory with {name}, which is still read while it is written. "
            f"Try: {name}.clone()."
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is an address: not of meta and fake tensors, nor inside functorch."""
    if tensor.numel() == 0 or tensor.is_meta or hasattr(tensor, "fake_mode"):
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _lie_beside(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are columns of one matrix, and have none in common."""
    strides = [
        [(s * t.element_size(), n) for n, s in zip(t.shape, t.stride()) if n > 1]
        for t in (one, other)
    ]
    both = {s for s, _ in strides[0]} & {s for s, _ in strides[1]}
    for step in both - {0}:  # of the rows; what is larger must be a multiple
        if any(s % step for dims in strides for s, _ in dims if s > step):
            continue
        first, second = (
            sum((n - 1) * s for s, n in dims if s < step) + t.element_size()
            for dims, t in zip(strides, (one, other))
        )
        if first <= (other.data_ptr() - one.data_ptr()) % step <= step - second:
            return True
    return False


def _may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or not (_has_memory(one) and _has_memory(other)):
        return False
    (first, end), (other_first, other_end) = _span(one), _span(other)
    return first < other_end and other_first < end and not _lie_beside(one, other)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one_is, other_is = ((t.data_ptr(), t.stride(), t.dtype) for t in (one, other))
    return one_is == other_is
