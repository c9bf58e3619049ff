"""Lowerings of Hopper's asynchronous matrix multiply, and the value that is not ready yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloom.emulator.dtypes import round_to
from tileloom.emulator.ir import Loc, Op, parse_type, split_top
from tileloom.emulator.lower import STEP, PendingUseError, Program, Run, lowers
from tileloom.emulator.lower_shape import matmul
from tileloom.emulator.lower_shared import BadView, check_written, view_of
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.memory import View
from tileloom.emulator.report import Access


class Pending:
    """The result of an asynchronous wgmma: only another wgmma or a wait may take it."""

    def __init__(self, number: int, loc: Loc) -> None:
        self.number = number
        self.loc = loc
        self.value: np.ndarray | None = None
        self.reported = False

    @property
    def ready(self) -> bool:
        """Whether the multiply has completed."""
        return self.value is not None

    def side(self, partition: Partition) -> Access:
        """Return the multiply as a report shows it."""
        return Access(self.loc, "warpgroup_mma", partition.title, partition.cta.program)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.value is None or not self.reported:
            raise PendingUseError(self)
        return self.value if dtype is None else self.value.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__array__(), name)


@lowers("ttng.warp_group_dot", kind=STEP, attrs=["inputPrecision", "isAsync", "maxNumImpreciseAcc"],
        words=r"")  # fmt: skip
def _dot(op: Op, program: Program) -> Run:
    a, b, c, *rest = op.operands
    use_slot = rest[0] if rest else None
    (d,) = op.results
    elem = op.type.elem
    first = parse_type(split_top(op.signature.split(" * ")[0])[0])
    tf32 = first.elem == "f32"
    asynchronous = op.attrs.get("isAsync") == "true"
    loc = op.loc

    def run(f: Frame) -> Wait | None:
        partition: Partition = f[0]
        cta = partition.cta
        left, right = f[a], f[b]
        start: Any = f[c]
        use = True if use_slot is None else bool(f[use_slot])
        number = partition.wgmma.issued + 1
        for one in partition.team:
            one.wgmma.issued, one.wgmma.last = number, loc
        for slot, value in ((a, left), (b, right)):
            if value.__class__ is View or value.__class__ is BadView:
                view = view_of(f, slot)
                for one in partition.team:
                    cta.launch.shared.access(
                        view, one, "wgmma", loc, write=False, proxy="async", key=one.wgmma.key,
                        epoch=number,
                    )  # fmt: skip
                check_written(partition, view, "wgmma", loc)
        in_registers = None if left.__class__ is View else np.asarray(left)
        if start.__class__ is not Pending:
            start = np.asarray(start)
        result = Pending(number, loc)

        def complete() -> None:
            x = left.current() if in_registers is None else in_registers
            value = matmul(x, right.current(), tf32)
            if use:
                value = value + (start.value if start.__class__ is Pending else start)
            result.value = round_to(value, elem)
            partition.wgmma.done = number

        cta.issue("wgmma", partition, complete, loc, queue=("wgmma", partition.key))
        f[d] = result
        if asynchronous:
            return None

        def finish() -> None:
            for one in partition.team:
                one.clock[one.wgmma.key] = number
            f[d] = result.value

        if result.ready:
            finish()
            return None
        return Wait(lambda: result.ready, lambda: "a synchronous warpgroup_mma", loc, finish)

    return run


# warpGroupLocal (Triton 3.9): of several warp groups of a partition each waits for its own; what
# one may overwrite of the others' operands is the compiler's business.
@lowers("ttng.warp_group_dot_wait", kind=STEP, attrs=["pendings", "warpGroupLocal"], words=r"")
def _dot_wait(op: Op, program: Program) -> Run:
    pending = op.int_attr("pendings", 0)
    operands, results = op.operands, op.results
    loc = op.loc

    def run(f: Frame) -> Wait | None:
        partition: Partition = f[0]
        queue = partition.wgmma
        target = queue.issued - pending

        def finish() -> None:
            for one in partition.team:
                key = one.wgmma.key
                one.clock[key] = max(one.clock.get(key, 0), target)
            for source, result in zip(operands, results):
                value = f[source]
                done = value.__class__ is Pending and value.number <= target
                f[result] = value.value if done else value

        if queue.done >= target:
            finish()
            return None
        text = f"warpgroup_mma_wait({pending})"
        return Wait(lambda: queue.done >= target, lambda: text, loc, finish)

    return run
