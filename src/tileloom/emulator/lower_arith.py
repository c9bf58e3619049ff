"""Lowerings of scalar and elementwise arithmetic, comparisons, casts and constants."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.dtypes import ROUNDED, numpy_type, round_to, unsigned, wrap
from tileloom.emulator.ir import Op, Type, parse_type
from tileloom.emulator.lower import Program, Run, lowers
from tileloom.emulator.machine import Frame
from tileloom.emulator.report import UnsupportedKernelError

Binary = Callable[[Any, Any], Any]


def _truncated_divide(a: int, b: int) -> int:
    if b == 0:
        return 0
    q = abs(a) // abs(b)
    return q if (a >= 0) == (b >= 0) else -q


def _array_divide(a: Any, b: Any) -> np.ndarray:
    """Divide towards zero; 0 for a zero divisor, for speculated arithmetic must not trap."""
    kind = np.asarray(a).dtype
    safe = np.where(b == 0, 1, b).astype(kind)
    floor = np.floor_divide(a, safe)
    inexact = (a - floor * safe != 0) & ((a < 0) != (safe < 0))
    return np.where(b == 0, 0, floor + inexact.astype(kind)).astype(kind)


def _array_remainder(a: Any, b: Any) -> np.ndarray:
    return a - _array_divide(a, b) * b


def _safe(function: Binary) -> Binary:
    """Integer division that yields 0 for a zero divisor: speculated arithmetic must not trap."""
    return lambda a, b: np.where(b == 0, 0, function(a, np.where(b == 0, 1, b))).astype(a.dtype)


def _shift_left(a: Any, b: Any) -> Any:
    width = a.dtype.itemsize * 8
    return np.where(b >= width, 0, np.left_shift(a, np.where(b >= width, 0, b))).astype(a.dtype)


def _shift_right(a: Any, b: Any) -> Any:
    width = a.dtype.itemsize * 8
    return np.right_shift(a, np.minimum(b, width - 1).astype(a.dtype))


def _shift_right_unsigned(a: Any, b: Any) -> Any:
    width = a.dtype.itemsize * 8
    return np.where(b >= width, 0, np.right_shift(a, np.where(b >= width, 0, b))).astype(a.dtype)


_FLOAT: dict[str, Binary] = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide,
    "maxnumf": np.fmax, "minnumf": np.fmin, "maximumf": np.maximum, "minimumf": np.minimum,
    "remf": np.fmod,
}  # fmt: skip
# For each integer operation: on arrays, on Python integers.
_SIGNED: dict[str, tuple[Binary, Binary]] = {
    "addi": (np.add, operator.add),
    "subi": (np.subtract, operator.sub),
    "muli": (np.multiply, operator.mul),
    "andi": (np.bitwise_and, operator.and_),
    "ori": (np.bitwise_or, operator.or_),
    "xori": (np.bitwise_xor, operator.xor),
    "shli": (_shift_left, lambda a, b: a << b if 0 <= b < 64 else 0),
    "shrsi": (_shift_right, lambda a, b: a >> b if 0 <= b < 64 else (-1 if a < 0 else 0)),
    "maxsi": (np.maximum, max),
    "minsi": (np.minimum, min),
    "divsi": (_array_divide, _truncated_divide),
    "remsi": (_array_remainder, lambda a, b: a - _truncated_divide(a, b) * b),
    "floordivsi": (_safe(np.floor_divide), lambda a, b: a // b if b else 0),
    "ceildivsi": (_safe(lambda a, b: -((-a) // b)), lambda a, b: -((-a) // b) if b else 0),
}
_UNSIGNED: dict[str, tuple[Binary, Binary]] = {
    "divui": (_safe(np.floor_divide), lambda a, b: a // b if b else 0),
    "remui": (_safe(np.remainder), lambda a, b: a % b if b else 0),
    "ceildivui": (_safe(lambda a, b: a // b + (a % b != 0)), lambda a, b: -(-a // b) if b else 0),
    "shrui": (_shift_right_unsigned, lambda a, b: a >> b if 0 <= b < 64 else 0),
    "maxui": (np.maximum, max),
    "minui": (np.minimum, min),
}
_erf = np.vectorize(math.erf, otypes=[np.float64])
UNARY: dict[str, Callable[[Any], Any]] = {
    "math.exp": np.exp, "math.exp2": np.exp2, "math.log": np.log, "math.log2": np.log2,
    "math.sqrt": np.sqrt, "math.sin": np.sin, "math.cos": np.cos, "math.absf": np.abs,
    "math.absi": np.abs, "arith.negf": np.negative, "math.floor": np.floor, "math.ceil": np.ceil,
    "tt.precise_sqrt": np.sqrt, "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.tanh": np.tanh,
    "math.erf": lambda x: _erf(x).astype(np.asarray(x).dtype), "math.trunc": np.trunc,
    "math.round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "math.roundeven": np.rint,
    "math.expm1": np.expm1, "math.log1p": np.log1p, "math.tan": np.tan,
    "math.log10": np.log10,
}  # fmt: skip
_CMPI: dict[str, tuple[Binary, Binary]] = {
    "eq": (np.equal, operator.eq), "ne": (np.not_equal, operator.ne),
    "lt": (np.less, operator.lt), "le": (np.less_equal, operator.le),
    "gt": (np.greater, operator.gt), "ge": (np.greater_equal, operator.ge),
}  # fmt: skip


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


_CMPF: dict[str, Binary] = {
    "oeq": np.equal, "une": np.not_equal, "olt": np.less, "ole": np.less_equal,
    "ogt": np.greater, "oge": np.greater_equal,
    "one": lambda a, b: np.not_equal(a, b) & ~_unordered(a, b),
    "ord": lambda a, b: ~_unordered(a, b), "uno": _unordered,
    "ueq": lambda a, b: np.equal(a, b) | _unordered(a, b),
    "ult": lambda a, b: np.less(a, b) | _unordered(a, b),
    "ule": lambda a, b: np.less_equal(a, b) | _unordered(a, b),
    "ugt": lambda a, b: np.greater(a, b) | _unordered(a, b),
    "uge": lambda a, b: np.greater_equal(a, b) | _unordered(a, b),
    "true": lambda a, b: np.ones_like(a, np.bool_),
    "false": lambda a, b: np.zeros_like(a, np.bool_),
}  # fmt: skip


def literal(text: str, elem: str) -> Any:
    """Read one printed constant."""
    if text in ("true", "false"):
        return text == "true"
    if dtypes.is_float(elem):
        if text.startswith("0x"):
            raw = np.array([int(text, 16)], dtypes.RAW[dtypes.size_of(elem)])
            return numpy_type(elem)(dtypes.from_bits(raw, elem)[0])
        return numpy_type(elem)(float(text))
    return wrap(int(text, 0), elem)


def _dense(text: str, ty: Type) -> np.ndarray:
    body = text[6:-1]
    if body.startswith("["):
        items = [literal(x.strip(), ty.elem) for x in re.sub(r"[\[\]]", "", body).split(",")]
        return np.array(items, numpy_type(ty.elem)).reshape(ty.shape)
    return np.full(ty.shape, literal(body, ty.elem), numpy_type(ty.elem))


@lowers("arith.constant", words=r"(?s).*")
def _constant(op: Op, program: Program) -> Run:
    (d,) = op.results
    ty = parse_type(op.signature)
    value = _dense(op.words[0], ty) if ty.kind == "tensor" else literal(op.words[0], ty.elem)
    if isinstance(value, np.ndarray):
        value.flags.writeable = False

    def run(f: Frame) -> None:
        f[d] = value

    return run


@lowers(*(f"arith.{name}" for name in _FLOAT), "tt.precise_divf", "tt.approx_divf", words=r"")
def _float_binary(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    ty = op.type
    elem = ty.elem
    function = np.divide if op.name[:3] == "tt." else _FLOAT[op.name[6:]]
    if ty.kind == "tensor" and elem not in ROUNDED:

        def run(f: Frame) -> None:
            f[d] = function(f[a], f[b])
    elif ty.kind == "tensor":

        def run(f: Frame) -> None:
            f[d] = round_to(function(f[a], f[b]), elem)
    else:
        number = numpy_type(elem)

        def run(f: Frame) -> None:
            f[d] = number(round_to(function(f[a], f[b]), elem))

    return run


@lowers(*(f"arith.{name}" for name in (*_SIGNED, *_UNSIGNED)), words=r"overflow<.*>|nsw|nuw|exact")
def _integer_binary(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    ty = op.type
    elem = ty.elem
    name = op.name[6:]
    if elem == "i1" and name in ("addi", "subi", "muli"):
        name = {"addi": "xori", "subi": "xori", "muli": "andi"}[name]
    if elem == "i1" and name in ("minsi", "maxsi"):  # as signed, true is -1
        name = {"minsi": "ori", "maxsi": "andi"}[name]
    on_arrays, on_ints = {**_SIGNED, **_UNSIGNED}[name]
    as_unsigned = name in _UNSIGNED
    if ty.kind == "tensor" and as_unsigned:
        number = numpy_type(elem)

        def run(f: Frame) -> None:
            f[d] = on_arrays(unsigned(f[a], elem), unsigned(f[b], elem)).view(number)
    elif ty.kind == "tensor":

        def run(f: Frame) -> None:
            f[d] = on_arrays(f[a], f[b])
    elif as_unsigned:

        def run(f: Frame) -> None:
            f[d] = wrap(on_ints(unsigned(f[a], elem), unsigned(f[b], elem)), elem)
    else:

        def run(f: Frame) -> None:
            f[d] = wrap(on_ints(f[a], f[b]), elem)

    return run


@lowers("tt.mulhiui", words=r"")
def _multiply_high(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    elem = op.type.elem
    width = dtypes.width_of(elem)

    def run(f: Frame) -> None:
        x, y = f[a], f[b]
        if isinstance(x, int):
            f[d] = wrap((unsigned(x, elem) * unsigned(y, elem)) >> width, elem)
            return
        wide = unsigned(x, elem).astype(object) * unsigned(y, elem).astype(object)
        f[d] = (wide >> width).astype(dtypes.UNSIGNED[elem]).view(numpy_type(elem))

    return run


@lowers(*UNARY, words=r"")
def _unary(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    ty = op.type
    elem = ty.elem
    function = UNARY[op.name]
    if ty.kind == "tensor" and elem not in ROUNDED:

        def run(f: Frame) -> None:
            f[d] = function(f[a])
    elif ty.kind == "tensor":

        def run(f: Frame) -> None:
            f[d] = round_to(function(f[a]), elem)
    else:

        def run(f: Frame) -> None:
            f[d] = dtypes.scalar(round_to(function(f[a]), elem), elem)

    return run


@lowers("math.fma", words=r"")
def _fma(op: Op, program: Program) -> Run:
    a, b, c = op.operands
    (d,) = op.results
    ty = op.type
    wide = np.float64 if ty.elem == "f32" else numpy_type(ty.elem)

    def run(f: Frame) -> None:
        value = round_to(np.multiply(f[a], f[b], dtype=wide) + f[c], ty.elem)
        f[d] = value if ty.kind == "tensor" else dtypes.scalar(value, ty.elem)

    return run


@lowers("tt.clampf", attrs=["propagateNan"], words=r"none|all")
def _clamp(op: Op, program: Program) -> Run:
    x, low, high = op.operands
    (d,) = op.results
    ty = op.type
    keep_nan = op.attrs.get("propagateNan", "none") == "all"

    def run(f: Frame) -> None:
        value = np.fmin(np.fmax(f[x], f[low]), f[high])
        if keep_nan:
            value = np.where(np.isnan(f[x]), f[x], value)
        f[d] = value if ty.kind == "tensor" else dtypes.scalar(value, ty.elem)

    return run


@lowers("arith.cmpi", words=r"\w+")
def _compare_int(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    ty = op.operand_types()[0]
    elem = ty.elem
    predicate = op.words[0]
    as_unsigned = predicate[0] == "u"
    if elem == "i1" and predicate[0] == "s":
        raise UnsupportedKernelError("a signed comparison of i1 values is not supported", op.loc)
    on_arrays, on_ints = _CMPI[predicate if predicate in ("eq", "ne") else predicate[1:]]
    function = on_arrays if ty.kind == "tensor" else on_ints
    if as_unsigned:

        def run(f: Frame) -> None:
            f[d] = function(unsigned(f[a], elem), unsigned(f[b], elem))
    else:

        def run(f: Frame) -> None:
            f[d] = function(f[a], f[b])

    return run


@lowers("arith.cmpf", words=r"\w+")
def _compare_float(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results
    function = _CMPF[op.words[0]]
    tensor = op.operand_types()[0].kind == "tensor"

    def run(f: Frame) -> None:
        value = function(f[a], f[b])
        f[d] = value if tensor else bool(value)

    return run


@lowers("arith.select", words=r"")
def _select(op: Op, program: Program) -> Run:
    c, a, b = op.operands
    (d,) = op.results

    def run(f: Frame) -> None:
        pick = f[c]
        if pick is True or pick is False:
            f[d] = f[a] if pick else f[b]
        else:
            f[d] = np.where(pick, f[a], f[b])

    return run
