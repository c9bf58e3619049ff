"""NVIDIA's device library as Triton's kernels call it: a table of its functions by name.

Names are those of the library without ``__nv_``. Functions take and give NumPy values; what they
give is rounded to the result's type by the caller, so single precision is computed in double
where that is nearer to the library's own error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tileloom.emulator import dtypes
from tileloom.emulator.lower_arith import UNARY

Function = Callable[..., Any]


def _special(name: str) -> Function:
    """Take a function of `torch.special`, in double precision."""
    function = getattr(torch.special, name)

    def values(x: Any) -> Any:
        wide = np.ascontiguousarray(x, np.float64)
        return function(torch.from_numpy(np.atleast_1d(wide))).numpy().reshape(wide.shape)

    return values


_erfinv, _ndtri = _special("erfinv"), _special("ndtri")


def _gamma(x: Any) -> Any:
    wide = np.asarray(x, np.float64)
    size = np.exp(_special("gammaln")(wide))
    sign = np.where((wide < 0) & (np.floor(wide) % 2 != 0), -1.0, 1.0)
    pole = (wide <= 0) & (wide == np.floor(wide))
    zero = np.copysign(np.inf, wide)
    return np.where(pole, np.where(wide == 0, zero, np.nan), sign * size)


def _norm(*parts: Any) -> Any:
    return np.sqrt(sum(np.square(np.asarray(p, np.float64)) for p in parts))


def _exponent(x: Any) -> Any:
    return np.frexp(np.asarray(x, np.float64))[1] - 1


def _ilogb(x: Any) -> Any:
    wide = np.asarray(x, np.float64)
    odd = np.where(np.isinf(wide), 2**31 - 1, -(2**31))  # of 0 and NaN the least
    return np.where(np.isfinite(wide) & (wide != 0), _exponent(x), odd).astype(np.int32)


def _logb(x: Any) -> Any:
    wide = np.asarray(x, np.float64)
    return np.where(np.isinf(wide), np.inf, np.where(wide == 0, -np.inf, _exponent(x) + 0 * wide))


def _away(x: Any) -> Any:
    """Round half away from zero."""
    return UNARY["math.round"](np.asarray(x, np.float64))


def _bits(x: Any) -> tuple[np.ndarray, int]:
    """Return an integer's bits, the lowest first, and how many there are."""
    number = np.asarray(x)
    width = 8 * number.dtype.itemsize
    words = number.astype(np.uint64) if width == 64 else number.astype(np.int64).astype(np.uint64)
    return (words[..., None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1), width


def _clz(x: Any) -> Any:
    bits, width = _bits(x)
    return np.where(bits.any(-1), np.argmax(bits[..., ::-1], -1), width).astype(np.int32)


def _ffs(x: Any) -> Any:
    bits, _ = _bits(x)
    return np.where(bits.any(-1), np.argmax(bits, -1) + 1, 0).astype(np.int32)


def _brev(x: Any) -> Any:
    bits, width = _bits(x)
    weights = np.uint64(1) << np.arange(width - 1, -1, -1, dtype=np.uint64)
    word = (bits * weights).sum(-1, dtype=np.uint64)
    return word.astype(f"u{width // 8}").view(np.asarray(x).dtype)


def _high(as_unsigned: bool) -> Function:
    """The upper half of a product."""

    def values(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        kind = a.dtype
        if as_unsigned:
            a, b = (x.astype(x.dtype.str.replace("i", "u")) for x in (a, b))
        wide = (a.astype(object) * b.astype(object)) >> (8 * kind.itemsize)
        modulus = 1 << (8 * kind.itemsize)
        return (wide % modulus).astype(kind.str.replace("i", "u")).view(kind)

    return values


def _as(kind: Any) -> Function:
    return lambda x: np.ascontiguousarray(x).view(kind)


LIBDEVICE: dict[str, Function] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh,
    "sinpi": lambda x: np.sin(np.pi * np.fmod(np.asarray(x, np.float64), 2)),
    "cospi": lambda x: np.cos(np.pi * np.fmod(np.asarray(x, np.float64), 2)),
    "fabs": np.abs, "abs": np.abs, "llabs": np.abs, "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "round": UNARY["math.round"],
    "llrint": lambda x: np.rint(x).astype(np.int64), "llround": lambda x: _away(x).astype(np.int64),
    "pow": np.power, "powi": lambda x, n: np.power(np.asarray(x, np.float64), n),
    "fmod": np.fmod, "remainder": lambda x, y: x - y * np.rint(np.asarray(x, np.float64) / y),
    "fdim": lambda x, y: np.where(x > y, x - y, np.where(x <= y, 0.0, np.nan)),
    "atan2": np.arctan2, "hypot": np.hypot, "rhypot": lambda x, y: 1 / _norm(x, y),
    "norm3d": _norm, "norm4d": _norm, "rnorm3d": lambda *p: 1 / _norm(*p),
    "rnorm4d": lambda *p: 1 / _norm(*p),
    "fma": lambda a, b, c: a * b + c, "copysign": np.copysign, "nextafter": np.nextafter,
    "ldexp": np.ldexp, "scalbn": np.ldexp, "ilogb": _ilogb, "logb": _logb,
    "erf": UNARY["math.erf"], "erfc": _special("erfc"), "erfcx": _special("erfcx"),
    "erfinv": _erfinv, "erfcinv": lambda x: -_ndtri(np.asarray(x, np.float64) / 2) / np.sqrt(2),
    "normcdf": _special("ndtr"), "normcdfinv": _ndtri,
    "lgamma": _special("gammaln"), "tgamma": _gamma,
    "j0": _special("bessel_j0"), "j1": _special("bessel_j1"),
    "y0": _special("bessel_y0"), "y1": _special("bessel_y1"),
    "cyl_bessel_i0": _special("i0"), "cyl_bessel_i1": _special("i1"),
    "fmax": np.fmax, "fmin": np.fmin, "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "isnan": np.isnan, "isinf": np.isinf, "signbit": np.signbit,
    "finite": np.isfinite, "isfinite": np.isfinite, "double2float_rn": np.asarray,
    "fast_exp": np.exp, "fast_exp10": lambda x: np.power(10.0, x), "fast_log": np.log,
    "fast_log2": np.log2, "fast_log10": np.log10, "fast_sin": np.sin, "fast_cos": np.cos,
    "fast_tan": np.tan, "fast_tanh": np.tanh, "fast_pow": np.power, "fast_divide": np.divide,
    "fast_fdivide": np.divide,
    "popc": lambda x: _bits(x)[0].sum(-1).astype(np.int32), "clz": _clz, "ffs": _ffs, "brev": _brev,
    "mulhi": _high(False), "mul64hi": _high(False), "umulhi": _high(True), "umul64hi": _high(True),
    "float_as_int": _as(np.int32), "float_as_uint": _as(np.int32), "int_as_float": _as(np.float32),
    "uint_as_float": _as(np.float32), "double_as_longlong": _as(np.int64),
    "longlong_as_double": _as(np.float64),
}  # fmt: skip

_ARITHMETIC: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / np.asarray(x),
    "ma": lambda a, b, c: a * b + c,
}  # fmt: skip
_TO_INTEGER: dict[str, Function] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_INTEGERS = {
    "int": ("i32", False),
    "uint": ("i32", True),
    "ll": ("i64", False),
    "ull": ("i64", True),
}


def _rounded(name: str) -> Function | None:
    """Return arithmetic and conversions whose name ends with a way to round; None for others."""
    if match := re.fullmatch(r"[fd](\w+)_rn", name.replace("fmaf_", "fma_")):
        function = _ARITHMETIC.get(match.group(1))
        if function is not None:
            return lambda *x: function(*(np.asarray(v, np.float64) for v in x))
    if match := re.fullmatch(r"(float|double)2(u?int|u?ll)_(r[nzdu])", name):
        kind, as_unsigned = _INTEGERS[match.group(2)]
        step, source = (
            _TO_INTEGER[match.group(3)],
            {"float": "f32", "double": "f64"}[match.group(1)],
        )
        return lambda x: dtypes.to_integer(step(x), source, kind, as_unsigned)
    if match := re.fullmatch(r"(u?int|u?ll)2(float|double)_rn", name):
        kind, as_unsigned = _INTEGERS[match.group(1)]
        wide = np.float32 if match.group(2) == "float" else np.float64
        if as_unsigned:
            return lambda x: np.asarray(dtypes.unsigned(x, kind)).astype(wide)
        return lambda x: np.asarray(x).astype(wide)
    return None


def function_named(symbol: str) -> Function | None:
    """Return a function of the library.

    Args:
        symbol: Its name, for example ``__nv_tanhf``.

    Returns:
        The function; None if it is not in the table.
    """
    name = symbol.removeprefix("__nv_")
    plain = re.sub(r"^(isinf|isnan|signbit|isfinite|finite)[fd]$", r"\1", name)
    for one in (name, plain, name.removesuffix("f"), re.sub(r"(popc|clz|ffs|brev)ll", r"\1", name)):
        if one in LIBDEVICE:
            return LIBDEVICE[one]
    return _rounded(name)
