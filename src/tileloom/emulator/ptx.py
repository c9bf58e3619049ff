"""A small interpreter of PTX text, vectorised over lanes: what kernels write as inline assembly.

Registers hold raw unsigned words, one a lane. Lanes that branch apart run at the lowest program
counter first until they meet again. Instructions that wait are generators that yield a `Wait`.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tileloom.emulator import ptx_values
from tileloom.emulator.ir import Loc
from tileloom.emulator.report import EmulatorError, UnsupportedKernelError

if TYPE_CHECKING:
    from tileloom.emulator.machine import Partition, Wait
    from tileloom.emulator.spinning import Turns

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_SPECIAL = re.compile(
    r"%(globaltimer(_lo)?|clock(64)?|tid\.[xyz]|laneid|warpid|n?ctaid\.[xyz]|smid)$"
)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: opcode parts, operands, predicate."""

    name: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str

    @property
    def type(self) -> str:
        """The last type suffix, for example ``f32``."""
        return self.parts[-1] if len(self.parts) > 1 else ""


@dataclass
class Code:
    """PTX taken apart: instructions, labels, declared registers."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]

    @cached_property
    def touches_outside(self) -> bool:
        """Whether an instruction does more than compute values."""
        return any(i.parts[0] in OUTSIDE or "%globaltimer" in i.text for i in self.instructions)

    @cached_property
    def counts_threads(self) -> bool:
        """Whether the result depends on how many threads run the text, or on which one does."""
        return any(
            i.parts[0] in ("red", "atom", "elect", "st", "mbarrier")
            or re.search(r"%(tid|laneid|warpid)", i.text)
            for i in self.instructions
        )


# Instructions that touch memory, barriers or other threads.
OUTSIDE = frozenset({
    "bar", "barrier", "fence", "membar", "ld", "st", "atom", "red", "cp", "nanosleep", "elect",
    "bra",
    "griddepcontrol", "mbarrier", "trap", "prefetch",
})  # fmt: skip


def _split_operands(text: str) -> tuple[str, ...]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += char in "{[("
        depth -= char in "}])"
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(p for p in parts if p)


@lru_cache(maxsize=512)
def parse(text: str) -> Code:
    """Take PTX text apart.

    Args:
        text: The text of an inline assembly statement.

    Returns:
        Its code. Scopes are flattened; a name declared in two scopes is one register.
    """
    body = _COMMENT.sub(" ", text)
    # A brace that opens or closes a scope stands where an instruction may start.
    body = re.sub(r"(^|;|:|[{}])(\s*)([{}])", r"\1\2 \3 ", body)
    body = _scopes_removed(body)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    for statement in body.split(";"):
        while match := _LABEL.match(statement):
            labels[match.group(1)] = len(instructions)
            statement = statement[match.end() :]
        statement = " ".join(statement.split())
        if not statement:
            continue
        if match := _REGISTER.match(statement):
            for name in match.group(2).split(","):
                name = name.strip()
                if span := re.match(r"([%\w]+)<(\d+)>$", name):
                    for i in range(int(span.group(2))):
                        registers[f"{span.group(1)}{i}"] = match.group(1)
                else:
                    registers[name] = match.group(1)
            continue
        match = _INSTRUCTION.match(statement)
        if match is None:
            raise UnsupportedKernelError(f"unsupported inline PTX: {statement}")
        parts = tuple(match.group(3).split("."))
        instructions.append(
            Instruction(
                match.group(3), parts, _split_operands(match.group(4)), match.group(2),
                match.group(1) == "!", statement,
            )
        )  # fmt: skip
    return Code(tuple(instructions), labels, registers)


def _scopes_removed(body: str) -> str:
    """Drop braces that are scopes; keep those of vector operands such as ``{a, b}``."""
    out: list[str] = []
    stack: list[bool] = []
    fresh = True
    for char in body:
        if char == "{":
            stack.append(fresh)
            if not fresh:
                out.append(char)
                continue
            out.append(" ")
        elif char == "}":
            scope = stack.pop() if stack else True
            if not scope:
                out.append(char)
                continue
            out.append(" ")
            fresh = True
        else:
            out.append(char)
            if char in ";:":
                fresh = True
            elif not char.isspace():
                fresh = False
    return "".join(out)


class Lanes:
    """The state of some lanes that run one piece of PTX."""

    def __init__(self, code: Code, count: int, partition: Partition, loc: Loc) -> None:
        self.code = code
        self.count = count
        self.partition = partition
        self.loc = loc
        self.registers: dict[str, np.ndarray] = {}
        self.mask: np.ndarray | None = None
        self.turns: Turns | None = None
        self.carried: list[Any] = []

    # ---- operands
    def fail(self, why: str, instruction: Instruction) -> UnsupportedKernelError:
        """Return the error for an instruction that cannot be played."""
        return UnsupportedKernelError(
            f"unsupported inline PTX: {instruction.text} ({why}). "
            "Try: the operation that Triton or Gluon has for it",
            self.loc,
        )

    def malformed(self, error: Exception, instruction: Instruction) -> EmulatorError:
        """Return the error for an instruction that the assembler would not take."""
        if isinstance(error, EmulatorError):
            return error
        why = str(error)
        if "unpack" in why or isinstance(error, IndexError):
            why = "a wrong number of operands"
        return self.fail(why, instruction)

    def read(self, operand: str, kind: str) -> np.ndarray:
        """Read an operand as values of a PTX type."""
        return ptx_values.typed(self.raw(operand, kind), kind)

    def raw(self, operand: str, kind: str) -> np.ndarray:
        """Read an operand as raw words of a PTX type's width (predicates as bools)."""
        found = self.registers.get(operand)
        if found is None:
            if operand in self.code.registers or operand[:1] == "$":
                # A register that was never written; ptxas takes anything.
                return ptx_values.zeros(kind, self.count)
            if operand[:1] == "%":
                return self._special(operand, kind)
            return np.full(self.count, ptx_values.immediate(operand, kind))
        if kind == "pred" or found.dtype == np.bool_:
            return found
        return found.astype(ptx_values.WORD[ptx_values.width(kind)], copy=False)

    def write(self, operand: str, words: np.ndarray) -> None:
        """Write raw words (or bools) to a register in the lanes that run."""
        if operand == "_":
            return
        if words.shape != (self.count,):
            words = np.broadcast_to(words, (self.count,))
        if self.mask is not None:
            old = self.registers.get(operand)
            if old is None:
                old = np.zeros(self.count, words.dtype)
            words = np.where(self.mask, words, old.astype(words.dtype, copy=False))
        self.registers[operand] = words

    def put(self, operand: str, values: Any, kind: str) -> None:
        """Write values of a PTX type."""
        self.write(operand, ptx_values.words(values, kind))

    def _special(self, name: str, kind: str) -> np.ndarray:
        if not _SPECIAL.match(name):
            raise UnsupportedKernelError(
                f"unsupported inline PTX: special register {name}", self.loc
            )
        launch = self.partition.cta.launch
        threads = np.arange(self.count, dtype=np.uint64) % (32 * self.partition.warps)
        if name in ("%globaltimer", "%clock64", "%clock", "%globaltimer_lo"):
            self.partition.timed = True
            launch.clock_ns += 1000
            value: Any = np.full(self.count, launch.clock_ns, np.uint64)
        elif name == "%tid.x":
            value = threads + self.partition.first_thread
        elif name in ("%tid.y", "%tid.z"):
            value = threads * 0
        elif name == "%laneid":
            value = threads % 32
        elif name == "%warpid":
            value = (threads + self.partition.first_thread) // 32
        elif match := re.match(r"%n?ctaid\.([xyz])$", name):
            source = launch.grid if name[1] == "n" else self.partition.cta.program
            value = np.full(self.count, source["xyz".index(match.group(1))], np.uint64)
        else:  # %smid: programs are dealt out in turn
            slot = sum(self.partition.cta.program) % launch.options.sms
            value = np.full(self.count, slot, np.uint64)
        return value.astype(ptx_values.WORD[ptx_values.width(kind)])

    def active(self) -> np.ndarray:
        """Return which lanes run."""
        return np.ones(self.count, np.bool_) if self.mask is None else self.mask

    # ---- running
    def run(self) -> Generator[Wait | None, None, None]:
        """Run the code to its end."""
        from tileloom.emulator import ptx_effects

        code = self.code.instructions
        end = len(code)
        at = np.zeros(self.count, np.int64)
        counter = 0
        apart = False
        while True:
            if apart:
                counter = int(at.min())
                if counter >= end:
                    return
                here = at == counter
                apart = not here.all()
                group = here if apart else None
            else:
                group = None
            if counter >= end:
                return
            instruction = code[counter]
            self.mask = self._enabled(instruction, group)
            target = counter + 1
            if self.mask is None or self.mask.any():
                if instruction.parts[0] == "bra":
                    target, apart, at = self._branch(instruction, group, at, counter, apart)
                    if target <= counter or (apart and int(at.min()) <= counter):
                        wait = self._turn(at if apart else target)
                        if wait is not None:
                            yield wait
                    if not apart:
                        counter = target
                    continue
                if instruction.parts[0] in ("ret", "exit"):
                    target = end
                elif instruction.parts[0] in OUTSIDE:
                    try:
                        yield from ptx_effects.play(self, instruction)
                    except (ValueError, KeyError, IndexError) as error:
                        raise self.malformed(error, instruction) from None
                else:
                    ptx_values.play(self, instruction)
            if group is not None:
                at = np.where(group, target, at)
            else:
                counter = target

    def _enabled(self, instruction: Instruction, group: np.ndarray | None) -> np.ndarray | None:
        if instruction.predicate is None:
            return group
        try:
            chosen = self.raw(instruction.predicate, "pred").astype(np.bool_)
        except ValueError as error:
            raise self.malformed(error, instruction) from None
        chosen = ~chosen if instruction.negated else chosen
        chosen = chosen if group is None else chosen & group
        return None if chosen.all() else chosen

    def _branch(
        self,
        instruction: Instruction,
        group: np.ndarray | None,
        at: np.ndarray,
        counter: int,
        apart: bool,
    ) -> tuple[int, bool, np.ndarray]:
        label = instruction.operands[0]
        if label not in self.code.labels:
            raise self.fail("no such label", instruction)
        target = self.code.labels[label]
        taken = self.mask
        if taken is None:  # all lanes, together
            return target, False, at
        if not apart:
            at = np.full(self.count, counter + 1)
        elif group is not None:
            at = np.where(group, counter + 1, at)
        return target, True, np.where(taken, target, at)

    def _turn(self, at: Any) -> Wait | None:
        """At a branch backwards: count steps, and let others act if the loop only looks."""
        from tileloom.emulator.spinning import Turns

        if self.turns is None:
            self.turns = Turns(self.partition)
        launch = self.partition.cta.launch
        launch.count_steps(8, self.partition, self.loc)
        before, self.carried = self.carried, [at, *self.registers.values()]
        return self.turns.end(self.loc, before, self.carried)
