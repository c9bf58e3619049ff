"""Lowering of inline assembly: constraints, packing of elements into registers, lanes."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import numpy as np

from tileloom.emulator import dtypes, lower_cluster, ptx, ptx_mbarrier
from tileloom.emulator.ir import Op, Type
from tileloom.emulator.lower import NEST, PURE, STEP, Program, Run, lowers
from tileloom.emulator.lower_shared import view_of
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.ptx_effects import meet, unknown_form
from tileloom.emulator.ptx_values import KNOWN, WORD, strange_part
from tileloom.emulator.report import UnsupportedKernelError

_LETTER = {"r": 32, "l": 64, "h": 16, "f": 32, "d": 64, "c": 8, "b": 8}


def _constraints(text: str, op: Op) -> tuple[list[str], list[str]]:
    outputs, inputs = [], []
    for item in (x.strip() for x in text.split(",")):
        if item.startswith("~"):
            continue
        letter = item.lstrip("=&+")
        if letter not in _LETTER and not letter.isdigit():
            raise UnsupportedKernelError(f"inline PTX constraint '{item}' is not known", op.loc)
        (outputs if item[0] == "=" else inputs).append(letter)
    return outputs, inputs


def _elements_a_register(ty: Type, pack: int) -> int:
    bits = 8 * dtypes.size_of(ty.elem)
    return max(1, min(32 // bits, pack)) if bits < 32 else 1


def _split(value: Any, ty: Type, pack: int, calls: int) -> list[np.ndarray]:
    """Cut an operand into registers, each with one word a call."""
    raw = dtypes.to_bits(np.atleast_1d(np.asarray(value)), ty.elem).reshape(-1)
    if ty.kind != "tensor":
        return [np.full(calls, raw[0])]
    per = _elements_a_register(ty, pack)
    if per > 1:
        raw = np.ascontiguousarray(raw).view(WORD[8 * raw.dtype.itemsize * per])
    return list(np.ascontiguousarray(raw.reshape(calls, pack // per).T))


def _merge(registers: list[np.ndarray], ty: Type, pack: int, calls: int) -> Any:
    """Put the registers of a result together."""
    size = 8 * dtypes.size_of(ty.elem)
    per = _elements_a_register(ty, pack)
    columns = np.empty((calls, len(registers)), WORD[size * per])
    for n, register in enumerate(registers):
        columns[:, n] = register[:calls] != 0 if ty.elem == "i1" else register[:calls]
    values: np.ndarray = dtypes.from_bits(columns.view(WORD[size]), ty.elem)
    if ty.kind != "tensor":
        return dtypes.scalar(values.reshape(-1)[0], ty.elem)
    return values.reshape(ty.shape)


@lowers(
    "tt.elementwise_inline_asm",
    kind=NEST,
    attrs=["constraints", "packed_element", "pure"],
    words=r"",
)
def _inline_asm(op: Op, program: Program) -> Run:
    text = op.strings[0].replace("$$", "$")
    exchange = lower_cluster.lower(op, text)
    if exchange is not None:
        op.kind = STEP
        return exchange
    code = ptx.parse(text)
    pack = op.int_attr("packed_element", 1)
    results, types = op.results, op.result_types()
    sources = op.operand_types() if op.operands else []
    plain = _plain_barrier(code, op)
    if plain is not None:
        return _lower_barrier(op, program, *plain)
    outputs, inputs = _constraints(op.attrs["constraints"].strip('"'), op)
    for number in re.findall(r"\$(\d+)", text):
        if int(number) >= len(outputs) + len(inputs):
            raise UnsupportedKernelError(f"inline PTX operand ${number} has no constraint", op.loc)
    tensor = next((t for t in (*types, *sources) if t.kind == "tensor"), None)
    numel = int(np.prod(tensor.shape)) if tensor is not None else 1
    if tensor is not None and numel % pack:
        raise UnsupportedKernelError(
            f"inline PTX that takes {pack} elements a time of a tensor with {numel}", op.loc
        )
    calls = numel // pack if tensor is not None else 1
    step = pack if tensor is not None else 1

    def bind(f: Frame) -> ptx.Lanes:
        partition: Partition = f[0]
        count = calls
        if code.counts_threads:
            count = max(calls, 32 * partition.warps)
        lanes = ptx.Lanes(code, count, partition, op.loc)
        registers: list[np.ndarray] = []
        for slot, ty in zip(op.operands, sources):
            registers += _split(f[slot], ty, step if ty.kind == "tensor" else 1, calls)
        if len(registers) != len(inputs):
            raise UnsupportedKernelError(
                f"inline PTX with {len(inputs)} input constraints gets {len(registers)} registers",
                op.loc,
            )
        for n, register in enumerate(registers):
            whole = register if register.size == count else np.resize(register, count)
            lanes.registers[f"${len(outputs) + n}"] = whole
        for n, letter in enumerate(inputs):
            if letter.isdigit():
                lanes.registers[f"${letter}"] = lanes.registers[f"${len(outputs) + n}"]
        return lanes

    def collect(f: Frame, lanes: ptx.Lanes) -> None:
        at = 0
        for slot, ty in zip(results, types):
            count = step // _elements_a_register(ty, step) if ty.kind == "tensor" else 1
            mine = [
                lanes.raw(f"${n}", f"b{_LETTER.get(outputs[n], 32)}") for n in range(at, at + count)
            ]
            f[slot] = _merge(mine, ty, step if ty.kind == "tensor" else 1, calls)
            at += count

    if not code.touches_outside:
        op.kind = PURE

        def run_pure(f: Frame) -> None:
            lanes = bind(f)
            for _ in lanes.run():
                raise UnsupportedKernelError(f"inline PTX that waits: {text}", op.loc)
            collect(f, lanes)

        return run_pure

    def run(f: Frame) -> Generator[Wait | None, None, None]:
        lanes = bind(f)
        f[0].here = op.loc
        yield from lanes.run()
        collect(f, lanes)

    return run


@lowers("ttg.inline_asm", kind=NEST, attrs=["constraints", "pure"], words=r"")
def _threadwise_asm(op: Op, program: Program) -> Run:
    """Lower `gl.inline_asm` (Triton 3.9): one run a thread, shared buffers as addresses."""
    code = ptx.parse(op.strings[0].replace("$$", "$"))
    operands, inputs = op.operands, op.operand_types() if op.operands else []
    types = op.result_types() if op.results else []
    if any(ty.kind == "tensor" for ty in (*inputs, *types)):
        raise UnsupportedKernelError(
            "gl.inline_asm of a tensor, whose registers depend on its layout. "
            "Try: gl.inline_asm_elementwise",
            op.loc,
        )

    def run(f: Frame) -> Generator[Wait | None, None, None]:
        partition: Partition = f[0]
        partition.here = op.loc
        lanes = ptx.Lanes(code, 32 * partition.warps, partition, op.loc)
        for n, (slot, ty) in enumerate(zip(operands, inputs), len(types)):
            if ty.kind == "memdesc":
                word = np.uint32(ptx_mbarrier.address_of(lanes, view_of(f, slot)))
            else:
                word = _split(f[slot], ty, 1, 1)[0][0]
            lanes.registers[f"${n}"] = np.full(lanes.count, word)
        yield from lanes.run()
        for n, (slot, ty) in enumerate(zip(op.results, types)):
            words = lanes.raw(f"${n}", f"b{max(8 * dtypes.size_of(ty.elem), 8)}")
            f[slot] = _merge([words[:1]], ty, 1, 1)

    return run


def _lower_barrier(op: Op, program: Program, verb: str, ident: str, count: int) -> Run:
    """Lower text that is a named barrier and nothing else, without an interpreter."""
    (d,) = op.results
    slot = None if ident.isdigit() else op.operands[int(ident[1:]) - 1]
    literal = int(ident) if slot is None else 0
    op.kind = STEP
    if program.module.num_ctas > 1:
        raise UnsupportedKernelError("a named barrier in a cluster", op.loc)

    def run(f: Frame) -> Wait | None:
        f[d] = 0
        return meet(f[0], verb, literal if slot is None else int(f[slot]), count, op.loc)

    return run


def _plain_barrier(code: ptx.Code, op: Op) -> tuple[str, str, int] | None:
    """Recognise text that is one named barrier: verb, number (or its operand), and count."""
    barriers = [i for i in code.instructions if i.parts[0] in ("bar", "barrier")]
    rest = [i for i in code.instructions if i.parts[0] not in ("bar", "barrier")]
    if len(barriers) != 1 or barriers[0].predicate or len(op.results) != 1:
        return None
    (barrier,) = barriers
    verb = barrier.parts[-1]
    if barrier.parts[1:] not in (("sync",), ("arrive",)) or len(barrier.operands) != 2:
        return None
    quiet = all(i.name in ("mov.u32", "mov.b32") and i.operands == ("$0", "0") for i in rest)
    number, count = barrier.operands
    kinds = [ty.kind for ty in op.operand_types()] if op.operands else []
    given = [f"${n}" for n, kind in enumerate(kinds, 1) if kind != "tensor"]
    known = number.isdigit() or (number in given and "tensor" not in kinds)
    if not quiet or not known or not count.isdigit() or op.type.kind == "tensor":
        return None
    return verb, number, int(count)


def unknown_ptx(text: str) -> list[str]:
    """Return the instructions of a PTX text that the interpreter does not know.

    Args:
        text: Inline assembly.

    Returns:
        Their texts; empty if all are known, or the text as a whole is.
    """
    if lower_cluster.is_known(text):
        return []
    return [i.text for i in ptx.parse(text).instructions if not _is_known(i)]


def _is_known(i: ptx.Instruction) -> bool:
    if i.parts[0] in ("ret", "exit", "bra"):
        return True
    if i.parts[0] in ptx.OUTSIDE:
        return unknown_form(i.name) is None
    return i.parts[0] in KNOWN and strange_part(i.parts) is None
