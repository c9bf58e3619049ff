"""Lowerings that move values about: shapes, ranges, reductions, scans, gathers, dots."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.dtypes import numpy_type, round_to
from tileloom.emulator.ir import Op
from tileloom.emulator.lower import Program, Run, lowers
from tileloom.emulator.machine import Frame
from tileloom.emulator.report import UnsupportedKernelError


@lowers("tt.get_program_id", "tt.get_num_programs", words=r"[xyz]")
def _program_id(op: Op, program: Program) -> Run:
    (d,) = op.results
    axis = "xyz".index(op.words[0])
    if op.name == "tt.get_program_id":

        def run(f: Frame) -> None:
            f[d] = f[0].cta.program[axis]
    else:

        def run(f: Frame) -> None:
            f[d] = f[0].cta.launch.grid[axis]

    return run


@lowers("tt.make_range", attrs=["start", "end"], words=r"")
def _make_range(op: Op, program: Program) -> Run:
    (d,) = op.results
    value = np.arange(op.int_attr("start"), op.int_attr("end"), dtype=np.int32)
    value.flags.writeable = False

    def run(f: Frame) -> None:
        f[d] = value

    return run


@lowers("tt.splat", words=r"")
def _splat(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    ty = op.type
    shape, number = ty.shape, numpy_type(ty.elem)

    def run(f: Frame) -> None:
        f[d] = np.full(shape, f[a], number)

    return run


@lowers("tt.unsplat", words=r"")
def _unsplat(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    elem = op.type.elem

    def run(f: Frame) -> None:
        f[d] = dtypes.scalar(np.asarray(f[a]).reshape(-1)[0], elem)

    return run


@lowers("tt.broadcast", words=r"")
def _broadcast(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    shape = op.type.shape

    def run(f: Frame) -> None:
        f[d] = np.broadcast_to(f[a], shape)

    return run


@lowers("tt.expand_dims", attrs=["axis"], words=r"")
def _expand_dims(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    axis = op.int_attr("axis")

    def run(f: Frame) -> None:
        f[d] = np.expand_dims(f[a], axis)

    return run


@lowers(
    "tt.reshape",
    attrs=["allow_reorder", "efficient_layout"],
    words=r"allow_reorder|efficient_layout",
)
def _reshape(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    shape = op.type.shape

    def run(f: Frame) -> None:
        f[d] = np.reshape(f[a], shape)

    return run


@lowers("tt.trans", attrs=["order"], words=r"")
def _trans(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results
    order = op.list_attr("order")

    def run(f: Frame) -> None:
        f[d] = np.transpose(f[a], order)

    return run


@lowers("ttg.convert_layout", words=r"")
def _convert_layout(op: Op, program: Program) -> Run:
    (a,), (d,) = op.operands, op.results

    def run(f: Frame) -> None:
        f[d] = np.asarray(f[a])

    return run


@lowers("tt.join", words=r"")
def _join(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results

    def run(f: Frame) -> None:
        f[d] = np.stack([f[a], f[b]], -1)

    return run


@lowers("tt.cat", words=r"")
def _cat(op: Op, program: Program) -> Run:
    a, b = op.operands
    (d,) = op.results

    def run(f: Frame) -> None:
        f[d] = np.concatenate([f[a], f[b]], 0)

    return run


@lowers("tt.split", words=r"")
def _split(op: Op, program: Program) -> Run:
    (a,) = op.operands
    first, second = op.results

    def run(f: Frame) -> None:
        value = np.asarray(f[a])
        f[first], f[second] = value[..., 0], value[..., 1]

    return run


@lowers("tt.gather", attrs=["axis", "efficient_layout"], words=r"efficient_layout")
def _gather(op: Op, program: Program) -> Run:
    source, index = op.operands
    (d,) = op.results
    axis = op.int_attr("axis")

    def run(f: Frame) -> None:
        f[d] = np.take_along_axis(np.asarray(f[source]), f[index].astype(np.int64), axis)

    return run


@lowers("tt.histogram", words=r"")
def _histogram(op: Op, program: Program) -> Run:
    values, (d,) = op.operands, op.results
    (bins,) = op.type.shape

    def run(f: Frame) -> None:
        x = np.asarray(f[values[0]]).reshape(-1)
        keep = (x >= 0) & (x < bins)
        if len(values) > 1:
            keep &= np.asarray(f[values[1]]).reshape(-1)
        f[d] = np.bincount(x[keep], minlength=bins).astype(np.int32)

    return run


_FAST: dict[str, np.ufunc] = {
    "arith.addf": np.add, "arith.addi": np.add, "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum, "arith.mulf": np.multiply, "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
}  # fmt: skip


def _vectorise(op: Op, program: Program) -> Callable[[Frame, list[Any], list[Any]], list[Any]]:
    """Build the combining region so that its scalar operations work on arrays."""
    (block,) = op.regions[0]
    for inner in block.ops[:-1]:
        if inner.name != "arith.constant":
            inner.signature = re.sub(
                r"(?<![\w<.!])(i\d+|f\d+\w*|bf16)\b", r"tensor<1x\1>", inner.signature
            )
    if not program.build_blocks(op.regions[0]):
        raise UnsupportedKernelError(f"the combining function of '{op.name}' is not pure", op.loc)
    half = len(block.args) // 2
    left, right = block.args[:half], block.args[half:]

    def combine(f: Frame, a: list[Any], b: list[Any]) -> list[Any]:
        for slot, value in zip(left, a):
            f[slot] = value
        for slot, value in zip(right, b):
            f[slot] = value
        return program.run_pure(op.regions[0], f)

    return combine


def _fast_ufunc(op: Op) -> np.ufunc | None:
    ops = op.regions[0][0].ops
    if len(op.operands) != 1 or len(ops) != 2:
        return None
    return _FAST.get(ops[0].name)


@lowers("tt.reduce", attrs=["axis"], words=r"")
def _reduce(op: Op, program: Program) -> Run:
    axis = op.int_attr("axis")
    elems = [t.elem for t in op.result_types()]
    tensor = op.type.kind == "tensor"
    fast = _fast_ufunc(op)
    if fast is not None:
        (a,), (d,), (elem,) = op.operands, op.results, elems
        number = None if elem == "i1" else numpy_type(elem)
        is_bool = elem == "i1"

        def run(f: Frame) -> None:
            value = fast.reduce(np.asarray(f[a]), axis=axis, dtype=number)
            if is_bool:
                value = np.asarray(value, np.bool_)
            value = round_to(value, elem) if elem in dtypes.ROUNDED else value
            f[d] = value if tensor else dtypes.scalar(value, elem)

        return run
    combine = _vectorise(op, program)
    operands, results = op.operands, op.results

    def run_general(f: Frame) -> None:
        values = [np.moveaxis(np.asarray(f[s]), axis, 0) for s in operands]
        while (n := values[0].shape[0]) > 1:
            half = n // 2
            rest = [v[2 * half :] for v in values]
            values = combine(f, [v[:half] for v in values], [v[half : 2 * half] for v in values])
            if n % 2:
                values = [np.concatenate([v, r]) for v, r in zip(values, rest)]
        for slot, value, elem in zip(results, values, elems):
            f[slot] = value[0] if tensor else dtypes.scalar(value[0], elem)

    return run_general


@lowers("tt.scan", attrs=["axis", "reverse"], words=r"")
def _scan(op: Op, program: Program) -> Run:
    axis = op.int_attr("axis")
    reverse = op.attrs.get("reverse") == "true"
    elems = [t.elem for t in op.result_types()]
    operands, results = op.operands, op.results
    fast = _fast_ufunc(op)
    combine = None if fast is not None else _vectorise(op, program)

    def run(f: Frame) -> None:
        values = [np.moveaxis(np.asarray(f[s]), axis, 0) for s in operands]
        if reverse:
            values = [v[::-1] for v in values]
        if fast is not None:
            out = [fast.accumulate(v, axis=0, dtype=v.dtype) for v in values]
        else:
            steps = [[v[0] for v in values]]
            for i in range(1, values[0].shape[0]):
                steps.append(combine(f, steps[-1], [v[i] for v in values]))  # pyright: ignore[reportOptionalCall]
            out = [np.stack(column) for column in zip(*steps)]
        if reverse:
            out = [v[::-1] for v in out]
        for slot, value, elem in zip(results, out, elems):
            f[slot] = round_to(np.moveaxis(value, 0, axis), elem)

    return run


@lowers("tt.map_elementwise", attrs=["pack"], words=r"")
def _map_elementwise(op: Op, program: Program) -> Run:
    pack = op.int_attr("pack", 1)
    (block,) = op.regions[0]
    for inner in block.ops[:-1]:
        if inner.name != "arith.constant":
            inner.signature = re.sub(
                r"(?<![\w<.!])(i\d+|f\d+\w*|bf16)\b", r"tensor<1x\1>", inner.signature
            )
    if not program.build_blocks(op.regions[0]):
        raise UnsupportedKernelError("a map_elementwise function with effects or branches", op.loc)
    operands, results = op.operands, op.results
    types = op.result_types()

    def run(f: Frame) -> None:
        flat = [np.asarray(f[s]).reshape(-1, pack) for s in operands]
        columns = [v[:, i] for v in flat for i in range(pack)]
        for slot, value in zip(block.args, columns):
            f[slot] = value
        out = program.run_pure(op.regions[0], f)
        for n, (slot, ty) in enumerate(zip(results, types)):
            mine = [np.broadcast_to(v, columns[0].shape) for v in out[n * pack : (n + 1) * pack]]
            f[slot] = np.stack(mine, -1).reshape(ty.shape).astype(numpy_type(ty.elem))

    return run


def matmul(a: Any, b: Any, tf32: bool = False) -> np.ndarray:
    """Multiply matrices as tensor cores do: products exact, sums in float32 (integers: int32)."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "i":
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64).astype(np.int32)
    if a.dtype == np.float64:
        return a @ b
    a = a.astype(np.float32, copy=False)
    b = b.astype(np.float32, copy=False)
    if tf32:
        a, b = dtypes.truncate_tf32(a), dtypes.truncate_tf32(b)
    return a @ b


def _split_bf16(x: np.ndarray, parts: int) -> list[np.ndarray]:
    out = []
    for _ in range(parts):
        high = dtypes.round_bf16(x)
        out.append(high)
        x = x - high
    return out


@lowers(
    "tt.dot",
    attrs=["inputPrecision", "maxNumImpreciseAcc"],
    words=r"tf32|tf32x3|ieee|bf16x3|bf16x6|-?\d+",
)
def _dot(op: Op, program: Program) -> Run:
    a, b, c = op.operands
    (d,) = op.results
    elem = op.type.elem
    source = op.signature.split(" * ")[0]
    precision = op.attrs.get("inputPrecision", "ieee")
    is_f32 = "xf32" in source
    truncate = is_f32 and precision == "tf32"
    parts = {"bf16x3": 2, "bf16x6": 3}.get(precision, 0) if is_f32 else 0

    def run(f: Frame) -> None:
        x, y = np.asarray(f[a]), np.asarray(f[b])
        if parts:
            xs, ys = _split_bf16(x, parts), _split_bf16(y, parts)
            value = sum(p @ q for i, p in enumerate(xs) for j, q in enumerate(ys) if i + j < parts)
        else:
            value = matmul(x, y, truncate)
        f[d] = round_to(value + f[c], elem)

    return run


@lowers("tt.assert", kind=1, words=r"")
def _assert(op: Op, program: Program) -> Run:
    condition = op.operands[0]
    text = op.strings[0] if op.strings else ""

    def run(f: Frame) -> None:
        if not np.all(f[condition]):
            bad = int(np.size(f[condition]) - np.count_nonzero(f[condition]))
            f[0].report(
                "assert", f"device_assert fails for {bad} elements: {text}", op.loc, "device_assert"
            )

    return run


def _hex(bits: Any) -> str:
    return f"0x{bits:0{2 * bits.itemsize}x}"


@lowers("tt.print", kind=1, attrs=["hex", "isSigned"], words=r"")
def _print(op: Op, program: Program) -> Run:
    text = op.strings[0] if op.strings else ""
    operands = op.operands
    elems = [t.elem for t in op.operand_types()]
    as_bits = op.attrs.get("hex") == "true"

    def shown(value: Any, elem: str) -> str:
        if not as_bits:
            return str(value)
        bits = dtypes.to_bits(value, elem).reshape(np.shape(value))
        return np.array2string(bits, formatter={"all": _hex})

    def run(f: Frame) -> None:
        values = "".join(f" {shown(f[s], elem)}" for s, elem in zip(operands, elems))
        print(f"program {f[0].cta.program}{text}{values}")

    return run


@lowers("llvm.intr.assume", "tt.assume", words=r"")
def _assume(op: Op, program: Program) -> Run:
    (a,) = op.operands

    def run(f: Frame) -> None:
        if not f[a]:
            f[0].report(
                "assert", "gl.assume states something that is false here", op.loc, "assume",
                hint="the compiler relies on it: the kernel may do anything",
            )  # fmt: skip

    return run
