"""Element types: how values are held in numpy, and how they become bits and back.

fp16, fp32, fp64 and integers are held as they are; bf16, fp8 and tf32 as float32 values that are
rounded after every operation, so that arithmetic has the precision of the hardware's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMPY: dict[str, Any] = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.float32,
    "f8E4M3FN": np.float32, "f8E5M2": np.float32, "i1": np.bool_, "i8": np.int8,
    "i16": np.int16, "i32": np.int32, "i64": np.int64, "ptr": np.int64, "index": np.int64,
}  # fmt: skip
_SIZE = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8E4M3FN": 1, "f8E5M2": 1, "i1": 1, "i8": 1,
    "i16": 2, "i32": 4, "i64": 8, "ptr": 8, "index": 8,
}  # fmt: skip
RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
UNSIGNED: dict[str, Any] = {
    "i1": np.bool_, "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64,
    "index": np.uint64, "ptr": np.uint64,
}  # fmt: skip
TORCH: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8E4M3FN", torch.float8_e5m2: "f8E5M2", torch.bool: "i1",
    torch.int8: "i8", torch.uint8: "i8", torch.int16: "i16", torch.uint16: "i16",
    torch.int32: "i32", torch.uint32: "i32", torch.int64: "i64", torch.uint64: "i64",
}  # fmt: skip
_FP8 = {"f8E4M3FN": torch.float8_e4m3fn, "f8E5M2": torch.float8_e5m2}
_FP8_VALUES: dict[str, np.ndarray] = {}
# Types whose values are float32 numbers that must be rounded after each operation.
ROUNDED = frozenset({"bf16", "f8E4M3FN", "f8E5M2"})


class UnknownElementError(KeyError):
    """An element type is not in the table."""


def numpy_type(elem: str) -> Any:
    """Return the numpy type that holds values of an element type."""
    try:
        return _NUMPY[elem]
    except KeyError:
        raise UnknownElementError(f"element type '{elem}' is not known") from None


def size_of(elem: str) -> int:
    """Return the size of an element in bytes."""
    try:
        return _SIZE[elem]
    except KeyError:
        raise UnknownElementError(f"element type '{elem}' is not known") from None


def is_float(elem: str) -> bool:
    """Whether an element type is a floating-point type."""
    return elem[:1] == "f" or elem == "bf16"


def round_bf16(x: Any) -> np.ndarray:
    """Round float32 values to bf16, nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(x, dtype=np.float32)
    bits = values.view(np.uint32)
    out = (
        (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))))
        & np.uint32(0xFFFF0000)
    ).view(np.float32)
    bad = np.isnan(values)
    if bad.any():
        out = np.where(bad, np.float32(np.nan), out)
    return out if np.ndim(x) else out.reshape(())


def _fp8_values(elem: str) -> np.ndarray:
    table = _FP8_VALUES.get(elem)
    if table is None:
        table = torch.arange(256, dtype=torch.uint8).view(_FP8[elem]).float().numpy()
        _FP8_VALUES[elem] = table
    return table


def saturate(x: Any, elem: str) -> Any:
    """Clip what becomes fp8 as ``cvt.rn.satfinite`` does, infinities as well; leave the rest."""
    limit = {"f8E4M3FN": 448.0, "f8E5M2": 57344.0}.get(elem)
    return x if limit is None else np.clip(x, -limit, limit)


def _fp8_bits(x: Any, elem: str) -> np.ndarray:
    values = np.array(x, dtype=np.float32, order="C")
    infinite = np.isinf(values) & (elem == "f8E5M2")  # the other has none
    values = np.where(infinite, values, saturate(values, elem))
    values = np.ascontiguousarray(values, dtype=np.float32)
    return torch.from_numpy(values).to(_FP8[elem]).view(torch.uint8).numpy()


def round_to(x: Any, elem: str) -> Any:
    """Round or convert values to those that an element type can hold."""
    if elem == "bf16":
        return round_bf16(x)
    if elem in _FP8:
        return _fp8_values(elem)[_fp8_bits(x, elem)]
    return np.asarray(x).astype(_NUMPY[elem], copy=False)


def from_bits(bits: np.ndarray, elem: str) -> np.ndarray:
    """Turn raw unsigned words into values."""
    if elem == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if elem in _FP8:
        return _fp8_values(elem)[bits]
    if elem == "i1":
        return bits != 0
    return bits.view(_NUMPY[elem])


def to_bits(x: Any, elem: str) -> np.ndarray:
    """Turn values into raw unsigned words, rounding if need be."""
    if elem == "bf16":
        return (np.ascontiguousarray(round_bf16(x)).view(np.uint32) >> np.uint32(16)).astype(
            np.uint16
        )
    if elem in _FP8:
        return _fp8_bits(x, elem)
    values = np.ascontiguousarray(np.asarray(x, dtype=_NUMPY[elem]))
    return values.view(RAW[_SIZE[elem]])


def truncate_tf32(x: np.ndarray) -> np.ndarray:
    """Drop the 13 low bits, as wgmma and mma do with tf32 operands."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def towards_zero_f16(x: Any) -> np.ndarray:
    """Round towards zero to fp16: what is larger than its largest number becomes that."""
    values = np.asarray(x)
    near = values.astype(np.float16)
    over = np.abs(near.astype(values.dtype)) > np.abs(values)
    return np.where(over, np.nextafter(near, np.float16(0)), near)


_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64, "ptr": 64}


def width_of(elem: str) -> int:
    """Return the width of an integer type in bits."""
    return _BITS[elem]


def wrap(value: int, elem: str) -> Any:
    """Wrap a Python integer to a signed integer type; ``i1`` becomes a bool."""
    if elem == "i32":
        if -2147483648 <= value <= 2147483647:
            return value
        return ((value + 2147483648) & 0xFFFFFFFF) - 2147483648
    if elem == "i1":
        return bool(value & 1)
    width = _BITS[elem]
    half = 1 << (width - 1)
    return ((value + half) & ((1 << width) - 1)) - half


def unsigned(value: Any, elem: str) -> Any:
    """Read a signed integer or array as unsigned."""
    if isinstance(value, int | bool):
        return value & ((1 << _BITS[elem]) - 1)
    return value.view(UNSIGNED[elem])


def scalar(value: Any, elem: str) -> Any:
    """Turn a 0-d array or numpy scalar into the form that scalars are held in."""
    if elem == "i1":
        return bool(value)
    if is_float(elem):
        return numpy_type(elem)(value)
    return int(value)


def to_integer(value: Any, source: str, target: str, as_unsigned: bool) -> np.ndarray:
    """Convert as the hardware does: towards zero, saturating at 16 bits or more, then cut to 8.

    NaN becomes 0; from or to 64 bits it becomes the word with the top bit only.
    """
    values = np.asarray(value, np.float64)
    wide = "i16" if target in ("i1", "i8") else target
    width = width_of(wide)
    low, high = (0, 2**width - 1) if as_unsigned else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    kind = UNSIGNED[wide] if as_unsigned else numpy_type(wide)
    x = np.trunc(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf))
    out = np.clip(x, low, np.nextafter(float(high), 0) if high >= 2**53 else high).astype(kind)
    out = np.where(x >= float(high), kind(high), out)
    if "64" in source + target:
        out = np.where(np.isnan(values), kind(2 ** (width - 1) if as_unsigned else low), out)
    return out.view(numpy_type(wide)).astype(numpy_type(target), copy=False)
