"""`tileloom bench rowwise`: the row-wise operators beside PyTorch's own and `torch.compile`."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.bench.function_run import (
    FunctionCell,
    FunctionContender,
    FunctionEntry,
    FunctionSession,
    copy_bandwidth,
    run_function_cell,
)
from tileloom.bench.rowwise_case import EPS, RowwiseCase, load_rowwise_cases
from tileloom.bench.rowwise_peers import quack, refuse_quack
from tileloom.errors import OptionError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

PEERS = ("eager", "compile", "quack")


def _ours(case: RowwiseCase) -> Callable[..., torch.Tensor]:
    import tileloom

    if case.operator in ("rms_norm", "layer_norm"):
        norm = getattr(tileloom, case.operator)
        return lambda *tensors: norm(*tensors, eps=EPS)
    if case.operator == "cross_entropy":
        return lambda logits, labels: tileloom.cross_entropy(logits, labels, reduction="none")
    return getattr(tileloom, case.operator)


def _compiled(case: RowwiseCase) -> Callable[..., torch.Tensor]:
    """Compile PyTorch's own operator for this shape, so that none is a compromise for several."""
    import torch
    import torch._functorch.config

    torch._dynamo.reset()
    # The graph is kept for the next backward, as every contender's is.
    torch._functorch.config.donated_buffer = False
    return torch.compile(case.work.eager, dynamic=False)


_CONTENDERS: dict[str, FunctionContender[RowwiseCase]] = {
    "eager": FunctionContender("eager", lambda case: case.work.eager),
    "compile": FunctionContender("compile", _compiled),
    "quack": FunctionContender("quack", quack, refuse_quack),
    "tileloom": FunctionContender("tileloom", _ours),
}


def contenders(peers: str | None) -> list[FunctionContender[RowwiseCase]]:
    """Return peers, then ours.

    Args:
        peers: A comma list of `PEERS`; None for all.

    Raises:
        OptionError: If a name is not one of them.
    """
    names = list(PEERS) if peers is None else [n for n in peers.split(",") if n not in ("", "none")]
    for name in names:
        if name not in PEERS:
            raise OptionError(
                f"bench: --peers names {name!r}; for rowwise it takes {', '.join(PEERS)}, or none."
            )
    return [_CONTENDERS[name] for name in (*names, "tileloom")]


@dataclass
class _Job:
    args: argparse.Namespace
    machine: dict[str, Any]
    code: dict[str, Any]
    date: str
    cells: list[FunctionCell[RowwiseCase]] = field(
        default_factory=list["FunctionCell[RowwiseCase]"]
    )
    copy_gbps: float = 0.0
    finished: bool = False

    def keep(self) -> None:
        """Write the record, if the caller wants one."""
        from tileloom.bench.store import write

        if self.args.out is None:
            return
        content = {
            "kind": "tileloom-bench-rowwise",
            "schema": 1,
            "date": self.date,
            "finished": self.finished,
            "command": shlex.join(sys.argv[1:]),
            "code": self.code,
            "machine": self.machine,
            "copy_gbps": self.copy_gbps,
            "protocol": "docs/benchmarks.md; call_us: the same calls with no kernel spinning "
            "before them, so that the device waits for the host where the host is slower",
            "cells": [{**asdict(cell), "bytes": cell.case.bytes_moved} for cell in self.cells],
        }
        write(self.args.out, content)


def _number(entry: FunctionEntry) -> str:
    if entry.time_ms is None or entry.of_copy is None or entry.call_us is None:
        return entry.status
    return f"{entry.time_ms.median * 1000:.1f} ({entry.of_copy:.0%}) {entry.call_us.median:.1f}"


def _table(cells: Sequence[FunctionCell[RowwiseCase]]) -> Table:
    from rich.table import Table

    names = [entry.name for entry in cells[0].entries]
    title = "us on the device (share of a copy's bandwidth), us a call with the host"
    table = Table("case", *names, "to compile: device", "call", title=title)
    for cell in cells:
        ours = cell.entries[-1]
        ratios = [r.get("compile") for r in (ours.ratios, ours.call_ratios)]
        shown = [f"{r.value:.3f} ({r.low:.3f}..{r.high:.3f})" if r else "" for r in ratios]
        table.add_row(cell.case.name, *map(_number, cell.entries), *shown)
    return table


def _measure(job: _Job, cases: Sequence[RowwiseCase], session: FunctionSession, end: float) -> None:
    from tileloom.bench.timer import affordable_rounds

    columns = contenders(job.args.peers)
    for done, case in enumerate(cases):
        left = max(end - time.perf_counter(), 1.0)
        rounds = affordable_rounds(session.plan, 2 * len(columns), len(cases) - done, left)
        plan = replace(session.plan, rounds=rounds)
        cell = run_function_cell(case, columns, replace(session, plan=plan))
        job.cells.append(cell)
        shown = ", ".join(f"{entry.name} {_number(entry)}" for entry in cell.entries)
        print(f"{case.name} ({cell.seconds:.1f} s): {shown}", file=sys.stderr, flush=True)
        job.finished = done + 1 == len(cases)
        job.keep()


def run(args: argparse.Namespace, cases_file: Path, device: torch.device) -> int:
    """Measure the row-wise operators.

    Args:
        args: What the parser of `tileloom bench` gave.
        cases_file: JSON with the cases.
        device: The GPU.

    Returns:
        0; 1 if ours is wrong or failed somewhere, or the run ended early.

    Raises:
        OptionError: If an argument names something that does not exist.
    """
    from rich.console import Console

    from tileloom.bench import DeviceTimer, Plan
    from tileloom.bench.machine import Watch, describe_machine, git_state, l2_bytes, now
    from tileloom.bench.table import header
    from tileloom.bench.watchdog import Watchdog, end_process
    from tileloom.testing import assert_accurate

    patterns = ["*"] if args.cases == "all" else args.cases.split(",")
    cases = [
        case
        for case in load_rowwise_cases(cases_file)
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
    if not cases or args.config or args.baseline or args.strict:
        raise OptionError(
            "bench: rowwise takes --cases (none matches now, if it was given), --peers, --rounds, "
            "--budget, --step-limit, --commit and --out; --config, --baseline, --bars and --strict "
            "are for attention."
        )
    end = time.perf_counter() + (args.budget or 400.0)
    job = _Job(args, describe_machine(device), git_state(args.commit), now())
    watch, timer = Watch(device), DeviceTimer(device)
    plan = Plan(args.rounds or 7, sample_ms=8.0, warm_ms=4.0, pause_s=0.01)

    def expired(text: str) -> None:
        watch.close()
        end_process(text)

    dog = Watchdog(args.step_limit, on_expiry=expired)
    try:
        with dog.running():
            job.copy_gbps = copy_bandwidth(device, timer, Plan(5, 20.0, 10.0, 0.02))
            session = FunctionSession(
                *(device, timer, plan, assert_accurate, l2_bytes(device), job.copy_gbps),
                card=watch.between,
                step=dog.step,
            )
            _measure(job, cases, session, end)
    finally:
        watch.close()
    console = Console(width=170)
    for line in (*header(job.machine, job.code, None), f"copy {job.copy_gbps:.0f} GB/s"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(job.cells))
    bad = [e for cell in job.cells for e in cell.entries if e.status != "ok"]
    for cell in job.cells:
        for entry in cell.entries:
            if entry.reason:
                console.print(f"{cell.case.name}: {entry.name}: {entry.reason}", markup=False)
    return 1 if any(e.name == "tileloom" for e in bad) or not job.finished else 0
