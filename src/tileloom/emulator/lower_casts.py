"""Lowerings of casts between element types, and of library functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.dtypes import numpy_type, round_to, unsigned, wrap
from tileloom.emulator.ir import Op
from tileloom.emulator.libdevice import function_named
from tileloom.emulator.lower import Program, Run, lowers
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
            else dtypes.to_integer(value, source, target, as_unsigned)
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
    elif mode == "rtz" and target == "f16":
        convert = dtypes.towards_zero_f16
    elif mode == "rtz" and target not in ("f32", "f64"):
        raise UnsupportedKernelError(f"rounding towards zero to {target} is not supported", op.loc)
    else:

        def convert(x: Any) -> Any:
            return round_to(dtypes.saturate(x, target), target)

    def run(f: Frame) -> None:
        value = convert(np.asarray(f[a]))
        f[d] = value if tensor else dtypes.scalar(value, target)

    return run


@lowers("tt.extern_elementwise", attrs=["libname", "libpath", "pure", "symbol"], words=r"")
def _libdevice(op: Op, program: Program) -> Run:
    symbol = op.attrs["symbol"].strip('"')
    function = function_named(symbol)
    if function is None:
        raise UnsupportedKernelError(f"library function '{symbol}' is not in the table", op.loc)
    operands, (d,) = op.operands, op.results
    ty = op.type

    def run(f: Frame) -> None:
        value = round_to(function(*(f[o] for o in operands)), ty.elem)
        f[d] = value if ty.kind == "tensor" else dtypes.scalar(value, ty.elem)

    return run
