"""`tileloom bench gemm`: matrix products beside cuBLAS, Inductor, the seed's operator and QuACK."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.bench.function_run import (
    FunctionContender,
    FunctionEntry,
    FunctionSession,
    copy_bandwidth,
    run_function_cell,
)
from tileloom.bench.gemm_bars import CUBLAS, OURS, PLAIN, Cell, GemmBar, judge_gemm
from tileloom.bench.gemm_case import GemmCase, load_gemm_cases
from tileloom.bench.gemm_peers import DEFAULT_GEMM_PEERS, GEMM_PEERS, takes_part
from tileloom.errors import OptionError, TileloomError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from tileloom.ops.gemm.config import MatmulConfig

Contender = FunctionContender[GemmCase]
Function = Callable[..., "torch.Tensor"]


def _ours(name: str, config: MatmulConfig | None) -> Contender:
    """Make a contender of `tileloom.matmul`, or of `async_input_matmul` where there are chunks."""

    def make(case: GemmCase) -> Function:
        import tileloom

        names, activation = case.extras, case.activation or None
        if not case.is_fused and not case.chunks and config is None:
            return tileloom.matmul  # as short as torch.mm
        product: Any = tileloom.async_input_matmul if case.chunks else tileloom.matmul

        def call(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return product(a, b, **dict(zip(names, rest)), activation=activation, config=config)

        return call

    def describe(case: GemmCase, inputs: tuple[torch.Tensor, ...]) -> Mapping[str, Any]:
        try:
            choice = _choice(case, inputs, config)
        except TileloomError as error:
            return {"refused": str(error)}
        return {
            "backend": choice.backend,
            "config": choice.config.encode(),
            "source": choice.source,
            "refused": {backend: list(why) for backend, why in choice.refused.items()},
        }

    return FunctionContender(name, make, describe=describe)


def _choice(case: GemmCase, inputs: tuple[torch.Tensor, ...], config: MatmulConfig | None) -> Any:
    """Ask the operator's dispatch what it takes for a case."""
    from tileloom.ops.gemm.async_input import choose_async
    from tileloom.ops.gemm.config import choose
    from tileloom.ops.gemm.problem import MatmulProblem
    from tileloom.target import target_of

    given = dict(zip(case.extras, inputs[2:]))
    residual = given.get("residual")
    a, b = inputs[0].unsqueeze(0), inputs[1].unsqueeze(0)
    out = a.new_empty((1, case.m, case.n))
    problem = MatmulProblem.of(
        *(a, b, out, given.get("bias")),
        None if residual is None else residual.unsqueeze(0),
        case.activation,
        max(1, case.chunks),
    )
    if case.chunks:
        return choose_async(problem, target_of(a), "" if config is None else config.encode())
    return choose(problem, target_of(a), config)


def _product_alone() -> Contender:
    """Our own product of the same operands with nothing behind it: what a case's extras cost."""

    def make(case: GemmCase) -> Function:
        import tileloom

        return lambda a, b, *rest: tileloom.matmul(a, b)

    def formula(case: GemmCase) -> Function:
        plain = replace(case, bias=False, activation="", residual=False, chunks=0)
        return lambda a, b, *rest: plain.formula(a, b)

    return FunctionContender(PLAIN, make, formula=formula)


def _read_config(text: str) -> MatmulConfig:
    from tileloom.ops.gemm.config import GluonSm90Config, decode

    try:
        config = decode(text)
    except (ValueError, TypeError):
        config = None
    if config is None or config.encode() != text:
        raise OptionError(
            f"bench: --config {text!r} is no config of a matrix product; it must be a text of "
            f"config.encode(). Try: --config {GluonSm90Config().encode()}."
        )
    return config


def contenders(peers: str | None, configs: Sequence[str]) -> list[Contender]:
    """Return peers, then ours, then the explicit configs.

    Args:
        peers: A comma list of `GEMM_PEERS`; None for `DEFAULT_GEMM_PEERS`.
        configs: Texts of `config.encode()`.

    Raises:
        OptionError: If a name is not one of them, or a text is no config.
    """
    names = list(DEFAULT_GEMM_PEERS)
    if peers is not None:
        names = [name.strip() for name in peers.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in GEMM_PEERS:
            raise OptionError(
                f"bench: --peers names {name!r}; for gemm it takes {', '.join(GEMM_PEERS)}, or "
                "none."
            )
    explicit = [_ours(text, _read_config(text)) for text in dict.fromkeys(configs)]
    chosen = [GEMM_PEERS[name] for name in dict.fromkeys(names)]
    return [*chosen, _product_alone(), _ours(OURS, None), *explicit]


def _columns(every: Sequence[Contender], case: GemmCase) -> list[Contender]:
    """Those that could have something to do with a case."""
    chosen: list[Contender] = []
    for one in every:
        if one.name in GEMM_PEERS:
            is_in = takes_part(one.name, case)
        else:
            is_in = one.name != PLAIN or case.is_fused or case.chunks > 0
        chosen += [one] if is_in else []
    return chosen


@dataclass
class _Job:
    args: argparse.Namespace
    machine: dict[str, Any]
    code: dict[str, Any]
    date: str
    cells: list[Cell] = field(default_factory=list[Cell])
    copy_gbps: float = 0.0
    finished: bool = False

    def keep(self) -> None:
        """Write the record, if the caller wants one."""
        from tileloom.bench.store import write

        if self.args.out is None:
            return
        cells = [
            {**asdict(cell), "flops": cell.case.flops, "bytes": cell.case.bytes_moved}
            for cell in self.cells
        ]
        content = {
            "kind": "tileloom-bench-gemm",
            "schema": 1,
            "date": self.date,
            "finished": self.finished,
            "command": shlex.join(sys.argv[1:]),
            "code": self.code,
            "machine": self.machine,
            "copy_gbps": self.copy_gbps,
            "protocol": "docs/benchmarks.md; call_us: the same calls with no kernel spinning "
            "before them, so that the device waits for the host where the host is slower",
            "cells": cells,
            "bars": [asdict(bar) for bar in judge_gemm(self.cells)],
        }
        write(self.args.out, content)


def _number(cell: Cell, entry: FunctionEntry | None) -> str:
    if entry is None:
        return ""
    if entry.time_ms is None or entry.call_us is None:
        return entry.status
    us = entry.time_ms.median * 1000
    return f"{us:.1f} ({cell.case.flops / us / 1e6:.0f}) {entry.call_us.median:.1f}"


def _table(cells: Sequence[Cell]) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys(entry.name for cell in cells for entry in cell.entries))
    title = "us on the device (TFLOP/s), us a call with the host"
    table = Table("case", *names, f"to {CUBLAS}: device", "call", title=title)
    for cell in cells:
        own = cell.entry(OURS)
        ratios = [None, None]
        if own is not None:
            ratios = [r.get(CUBLAS) for r in (own.ratios, own.call_ratios)]
        shown = [f"{r.value:.3f} ({r.low:.3f}..{r.high:.3f})" if r else "" for r in ratios]
        numbers = [_number(cell, cell.entry(name)) for name in names]
        table.add_row(cell.case.name, *numbers, *shown)
    return table


def _lines(cells: Sequence[Cell], bars: Sequence[GemmBar]) -> list[str]:
    """Reasons of those without a number, configs that ran, and the bars that are not met."""
    lines: dict[str, None] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.reason:
                lines[f"{cell.case.name}: {entry.name} {entry.status}: {entry.reason}"] = None
            elif "config" in entry.about and entry.about["config"] != entry.name:
                about = entry.about
                lines[f"{cell.case.name}: {about['config']} by {about['source']}"] = None
    words = {True: "met", False: "MISSED", None: "not known"}
    told = [f"  {words[b.met]}: {b.case}, {b.asked}: {b.found}" for b in bars if b.met is not True]
    met = sum(bar.met is True for bar in bars)
    return [*lines, f"bars: {met} of {len(bars)} met", *told]


def _measure(job: _Job, cases: Sequence[GemmCase], session: FunctionSession, end: float) -> None:
    from tileloom.bench.timer import affordable_rounds

    every = contenders(job.args.peers, job.args.config)
    for done, case in enumerate(cases):
        columns = _columns(every, case)
        left = max(end - time.perf_counter(), 1.0)
        rounds = affordable_rounds(session.plan, 2 * len(columns), len(cases) - done, left)
        plan = replace(session.plan, rounds=rounds)
        cell = run_function_cell(case, columns, replace(session, plan=plan))
        job.cells.append(cell)
        shown = ", ".join(f"{entry.name} {_number(cell, entry)}" for entry in cell.entries)
        print(f"{case.name} ({cell.seconds:.1f} s): {shown}", file=sys.stderr, flush=True)
        job.finished = done + 1 == len(cases)
        job.keep()


def _selected(args: argparse.Namespace, cases_file: Path) -> list[GemmCase]:
    patterns = ["*"] if args.cases == "all" else args.cases.split(",")
    cases = [
        case
        for case in load_gemm_cases(cases_file)
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
    if not cases or args.baseline or args.bars:
        raise OptionError(
            "bench: gemm takes --cases (none matches now, if it was given), --peers, --config, "
            "--rounds, --budget, --step-limit, --strict, --commit and --out; --baseline and --bars "
            "are for attention."
        )
    return cases


def run(args: argparse.Namespace, cases_file: Path, device: torch.device) -> int:
    """Measure matrix products.

    Args:
        args: What the parser of `tileloom bench` gave.
        cases_file: JSON with the cases.
        device: The GPU.

    Returns:
        0; 1 if one of ours is wrong or failed somewhere, the run ended early, or with ``--strict``
        a bar is not met.

    Raises:
        OptionError: If an argument names something that does not exist.
    """
    from rich.console import Console

    from tileloom.bench import DeviceTimer, Plan
    from tileloom.bench.machine import Watch, describe_machine, git_state, l2_bytes, now
    from tileloom.bench.table import header
    from tileloom.bench.watchdog import Watchdog, end_process
    from tileloom.testing import assert_accurate

    cases = _selected(args, cases_file)
    every = contenders(args.peers, args.config)
    end = time.perf_counter() + (args.budget or 500.0)
    job = _Job(args, describe_machine(device), git_state(args.commit), now())
    watch, timer = Watch(device), DeviceTimer(device)
    plan = Plan(args.rounds or 7, sample_ms=8.0, warm_ms=4.0, pause_s=0.02)

    def expired(text: str) -> None:
        job.keep()
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
    console = Console(width=190)
    for line in (*header(job.machine, job.code, None), f"copy {job.copy_gbps:.0f} GB/s"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(job.cells))
    bars = judge_gemm(job.cells)
    for line in _lines(job.cells, bars):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    own = {one.name for one in every if one.name not in GEMM_PEERS}
    bad = [e for c in job.cells for e in c.entries if e.name in own and e.status != "ok"]
    missed = args.strict and not all(bar.met for bar in bars)
    return 1 if bad or missed or not job.finished else 0
