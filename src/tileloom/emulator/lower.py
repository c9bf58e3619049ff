"""From operations to closures: the registry of lowerings and the program that they make up.

A lowering gets an operation and returns a function of the frame. Frame slot 0 holds the partition.
There are four kinds: PURE changes the frame only; STEP may touch shared state and may return a
`Wait`; NEST is a generator (control flow around steps); END ends a block.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Generator, Iterable, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from tileloom.emulator import costs
from tileloom.emulator.costs import Assembled
from tileloom.emulator.dtypes import UnknownElementError
from tileloom.emulator.global_edges import meet
from tileloom.emulator.ir import Block, Func, Module, Op, walk
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.report import EmulatorError, UnsupportedKernelError, quote
from tileloom.emulator.spinning import Turns

PURE, STEP, NEST, END = range(4)
Run = Callable[[Frame], Any]
Lowering = Callable[["Op", "Program"], Run]

# Attributes that carry no meaning for execution, or that a lowering reads by itself.
_COMMON = {
    "tt.divisibility", "tt.contiguity", "tt.constancy", "loop.cluster", "loop.stage",
    "ttg.partition", "ttg.partition.outputs", "ttg.ws_generated_barrier",
    "ttg.warp_specialize.tag", "async_task_id", "allocation.offset",
    "allocation.size", "fastmath", "overflowFlags", "operandSegmentSizes", "resultSegmentSizes",
    "tt.latency",
    "tt.self_latency",
}  # fmt: skip

# What `tl.multiple_of` and its like say of a loop's own value.
_HINT_OF_ARG = re.compile(r"tt\.(divisibility|contiguity|constancy)_arg\d+$")


class _Entry:
    __slots__ = ("attrs", "kind", "lower", "words")

    def __init__(self, lower: Lowering, kind: int, attrs: Set[str], words: str) -> None:
        self.lower = lower
        self.kind = kind
        self.attrs = attrs
        self.words = re.compile(words)


_REGISTRY: dict[str, _Entry] = {}


def lowers(
    *names: str, kind: int = PURE, attrs: Iterable[str] = (), words: str = r"-?\d+"
) -> Callable[[Lowering], Lowering]:
    """Register a lowering for some operations.

    Args:
        names: Operation names.
        kind: PURE, STEP, NEST or END. A lowering may lower the kind on its own by setting
            ``op.kind`` (a loop whose body is pure is pure).
        attrs: Attributes that the lowering knows; others are an error.
        words: A pattern for the words that may stand in the operation's text.

    Returns:
        The decorator.
    """

    def register(function: Lowering) -> Lowering:
        for name in names:
            _REGISTRY[name] = _Entry(function, kind, _COMMON | frozenset(attrs), words)
        return function

    return register


def load_lowerings() -> None:
    """Import the modules that register lowerings; they import this one."""
    for name in ("arith", "casts", "shape", "control", "global", "shared", "barriers", "async",
                 "wgmma", "ptx"):  # fmt: skip
        importlib.import_module(f"tileloom.emulator.lower_{name}")


def known_ops() -> list[str]:
    """Return the names of all operations that can be run, sorted."""
    return sorted(_REGISTRY)


class OutOfViewError(Exception):
    """A bad view was used while reports are collected: the access is dropped."""


class PendingUseError(Exception):
    """A pure operation touched the result of a wgmma that was not waited for."""

    def __init__(self, pending: Any) -> None:
        super().__init__("pending")
        self.pending = pending


class Program:
    """A module made ready to run.

    Attributes:
        module: What was read.
        communicates: Whether programs may talk through global memory, so that they run together.
        name: The kernel's name.
        waits: The statements that wait for an mbarrier.
        assembled: What the assembler says, if it was asked.
    """

    def __init__(self, module: Module, *, level: str = "ttgir") -> None:
        load_lowerings()
        self.module = module
        self.level = level
        self.name = module.kernel.name
        self.communicates = any(_communicates(op) for op in module.walk())
        self.is_gluon = False
        self.assembled: Assembled | None = None
        self._conflicts: list[tuple[Op, int]] | None = None
        self.waits = {id(op) for op in module.walk() if op.name == "ttng.wait_barrier"}
        for func in module.funcs.values():
            self.build_blocks(func.blocks)

    @cached_property
    def places(self) -> frozenset[tuple[str, int]]:
        """Names of files and lines that the operations come from, callers' too."""
        locs = {op.loc for op in self.module.walk()}
        return frozenset((Path(at.file).name, at.line) for loc in locs for at in loc.chain())

    def conflicts(self) -> list[tuple[Op, int]]:
        """Return the accesses to shared memory with bank conflicts, counted once."""
        if self._conflicts is None:
            self._conflicts = [] if self.level == "ttir" else costs.conflicts(self.module)
        return self._conflicts

    # ---- building
    def build_blocks(self, blocks: list[Block]) -> bool:
        """Lower all operations of some blocks; return whether the region is pure and straight."""
        pure = len(blocks) == 1
        for block in blocks:
            plan = []
            end = None
            for op in block.ops:
                self.build(op)
                if op.kind == END:
                    end = op
                    continue
                pure = pure and op.kind == PURE
                plan.append((op.kind, op.run, op))
            block.plan = (plan, end)
        return pure

    def build(self, op: Op) -> None:
        """Lower one operation; what is unknown becomes an error once it is reached."""
        entry = _REGISTRY.get(op.name)
        problem = ""
        if entry is None:
            problem = f"operation '{op.name}' {_foreign(op.name)}"
            for region in op.regions:
                self.build_blocks(region)
        else:
            extra = sorted(a for a in set(op.attrs) - entry.attrs if not _HINT_OF_ARG.match(a))
            words = [w for w in op.words if not entry.words.fullmatch(w)]
            if extra:
                problem = f"operation '{op.name}' has an attribute '{extra[0]}' that is not known"
            elif words:
                problem = f"operation '{op.name}' has a word '{words[0]}' that is not known"
        if not problem and entry is not None:
            op.kind = entry.kind
            try:
                op.run = entry.lower(op, self)
                if self.level == "machine" and _may_meet(op):
                    op.run = _met_after(op)
                return
            except (UnsupportedKernelError, UnknownElementError) as error:
                problem = str(error.args[0]).removeprefix("emulator: ").split("\n")[0]
            except (KeyError, ValueError, IndexError, AttributeError) as error:
                problem = f"cannot read '{op.name} {op.text[:120]}' ({error!r})"
        op.kind = STEP
        op.run = _refusal(problem, op)

    # ---- running
    def run_blocks(
        self, blocks: list[Block], frame: Frame
    ) -> Generator[Wait | None, None, list[Any] | None]:
        """Run blocks as a generator; the result is what the terminator yields."""
        partition: Partition = frame[0]
        explore = partition.cta.launch.explore
        loops: dict[str, Turns] = {}
        block = blocks[0]
        while True:
            plan, end = block.plan
            at = 0
            while at < len(plan):
                try:
                    for at in range(at, len(plan)):  # noqa: B020
                        kind, run, op = plan[at]
                        if kind == PURE:
                            run(frame)
                        elif kind == STEP:
                            if explore:
                                yield None
                            partition.here = op.loc
                            wait = run(frame)
                            if wait is not None:
                                yield wait
                        else:
                            yield from run(frame)
                    at += 1
                except PendingUseError as use:
                    _pending_used(use, plan[at][2], partition)
                except OutOfViewError:
                    at += 1
            if end is None:
                return None
            if end.name in ("cf.br", "cf.cond_br"):
                label, values = end.run(frame)
                block, back = _find_block(blocks, label, block)
                before = [frame[slot] for slot in block.args]
                for slot, value in zip(block.args, values):
                    frame[slot] = value
                if back:
                    partition.cta.launch.count_steps(len(plan), partition, end.loc)
                    turns = loops.get(label)
                    if turns is None:
                        turns = loops[label] = Turns(partition)
                    if (wait := turns.end(end.loc, before, values)) is not None:
                        yield wait
                continue
            return [frame[s] for s in end.operands]

    def run_pure(self, blocks: list[Block], frame: Frame) -> list[Any]:
        """Run one straight pure block and return what its terminator yields."""
        plan, end = blocks[0].plan
        at = 0
        while at < len(plan):
            try:
                for at in range(at, len(plan)):  # noqa: B020
                    plan[at][1](frame)
                at += 1
            except PendingUseError as use:
                _pending_used(use, plan[at][2], frame[0])
        return [frame[s] for s in end.operands] if end is not None else []

    def call(
        self, func: Func, partition: Partition, values: list[Any]
    ) -> Generator[Wait | None, None, list[Any]]:
        """Run a function with a frame of its own."""
        frame: Frame = [None] * func.slots
        frame[0] = partition
        for slot, value in zip(func.args, values):
            frame[slot] = value
        result = yield from self.run_blocks(func.blocks, frame)
        return result or []


def _may_meet(op: Op) -> bool:
    """Whether the compiler may let the threads of a partition meet at an operation.

    It does where they exchange values through shared memory, after the passes of level machine.
    """
    return op.name.startswith(("ttg.local_", "ttg.async_", "ttng.")) or (
        "allocation.offset" in op.attrs
    )


def _met_after(op: Op) -> Run:
    run = op.run

    def step(f: Frame) -> Wait | None:
        wait = run(f)
        meet(f[0])
        return wait

    def nest(f: Frame) -> Generator[Wait | None, None, None]:
        yield from run(f)
        meet(f[0])

    return nest if op.kind == NEST else step


def _find_block(blocks: list[Block], label: str, current: Block) -> tuple[Block, bool]:
    target = next(i for i, b in enumerate(blocks) if b.label == label)
    back = any(b is current for b in blocks[target:])
    return blocks[target], back


def _foreign(name: str) -> str:
    """Say what an operation is that the emulator does not play."""
    if re.match(r"ttng\.async_tma_(gather|scatter)$|tt\.descriptor_(gather|scatter)$", name):
        return (
            "is one of Blackwell's: Hopper's TMA neither gathers nor scatters rows. Try: rows by "
            "pointers (tl.load, gl.load, async_copy)"
        )
    if re.match(r"ttng\.(tmem|tc_?gen5|clc|cluster_launch)|ttng\.\w*(tmem|tc_?gen5|scale)", name):
        return (
            "is one of Blackwell's (tensor memory, tcgen05); the emulator plays Hopper and Ampere. "
            "Try: a kernel with warpgroup_mma"
        )
    if re.match(r"(ttg\.)?amdg?(gpu)?\.|rocdl\.", name):
        return "is one of AMD's; the emulator plays NVIDIA's Hopper and Ampere"
    if name == "tt.dot_scaled":
        return "is played once the compiler has taken it apart. Try: level='ttgir' or 'machine'"
    return (
        "is not supported. Try: another operation; docs/emulator.md lists what is played, and a "
        "bug report that names this one is welcome"
    )


def _refusal(problem: str, op: Op) -> Run:
    def run(frame: Frame) -> None:
        raise UnsupportedKernelError(problem, op.loc)

    return run


def _pending_used(use: PendingUseError, op: Op, partition: Partition) -> None:
    pending = use.pending
    if pending.reported:
        raise EmulatorError(f"emulator: internal fault at {quote(op.loc)}: wgmma never completes")
    pending.reported = True
    partition.report(
        "pending",
        "the result of an asynchronous warpgroup_mma is used before warpgroup_mma_wait() returned "
        "it",
        op.loc, op.name, other=pending.side(partition),
        hint="use the value that warpgroup_mma_wait(..., deps=[acc]) returns",
    )  # fmt: skip
    partition.cta.force(lambda: pending.ready, "wgmma")


_TALKING = {"tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store", "tt.atomic_poll"}
_TALKING_PTX = re.compile(r"\b(ld|atom|red|st)\.")


def _communicates(op: Op) -> bool:
    if op.name in _TALKING:
        return True
    if op.name == "tt.load" and op.attrs.get("isVolatile") == "true":
        return True
    if op.name == "scf.while":  # it may spin on a plain load
        return any(inner.name == "tt.load" for region in op.regions for inner in walk(region))
    return op.name in ("tt.elementwise_inline_asm", "ttg.inline_asm") and any(
        _TALKING_PTX.search(s) for s in op.strings[:1]
    )
