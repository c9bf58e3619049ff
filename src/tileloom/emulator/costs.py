"""What is right but slow: bank conflicts, and what the assembler says: registers, spills, wgmma.

Neither depends on what a run does. Conflicts are counted by Triton's own binding, for each access
that goes through registers, as ``ld.shared`` and ``st.shared`` would do it. Registers and spills
need the rest of the compiler, which takes seconds a kernel, so they are asked for.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileloom.emulator import dtypes
from tileloom.emulator.ir import Module, Op, Type, split_top
from tileloom.emulator.report import Access, Reporter
from tileloom.launch import compat
from tileloom.launch.aot import read_assembler_log, serialises_wgmma

if TYPE_CHECKING:
    from tileloom.emulator.lower import Program

COSTS = ("conflicts", "registers")
_ACCESSES = ("ttg.local_load", "ttg.local_store", "ttg.local_alloc")


@dataclass(frozen=True)
class Assembled:
    """What the assembler says of a kernel.

    Attributes:
        registers: 32-bit registers of each thread at launch.
        spill_bytes: Bytes of spill stores and loads.
        notes: Its warnings.
        problem: Why it says nothing, if it does not.
    """

    registers: int = 0
    spill_bytes: int = 0
    notes: tuple[str, ...] = ()
    problem: str = ""


def check(program: Program, costs: tuple[str, ...], reporter: Reporter) -> None:
    """Report what is slow about a program, as warnings.

    Args:
        program: The program.
        costs: Which of `COSTS` to look at.
        reporter: Where the reports go.
    """
    if "conflicts" in costs:
        for op, extra in program.conflicts():
            where = "read" if op.name == "ttg.local_load" else "written"
            reporter.add(
                "cost", f"shared memory is {where} with bank conflicts: {1 + extra} accesses in "
                "place of one for each wavefront",
                Access(op.loc, op.name.partition(".")[2].replace("_", " "), "", ()),
                hint="a shared layout that swizzles, or a register layout whose threads lie along "
                "the contiguous dimension", severity="warning",
            )  # fmt: skip
    found = program.assembled
    if "registers" not in costs or found is None:
        return
    at = Access(program.module.kernel.loc, "kernel", "", ())
    if found.problem:
        reporter.add(
            "cost", f"registers and spills are not known: {found.problem}", at, severity="info"
        )
    if found.spill_bytes:
        reporter.add(
            "cost", f"the assembler spills {found.spill_bytes} bytes (stores and loads together) "
            f"at {found.registers} registers a thread", at, severity="warning",
            hint="smaller tiles, more warps, or fewer values that live at the same time",
        )  # fmt: skip
    for note in filter(serialises_wgmma, found.notes):
        reporter.add(
            "cost", f"the assembler lets no wgmma overlap: {note}", at, severity="warning",
            hint="no accumulator may be read while a wgmma is in flight, nor a loop that carries "
            "one run zero times",
        )  # fmt: skip


# ---- bank conflicts
def conflicts(module: Module) -> list[tuple[Op, int]]:
    """Count bank conflicts of what goes between registers and shared memory.

    Args:
        module: A module at level ``ttgir`` or ``machine``.

    Returns:
        Each access that has some, and how many accesses each of its wavefronts needs beyond one.
        Slices of a buffer are left out, which Triton's binding does not take.
    """
    found: dict[tuple[Type, Type], list[Op]] = {}
    for op in module.walk():
        pair = _pair(op)
        if pair is not None:
            found.setdefault(pair, []).append(op)
    counts = _counts(module, list(found)) if found else []
    return [(op, n) for ops, n in zip(found.values(), counts) if n > 0 for op in ops]


def _pair(op: Op) -> tuple[Type, Type] | None:
    """Return the types of the register tensor and the buffer of an access, if it is one."""
    if op.name not in _ACCESSES or not op.operands:
        return None
    tensor, buffer = op.operand_types()[0], op.result_types()[0]
    if op.name == "ttg.local_load":
        tensor, buffer = buffer, tensor
    if tensor.kind != "tensor" or buffer.kind != "memdesc" or tensor.shape != buffer.shape:
        return None
    parts = split_top(buffer.text[buffer.text.index("<") + 1 : -1])
    whole = [p for p in parts if p.replace("x", "").isdigit()]
    size = [int(n) for n in whole[0].split("x")] if whole else list(buffer.shape)
    return (tensor, buffer) if size[len(size) - len(buffer.shape) :] == [*buffer.shape] else None


def _counts(module: Module, pairs: list[tuple[Type, Type]]) -> list[int]:
    """Ask Triton, by a module whose function takes the tensors and the buffers."""
    from triton._C.libtriton import gluon_ir, ir, nvidia

    aliases = "\n".join(
        f"#{name} = {body}"
        for name, body in module.aliases.items()
        if not re.fullmatch(r"loc\d*", name)
    )
    arguments = ", ".join(f"%a{i}: {t.text}, %b{i}: {b.text}" for i, (t, b) in enumerate(pairs))
    attributes = ", ".join(
        f"{quoted} = {module.attrs[name]}" for name, quoted in (
            ("ttg.num-ctas", '"ttg.num-ctas"'), ("ttg.num-warps", '"ttg.num-warps"'),
            ("ttg.target", "ttg.target"), ("ttg.threads-per-warp", '"ttg.threads-per-warp"'),
        ) if name in module.attrs
    )  # fmt: skip
    text = (
        f"{aliases}\nmodule attributes {{{attributes}}} {{\n"
        f"tt.func public @pairs({arguments}) {{ tt.return }}\n}}\n"
    )
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    parsed = _parsed(text, context)
    builder: Any = gluon_ir.GluonOpBuilder(context)
    # It asks the module around it for the card.
    ends: list[Any] = []
    parsed.walk(lambda op: ends.append(op.get_block()) if op.get_name() == "tt.return" else None)
    builder.set_insertion_point_to_start(ends[0])
    function = parsed.get_function("pairs")
    out: list[int] = []
    for i, (tensor, _buffer) in enumerate(pairs):
        layout = builder.get_gluon_layout_from_tensor(function.args(2 * i))
        shared = builder.get_gluon_layout_from_memdesc(function.args(2 * i + 1))
        bits = 8 * dtypes.size_of(tensor.elem)
        out.append(
            builder.get_shared_bank_conflicts(
                layout._to_ir(builder), shared._to_ir(builder), list(tensor.shape), bits
            )
        )
    return out


def _parsed(text: str, context: Any) -> Any:
    """Read a module's text in a context of Triton's."""
    from triton._C.libtriton import ir

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        module: Any = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


# ---- the assembler
def assemble(
    source: Any, stages: Mapping[str, Callable[[Any, dict[str, Any]], Any]],
    metadata: Mapping[str, Any], options: Mapping[str, object], capability: int,
) -> Assembled:  # fmt: skip
    """Compile a copy of a module to machine code, for what the assembler says.

    Args:
        source: The TTGIR module; it stays as it is.
        stages: Triton's own stages ``llir`` and ``ptx``.
        metadata: What the stages before have noted.
        options: The compile options.
        capability: For example 90.

    Returns:
        What it says, or why it says nothing.
    """
    noted = dict(metadata)
    try:
        made: Any = _parsed(source.str(), source.context)
        for name in ("llir", "ptx"):
            made = stages[name](made, noted)
        registers, spills, notes = read_assembler_log(
            compat.assemble_again(made, options, capability)
        )
    except Exception as error:  # the compiler raises whatever its parts raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Assembled(problem=f"{type(error).__name__}: {lines[0] if lines else 'no text'}")
    return Assembled(registers, spills, notes)
