"""What the modes of `tileloom bench` that measure functions share: cases, the run, the record."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tileloom.bench.function_run import (
    Case,
    FunctionCell,
    FunctionContender,
    FunctionEntry,
    FunctionSession,
    copy_bandwidth,
    run_function_cell,
)

if TYPE_CHECKING:
    import torch
    from rich.table import Table

C = TypeVar("C", bound=Case)


@dataclass
class FunctionJob(Generic[C]):
    """One run of the command, and what it has measured so far.

    Attributes:
        kind: What the record calls itself, ``"gemm"`` or ``"rowwise"``.
        args: What the parser of `tileloom bench` gave.
        cases: What is measured.
        columns: The contenders of a case.
        number: What is shown of an entry.
        figures: What the record says of a cell besides its times, such as bytes.
        verdict: What the record ends with, from all cells.
        cells: The cells measured.
        copy_gbps: Bandwidth of a copy on the card, in GB/s, read and written bytes together.
        finished: Whether all cases were measured.
    """

    kind: str
    args: argparse.Namespace
    cases: Sequence[C]
    columns: Callable[[C], Sequence[FunctionContender[C]]]
    number: Callable[[FunctionCell[C], FunctionEntry], str]
    figures: Callable[[C], Mapping[str, float]]
    verdict: Callable[[Sequence[FunctionCell[C]]], Mapping[str, Any]] = lambda cells: {}
    cells: list[FunctionCell[C]] = field(default_factory=list["FunctionCell[C]"])
    copy_gbps: float = 0.0
    finished: bool = False
    _head: dict[str, Any] = field(default_factory=dict[str, Any])

    def keep(self) -> None:
        """Write the record, if the caller wants one."""
        from tileloom.bench.store import write

        if self.args.out is None:
            return
        content = {
            "kind": f"tileloom-bench-{self.kind}",
            "schema": 1,
            **self._head,
            "finished": self.finished,
            "command": shlex.join(sys.argv[1:]),
            "copy_gbps": self.copy_gbps,
            "protocol": "docs/benchmarks.md; call_us: the same calls with no kernel spinning "
            "before them, so that the device waits for the host where the host is slower",
            "cells": [{**asdict(cell), **self.figures(cell.case)} for cell in self.cells],
            **self.verdict(self.cells),
        }
        write(self.args.out, content)

    def run(self, device: torch.device, *, budget_s: float, pause_s: float) -> None:
        """Measure all cases, and keep the record after each.

        Args:
            device: The GPU.
            budget_s: Seconds for all cases, where ``--budget`` gives none.
            pause_s: Seconds of rest before each sample.
        """
        from tileloom.bench import DeviceTimer, Plan
        from tileloom.bench.machine import Watch, describe_machine, git_state, l2_bytes, now
        from tileloom.bench.watchdog import Watchdog, end_process
        from tileloom.testing import assert_accurate

        end = time.perf_counter() + (self.args.budget or budget_s)
        self._head = {
            "date": now(),
            "code": git_state(self.args.commit),
            "machine": describe_machine(device),
        }
        watch, timer = Watch(device), DeviceTimer(device)
        plan = Plan(self.args.rounds or 7, sample_ms=8.0, warm_ms=4.0, pause_s=pause_s)

        def expired(text: str) -> None:
            self.keep()
            watch.close()
            end_process(text)

        dog = Watchdog(self.args.step_limit, on_expiry=expired)
        try:
            with dog.running():
                self.copy_gbps = copy_bandwidth(device, timer, Plan(5, 20.0, 10.0, 0.02))
                session = FunctionSession(
                    *(device, timer, plan, assert_accurate, l2_bytes(device), self.copy_gbps),
                    card=watch.between,
                    step=dog.step,
                )
                self._measure(session, end)
        finally:
            watch.close()

    def _measure(self, session: FunctionSession, end: float) -> None:
        from tileloom.bench.timer import affordable_rounds

        for done, case in enumerate(self.cases):
            columns = self.columns(case)
            left = max(end - time.perf_counter(), 1.0)
            rounds = affordable_rounds(session.plan, 2 * len(columns), len(self.cases) - done, left)
            plan = replace(session.plan, rounds=rounds)
            cell = run_function_cell(case, columns, replace(session, plan=plan))
            self.cells.append(cell)
            shown = ", ".join(f"{entry.name} {self.number(cell, entry)}" for entry in cell.entries)
            print(f"{case.name} ({cell.seconds:.1f} s): {shown}", file=sys.stderr, flush=True)
            self.finished = done + 1 == len(self.cases)
            self.keep()

    def show(self, table: Table, lines: Iterable[str], *, width: int) -> None:
        """Print the machine, the table and lines below it."""
        from rich.console import Console

        from tileloom.bench.table import header

        console = Console(width=width)
        top = header(self._head["machine"], self._head["code"], None)
        for line in (*top, f"copy {self.copy_gbps:.0f} GB/s"):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(table)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
