"""Lowerings of casts between element types, and of library functions by table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.dtypes import numpy_type, round_to, unsigned, wrap
from tileloom.emulator.ir import Op
from tileloom.emulator.lower import Program, Run, lowers
from tileloom.emulator.lower_arith import UNARY
from tileloom.emulator.machine import Frame
from tileloom.emulator.report import UnsupportedKernelError


@lowers("arith.index_cast", "arith.index_castui", "tt.int_to_ptr", "tt.ptr_to_int", words=r"")
def _same_value(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results

    def run(f: Frame) -> None:
        f[d] = f[a]

    return run


@lowers("tt.bitcast", "arith.bitcast", words=r"")
def _bitcast(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    source, target = op.operand_types()[0], op.type
    if "ptr" in (source.elem, target.elem):
        return _same_value(op, program)

    def run(f: Frame) -> None:
        if target.kind == "tensor":
            f[d] = dtypes.from_bits(dtypes.to_bits(f[a], source.elem), target.elem)
        else:
            bits = dtypes.to_bits(np.array([f[a]]), source.elem)
            f[d] = dtypes.scalar(dtypes.from_bits(bits, target.elem)[0], target.elem)

    return run


@lowers("arith.extsi", "arith.trunci", "arith.extui", words=r"overflow<.*>|nneg|nsw|nuw")
def _integer_cast(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    source, target = op.operand_types()[0].elem, op.type.elem
    number = numpy_type(target)
    zero_extend = op.name == "arith.extui"
    if op.type.kind != "tensor":

        def run(f: Frame) -> None:
            value = int(f[a])
            if source == "i1" and not zero_extend:
                value = -value
            f[d] = wrap(unsigned(value, source) if zero_extend else value, target)
    elif target == "i1":

        def run(f: Frame) -> None:
            f[d] = (f[a] & 1).astype(np.bool_)
    elif source == "i1":

        def run(f: Frame) -> None:
            value = f[a].astype(number)
            f[d] = value if zero_extend else -value
    elif zero_extend:

        def run(f: Frame) -> None:
            f[d] = unsigned(f[a], source).astype(number)
    else:

        def run(f: Frame) -> None:
            f[d] = f[a].astype(number)

    return run


def _to_integer(value: Any, source: str, target: str, as_unsigned: bool) -> np.ndarray:
    """Convert as the hardware does: towards zero, saturating at 16 bits or more, then cut to 8.

    NaN becomes 0; from or to 64 bits it becomes the word with the top bit only.
    """
    values = np.asarray(value, np.float64)
    wide = "i16" if target in ("i1", "i8") else target
    width = dtypes.width_of(wide)
    low, high = (0, 2**width - 1) if as_unsigned else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    kind = dtypes.UNSIGNED[wide] if as_unsigned else numpy_type(wide)
    x = np.trunc(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf))
    out = np.clip(x, low, np.nextafter(float(high), 0) if high >= 2**53 else high).astype(kind)
    out = np.where(x >= float(high), kind(high), out)
    if "64" in source + target:
        out = np.where(np.isnan(values), kind(2 ** (width - 1) if as_unsigned else low), out)
    return out.view(numpy_type(wide)).astype(numpy_type(target), copy=False)


@lowers("arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui", words=r"nneg")
def _number_cast(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    source, target = op.operand_types()[0].elem, op.type.elem
    tensor = op.type.kind == "tensor"
    as_unsigned = op.name in ("arith.uitofp", "arith.fptoui")
    to_float = op.name.endswith("tofp")
    wide = np.float64 if target in ("f64", "f32") else np.float32

    def run(f: Frame) -> None:
        value = f[a]
        if to_float and as_unsigned and source != "i1":
            value = unsigned(value, source)
        if to_float and source == "i1" and not as_unsigned:
            value = -np.asarray(value, np.int8)
        out: Any = (
            round_to(np.asarray(value).astype(wide), target)
            if to_float
            else _to_integer(value, source, target, as_unsigned)
        )
        f[d] = out if tensor else dtypes.scalar(out, target)

    return run


@lowers(
    "arith.extf",
    "arith.truncf",
    "tt.fp_to_fp",
    attrs=["rounding"],
    words=r"rtne|rtz|to_nearest_even",
)
def _float_cast(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    target = op.type.elem
    tensor = op.type.kind == "tensor"
    mode = op.attrs.get("rounding", "rtne")
    if mode == "rtz" and target == "bf16":

        def convert(x: Any) -> Any:
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
            return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    elif mode == "rtz" and target != "f32":
        raise UnsupportedKernelError(f"rounding towards zero to {target} is not supported", op.loc)
    else:

        def convert(x: Any) -> Any:
            return round_to(dtypes.saturate(x, target), target)

    def run(f: Frame) -> None:
        value = convert(np.asarray(f[a]))
        f[d] = value if tensor else dtypes.scalar(value, target)

    return run


LIBDEVICE: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "fabs": np.abs,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint,
    "nearbyint": np.rint, "pow": np.power, "fmod": np.fmod, "atan2": np.arctan2, "hypot": np.hypot,
    "fma": lambda a, b, c: a * b + c, "copysign": np.copysign, "erf": UNARY["math.erf"],
    "erfc": lambda x: 1 - UNARY["math.erf"](x), "fmax": np.fmax, "fmin": np.fmin,
    "div_rn": np.divide, "fast_expf": np.exp, "fast_logf": np.log, "fast_sinf": np.sin,
    "fast_cosf": np.cos, "fast_powf": np.power, "fast_tanhf": np.tanh, "fast_dividef": np.divide,
    "isnan": np.isnan, "isinf": np.isinf, "round": UNARY["math.round"],
}  # fmt: skip


@lowers("tt.extern_elementwise", attrs=["libname", "libpath", "pure", "symbol"], words=r"")
def _libdevice(op: Op, program: Program) -> Run:
    symbol = op.attrs["symbol"].strip('"')
    name = re.sub(r"^__nv_", "", symbol)
    function = LIBDEVICE.get(name) or LIBDEVICE.get(name.removesuffix("f"))
    if function is None:
        raise UnsupportedKernelError(f"library function '{symbol}' is not in the table", op.loc)
    operands, (d,) = op.operands, op.results
    ty = op.type

    def run(f: Frame) -> None:
        value = round_to(function(*(f[o] for o in operands)), ty.elem)
        f[d] = value if ty.kind == "tensor" else dtypes.scalar(value, ty.elem)

    return run
