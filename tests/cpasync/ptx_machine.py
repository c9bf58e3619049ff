"""Plays the PTX of one block on the CPU, copies as late as the program lets them be.

For kernels of `tileloom.cpasync`, where there is no GPU: integer and float32 instructions, shared
memory, cp.async, TMA with descriptors, mbarriers, named barriers, wgmma and stmatrix. Threads take
turns; shared memory begins as NaN. Either what fills shared memory is as late as it may be (when a
wait asks for it, or nobody else can go on), so that a missing wait reads NaN or old data; or what
reads it is (stores by TMA, wgmma), so that a buffer handed back too early gives a wrong result.
What ordinary stores wrote and no fence has handed to TMA is an error, and so is a block in which
nobody can go on.
"""

from __future__ import annotations

import functools
import itertools
import re
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cpasync.ptx_ops import Globals, SimpleOps, TensorMap, bits

__all__ = ["Deadlock", "Globals", "Machine", "TensorMap", "Unfenced"]

SHARED = 1 << 10  # where shared memory begins; 1024-aligned, as the DSL promises
BLOCKED = object()


class Deadlock(AssertionError):
    """Nobody can go on, and no copy is on its way."""


class Unfenced(AssertionError):
    """TMA reads what ordinary stores wrote, with no proxy fence of the writer in between."""


@dataclass
class Barrier:
    """An mbarrier: the phase in progress, arrivals and bytes that it still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def update(self, arrivals=0, transactions=0):
        self.pending -= arrivals
        self.bytes += transactions
        assert self.pending >= 0, "more arrivals than the barrier was set up for"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


@dataclass(eq=False)
class Thread:
    """Registers, program counter, and the groups of this thread's copies, oldest first."""

    index: int
    registers: dict[str, Any] = field(default_factory=dict)
    at: int = 0
    done: bool = False
    copies: list[list[Any]] = field(default_factory=lambda: [[]])
    stores: list[list[Any]] = field(default_factory=lambda: [[]])


class Machine(SimpleOps):
    """One block of a kernel.

    Args:
        ptx: The module's text, with one entry.
        parameters: For each parameter of the entry a number, a float or a `TensorMap`.
        memory: Global memory, of which pointers among the parameters are addresses.
        block: Index of the block, and how many there are.
        late: ``"loads"`` or ``"reads"``: which asynchronous operations happen as late as they may;
            the others happen at once.
    """

    def __init__(self, ptx, parameters, memory, block=(0, 1), late="loads"):
        self.memory, self.block, self.late = memory, block, late
        self.maps = {}
        self.threads_of = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        self.shared = np.full(SHARED + 227 * 1024, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.loads: list[Any] = []  # TMA loads on their way, oldest first
        self.products: dict[int, list[list[Any]]] = {}  # groups of wgmma of each warpgroup
        self.meetings: dict[Any, list[Thread]] = {}
        self.written: dict[int, list[tuple[int, int]]] = {}  # by ordinary stores, not fenced yet
        self.symbols = self._symbols(ptx, parameters)
        self.program = self._program(ptx)

    # Reading the text

    def _symbols(self, ptx, parameters):
        names, top = {}, SHARED
        for name, size in re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d*)\]", ptx):
            names[name], top = top, -(-(top + int(size or 0)) // 1024) * 1024
        declared = re.findall(r"(\w+_param_\d+)[\[,\n]", ptx[: ptx.index("\n{\n")])
        assert len(declared) >= len(parameters)
        for name, value in zip(declared, parameters):
            token = len(self.maps) + 1 << 48
            if isinstance(value, TensorMap):
                self.maps[token] = value
                value = token
            elif isinstance(value, float):
                value = struct.unpack("<I", struct.pack("<f", value))[0]
            names[name] = value
        return names

    def _program(self, ptx):
        text = re.sub(r"//.*", "", ptx[ptx.index("\n{\n") + 3 :])
        # The DSL wraps each wgmma into a block of its own that makes its predicate p.
        text = re.sub(r"\{\s*\.reg \.pred p;(.*?)\n\}", r"\1", text, flags=re.DOTALL)
        labels, found = {}, []
        for statement in re.split(r";|(?<=:)\s", text.replace("\n", " ")):
            statement = " ".join(statement.split())
            if statement.endswith(":"):
                labels[statement[:-1]] = len(found)
            elif statement and not statement.startswith((".", "}")):
                found.append(statement)
        self.labels = labels
        return [self._instruction(statement) for statement in found]

    def _instruction(self, statement):
        match = re.match(r"(?:@(!?)(%?\w+) )?([\w.:]+) ?(.*)", statement)
        negated, guard, name, rest = match[1] == "!", match[2], match[3], match[4]
        # An operand is in brackets, which may hold braces, in braces, or a word.
        operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^\s,\[\]{}]+", rest)
        return guard, negated, self.compiled(name, operands)

    # Running

    def run(self):
        """Play the block to its end."""
        threads = [Thread(index) for index in range(self.threads_of)]
        while not all(thread.done for thread in threads):
            moved = [self._advance(thread) for thread in threads if not thread.done]
            if any(moved):
                continue
            if not self.loads:
                places = sorted({thread.at for thread in threads if not thread.done})
                raise Deadlock(f"block {self.block[0]}: everybody waits, at {places}")
            self._complete(self.loads.pop(0))
        for load in self.loads:
            self._complete(load)
        for thread in threads:
            for operation in itertools.chain(*thread.stores, *thread.copies):
                operation()
        for barrier in self.barriers.values():
            assert barrier.bytes == 0, "a barrier still waits for bytes"

    def _advance(self, thread):
        """Let a thread go on until it waits; whether it did anything."""
        start = thread.at
        while not thread.done:
            guard, negated, operation = self.program[thread.at]
            if guard is not None and bool(thread.registers[guard]) == negated:
                thread.at += 1
                continue
            target = operation(thread)
            if target is BLOCKED:
                return thread.at != start
            thread.at = thread.at + 1 if target is None else target
        return True

    def meet(self, thread, key, count, act=None):
        """Wait until `count` threads are here; the last one acts for all and frees them."""
        here = self.meetings.setdefault(key, [])
        if thread not in here:
            here.append(thread)
        if len(here) < count:
            return BLOCKED
        del self.meetings[key]
        here.sort(key=lambda other: other.index)
        if act is not None:
            act(here)
        for other in here:
            if other is not thread:
                other.at += 1
        return None

    # Asynchronous operations

    def _complete(self, load):
        tensor, target, crd, barrier, size = load
        tensor.load(self.shared, target, crd)
        self.barriers[barrier].update(transactions=-size)

    def later(self, group, operation, kind):
        """Note an operation of a thread, or do it."""
        if self.late == kind:
            group.append(operation)
        else:
            operation()

    def drain(self, groups, left):
        """Do the oldest groups until at most `left` committed ones remain."""
        while len(groups) - 1 > left:
            for operation in groups.pop(0):
                operation()

    def check_fenced(self, start, size):
        """Refuse to let TMA read bytes that a thread wrote and has not fenced."""
        for thread, written in self.written.items():
            for at, length in written:
                if at < start + size and start < at + length:
                    raise Unfenced(f"thread {thread} wrote shared memory at {at} without a fence")

    def mbarrier(self, name, operands):
        """The mbarrier instructions, each as a function of a thread."""
        if name.startswith("mbarrier.init"):
            address, count = self.address(operands[0]), self.value(operands[1])
            return lambda t: self.barriers.__setitem__(address(t), Barrier(count(t), count(t)))
        address, target = self.address(operands[1]), operands[0]
        if name.startswith("mbarrier.arrive.expect_tx"):
            size = self.value(operands[2])
            return lambda t: self.barriers[address(t)].update(1, size(t))
        if name.startswith("mbarrier.arrive"):
            return lambda t: self.barriers[address(t)].update(1)
        assert name.startswith("mbarrier.try_wait.parity")
        parity = self.value(operands[2])

        def wait(t):
            if self.barriers[address(t)].phase & 1 == parity(t):
                return BLOCKED
            t.registers[target] = True
            return None

        return wait

    def wgmma(self, name, operands):
        """The wgmma instructions: 128 threads meet at each; products wait for a wait."""
        key, kind = object(), name.split(".")[1]

        def act(threads):
            groups = self.products.setdefault(threads[0].index // 128, [[]])
            if kind == "commit_group":
                groups.append([])
            elif kind == "wait_group":
                self.drain(groups, int(operands[0]))
            else:
                a, b, accumulate = (source(threads[0]) for source in sources)
                product = functools.partial(self.multiply, threads, names, a, b, accumulate)
                self.later(groups[-1], product, "reads")

        if kind == "mma_async":
            assert "m64n256k16.f32.f16.f16" in name
            names, sources = self.listed(operands[0]), [self.value(o) for o in operands[1:4]]
        return lambda t: self.meet(t, (key, t.index // 128), 128, act)

    def multiply(self, threads, names, a, b, accumulate):
        """One wgmma m64n256k16 of a warpgroup, from shared memory as its descriptors say."""
        left, right = self._operand(a, 64), self._operand(b, 256)
        sums = left @ right.T
        lane, value = np.arange(128)[:, None], np.arange(128)[None, :]
        row = lane // 32 * 16 + lane % 32 // 4 + value // 2 % 2 * 8
        column = value // 4 * 8 + lane % 4 * 2 + value % 2
        added = sums[row, column]
        if accumulate:
            old = [[thread.registers[name] for name in names] for thread in threads]
            added = added + np.array(old, np.uint32).view(np.float32)
        for thread, values in zip(threads, added.astype(np.float32).view(np.uint32).tolist()):
            thread.registers.update(zip(names, values))

    def _operand(self, descriptor, rows):
        assert bits(descriptor, 62, 2) == 1, "only the 128-byte swizzle is played"
        start, step = bits(descriptor, 0, 14) << 4, bits(descriptor, 32, 14) << 4
        row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
        at = start + row // 8 * step + row % 8 * 128 + byte
        at ^= (at >> 7 & 7) << 4
        raw = self.shared[at]
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
