"""The checks that row-wise operators share; each failure is a sentence about the caller's argument.

`op` is the public function's name, as it stands at the beginning of every text.
"""

from __future__ import annotations

import torch

from tileloom.errors import (
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
)
from tileloom.ops._op import has_tangent
from tileloom.ops.rowwise.config import CONFIGS

_FLOATS = "torch.float16, torch.bfloat16, torch.float32, torch.float64"


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
            f"{op}: {name} has dtype {tensor.dtype}; supported: {_FLOATS}. "
            f"Try: {name}.to(torch.bfloat16)."
        )


def check_rows(op: str, name: str, tensor: object) -> None:
    """Refuse what is no dense floating tensor `[..., n]` of at least one dimension."""
    check_tensor(op, name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.dim() == 0:
        raise ShapeError(
            f"{op}: {name} has no dimension; it must have shape [..., n]. Try: {name}.reshape(1)."
        )


def check_device(op: str, name: str, tensor: torch.Tensor, first: torch.Tensor, of: str) -> None:
    """Refuse a tensor on another device than the first one, which is called `of`."""
    if tensor.device != first.device:
        raise DeviceError(
            f"{op}: {name} is on {tensor.device}, {of} on {first.device}; they must be on the same "
            f"device. Try: {name}.to({of}.device)."
        )


def check_alike(op: str, name: str, tensor: object, first: torch.Tensor, of: str) -> None:
    """Refuse a tensor whose shape, dtype or device is not that of the first, called `of`."""
    check_tensor(op, name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.shape != first.shape:
        raise ShapeError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, {of} has {tuple(first.shape)}; they "
            f"must be the same. Try: {name}.expand_as({of}) where it broadcasts."
        )
    if tensor.dtype != first.dtype:
        raise DtypeError(
            f"{op}: {name} has dtype {tensor.dtype}, {of} has {first.dtype}; they must be the "
            f"same. Try: {name}.to({of}.dtype)."
        )
    check_device(op, name, tensor, first, of)


def check_vector(op: str, name: str, vector: object, x: torch.Tensor) -> None:
    """Refuse a weight or bias that is no floating `[n]` on x's device; None passes."""
    if vector is None:
        return
    if isinstance(vector, (int, tuple, list, torch.Size)):
        raise DtypeError(
            f"{op}: {name} is a {type(vector).__name__}; it must be a torch.Tensor or None. "
            "Try: leaving a normalized shape out: the last dimension is normalised."
        )
    check_tensor(op, name, vector)
    assert isinstance(vector, torch.Tensor)
    width = x.shape[-1]
    if vector.dim() != 1 or vector.shape[0] != width:
        flat = vector.numel() == width
        raise ShapeError(
            f"{op}: {name} has shape {tuple(vector.shape)}, x has rows of {width} elements; it "
            f"must have shape ({width},). "
            f"Try: {f'{name}.flatten()' if flat else 'one entry for each element of a row'}."
        )
    check_device(op, name, vector, x, "x")


def check_norm(op: str, x: object, weight: object, bias: object, residual: object) -> None:
    """Refuse tensors that no normalisation takes; also for who calls a registered operator."""
    check_rows(op, "x", x)
    assert isinstance(x, torch.Tensor)
    check_vector(op, "weight", weight, x)
    check_vector(op, "bias", bias, x)
    if residual is not None:
        check_alike(op, "residual", residual, x, "x")


def check_config(op: str, config: object) -> None:
    """Refuse a config that is none of the backends'."""
    if config is not None and not isinstance(config, CONFIGS):
        raise OptionError(
            f"{op}: config is a {type(config).__name__}; it must be one of "
            f"{', '.join(c.__name__ for c in CONFIGS)}, or None."
        )


def check_no_tangent(op: str, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors that carry a forward-mode tangent, which would be lost."""
    if has_tangent(tensors):
        raise GradientError(
            f"{op}: a forward-mode derivative is asked for, and there is only the backward. Try: "
            f"torch.autograd.grad, or tileloom.ops.rowwise.{op}.{op}_reference."
        )
