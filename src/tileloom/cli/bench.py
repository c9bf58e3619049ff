"""`tileloom bench`: measure an operator beside its peers, as `docs/benchmarks.md` describes.

Also runs by itself: `python3 -m tileloom.cli.bench attention ...`.
"""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.cli.bench_ours import DROPOUT_SEED, OURS, kept_by_dropout, ours, read_config
from tileloom.errors import DeviceError, OptionError

if TYPE_CHECKING:
    import torch

    from tileloom.bench import Bar, BarResult, CellResult, Contender, Plan, Session
    from tileloom.bench.case import AttentionCase
    from tileloom.bench.ceilings import Ceilings
    from tileloom.bench.machine import Watch
    from tileloom.bench.watchdog import Watchdog

_NO_GPU = (
    "bench: this machine has no GPU that PyTorch can use (torch.cuda.is_available() is False); "
    "times of a CPU say nothing about the kernels. Try: a machine with an NVIDIA GPU, or "
    "`tileloom inspect`, which compiles every kernel without one."
)


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the command line.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "bench",
        help="measure an operator beside its peers",
        description="Measure an operator beside its peers: every result is checked first, all "
        "contenders run interleaved in one process, and ratios come with their intervals.",
    )
    _add_arguments(parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operators, each with the options that it takes."""
    operators = parser.add_subparsers(dest="operator", metavar="OPERATOR", required=True)
    texts = {
        "attention": "attention beside cuDNN, PyTorch's kernels, FlashAttention-4",
        "gemm": "matrix products beside cuBLAS, torch.compile, the seed, Triton, QuACK",
        "rowwise": "row-wise operators beside PyTorch's own, torch.compile, QuACK",
    }
    made = {
        name: operators.add_parser(name, help=text, description=f"Measure {text}.")
        for name, text in texts.items()
    }
    for name, of_one in made.items():
        _add_common(of_one, name)
    # fmt: off
    for name in ("attention", "gemm"):
        add = made[name].add_argument
        add("--config", action="append", default=[],
            metavar="[CASES@]TEXT" if name == "attention" else "TEXT",
            help="one more contender: an explicit config, as config.encode() and the record of a "
            "run write it; may be repeated"
            + ("; after d64-*@ in the cases of that name only" if name == "attention" else ""))
        add("--strict", action="store_true", help="exit 1 unless every bar is met")
    add = made["attention"].add_argument
    add("--baseline", metavar="NAME",
        help="whom all others are compared with; default: cudnn, else the first contender")
    add("--backward", action="store_true", help="measure the backward instead")
    add("--features", action="store_true",
        help="measure biases, dropout, windows and grouped heads beside the plain kernel; cases of "
        "benchmarks/attention_features.json, peers cudnn and efficient")
    add("--quick", action="store_true", help="fewer peers, shorter samples: 90 s in all")
    add("--bars", metavar="FILE",
        help="JSON with what must be reached, or none; default: benchmarks/attention_bars.json")
    # fmt: on


_EXAMPLES = {"attention": "d128-*", "gemm": "square-*", "rowwise": "softmax-*"}
_PEERS = {
    "attention": "cudnn, flash, efficient, fa4, flex, or none; default: all but flex, which "
    "compiles; with --quick cudnn and efficient",
    "gemm": "torch, compile, seed, triton, quack, and not by default compile-max, quack-tuned; or "
    "none",
    "rowwise": "eager, compile, quack, or none; default: all",
}
_ROUNDS = {"attention": "9, quick 5", "gemm": "7", "rowwise": "7"}
_BUDGETS = {"attention": "230, quick 80", "gemm": "500", "rowwise": "400"}


def _add_common(parser: argparse.ArgumentParser, operator: str) -> None:
    """Add what every operator takes."""
    add = parser.add_argument
    # fmt: off
    add("--cases", default="all", metavar="NAMES",
        help=f"comma list of cases, * and ? allowed, such as {_EXAMPLES[operator]}; default: all")
    add("--cases-file", type=Path, metavar="FILE",
        help=f"JSON with the cases; default: benchmarks/{operator}_cases.json")
    add("--peers", metavar="NAMES", help=f"comma list of {_PEERS[operator]}")
    add("--rounds", type=int, metavar="N",
        help=f"samples of each contender; default {_ROUNDS[operator]}")
    add("--budget", type=float, metavar="SECONDS",
        help="take fewer rounds (never under 5) where the whole run would take longer; default "
        f"{_BUDGETS[operator]}")
    add("--step-limit", type=float, default=90.0, metavar="SECONDS",
        help="end the process when one step takes longer, as a hanging kernel does; default 90")
    add("--commit", metavar="SHA", help="the commit measured, where git is not there to say")
    add("--out", type=Path, metavar="FILE", help="write the record here, after every case")
    # fmt: on


@dataclass
class _Run:
    """Everything that one run has decided and found so far."""

    args: argparse.Namespace
    cases: Sequence[AttentionCase]
    contenders: Sequence[tuple[Contender, str]]
    bars: Sequence[Bar]
    baseline: str
    plan: Plan
    machine: dict[str, Any]
    code: dict[str, Any]
    date: str
    ceilings: Ceilings | None = None
    cells: list[CellResult] = field(default_factory=list["CellResult"])
    notes: list[str] = field(default_factory=list[str])
    finished: bool = False

    def judged(self) -> list[BarResult]:
        """Hold the bars against what is there."""
        from tileloom.bench import judge_bars

        return judge_bars(self.bars, self.cells)

    @property
    def operator(self) -> str:
        """What the record says is measured."""
        what = "attention_features_" if self.args.features else "attention_"
        return what + ("bwd" if self.args.backward else "fwd")

    def keep(self) -> None:
        """Write the record, if the caller wants one."""
        from tileloom.bench import document, save

        if self.args.out is None:
            return
        save(
            self.args.out,
            document(
                operator=self.operator,
                date=self.date,
                code=self.code,
                machine=self.machine,
                plan=self.plan,
                baseline=self.baseline,
                cells=self.cells,
                bars=self.judged(),
                ceilings=self.ceilings,
                finished=self.finished,
                command=shlex.join(sys.argv[1:]),
                notes=self.notes,
            ),
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shipped(name: str) -> Path:
    """Find a file of the repository's folder `benchmarks`."""
    folders = (Path(__file__).resolve().parents[3] / "benchmarks", Path.cwd() / "benchmarks")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise OptionError(
        f"bench: {name} is neither in {folders[0]} nor in {folders[1]}; it comes with the "
        "repository, not with the installed package. Try: run from a clone, or name a file by "
        "--cases-file and --bars."
    )


def _contenders(args: argparse.Namespace) -> list[tuple[Contender, str]]:
    """Peers, then ours, then the explicit configs; each with the pattern of its cases."""
    from tileloom.bench import attention_peers
    from tileloom.bench.peers import DEFAULT_PEERS, QUICK_PEERS

    names = QUICK_PEERS if args.quick or args.features else DEFAULT_PEERS
    if args.peers is not None:
        names = [n.strip() for n in args.peers.split(",") if n.strip() not in ("", "none")]
    chosen = [(peer, "*") for peer in attention_peers(names)]
    chosen.append((ours(OURS, None), "*"))
    by_text: dict[str, list[str]] = {}
    for text in args.config:
        config, cases = read_config(text)
        by_text.setdefault(config.encode(), []).append(cases)
    for text, patterns in by_text.items():
        chosen.append((ours(text, read_config(text)[0]), ",".join(patterns)))
    return chosen


def _baseline(args: argparse.Namespace, contenders: Sequence[tuple[Contender, str]]) -> str:
    names = [contender.name for contender, _ in contenders]
    if args.baseline is None:
        return "cudnn" if "cudnn" in names else names[0]
    if args.baseline not in names:
        raise OptionError(
            f"bench: --baseline is {args.baseline!r}; it must be one of the contenders: "
            f"{', '.join(names)}."
        )
    return args.baseline


def _plan(args: argparse.Namespace) -> Plan:
    from tileloom.bench import Plan

    if args.quick:
        return Plan(args.rounds or 5, sample_ms=15.0, warm_ms=8.0, pause_s=0.015)
    return Plan(args.rounds or 9)


def _bars(args: argparse.Namespace) -> Sequence[Bar]:
    from tileloom.bench import load_bars

    if args.bars == "none" or ((args.backward or args.features) and args.bars is None):
        return ()
    return load_bars(_shipped("attention_bars.json") if args.bars is None else Path(args.bars))


def _directed(cases: Sequence[AttentionCase], backward: bool) -> Sequence[AttentionCase]:
    if not backward:
        return cases
    return [replace(c, name=f"{c.name}-backward", direction="backward") for c in cases]


def _check_common(args: argparse.Namespace) -> None:
    """Refuse numbers that no operator's run can have."""
    for name, least in (("rounds", 1), ("budget", 0.0), ("step_limit", 0.0)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            option = name.replace("_", "-")
            raise OptionError(
                f"bench: --{option} is {value}; it must be at least {least:g}. Try: without "
                f"--{option}."
            )


def _set_up(args: argparse.Namespace) -> tuple[_Run, torch.device]:
    """Check every option, then ask for the GPU."""
    from tileloom.bench import load_cases, select
    from tileloom.bench.machine import describe_machine, git_state, now

    shipped = "attention_features.json" if args.features else "attention_cases.json"
    path = args.cases_file or _shipped(shipped)
    contenders = _contenders(args)
    checked = (
        _directed(select(load_cases(path), args.cases), args.backward),
        contenders,
        _bars(args),
        _baseline(args, contenders),
        _plan(args),
    )
    device = _device()
    run = _Run(args, *checked, describe_machine(device), git_state(args.commit), now())
    return run, device


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def _session(job: _Run, device: torch.device, watch: Watch, dog: Watchdog) -> Session:
    from tileloom.bench import DeviceTimer, Session
    from tileloom.testing import assert_accurate

    peers = [contender.name for contender, _ in job.contenders if contender.side == "peer"]
    return Session(
        device,
        DeviceTimer(device),
        job.plan,
        judge=assert_accurate,
        l2_bytes=job.machine["l2_bytes"],
        baseline=job.baseline,
        compare=(*peers, OURS),
        card=watch.between,
        step=dog.step,
        kept=kept_by_dropout,
        seed=lambda: _seed(DROPOUT_SEED),
    )


def _line_of(cell: CellResult) -> str:
    numbers = [
        f"{entry.name} {entry.status if entry.tflops is None else f'{entry.tflops:.0f}'}"
        for entry in cell.entries
    ]
    return f"{cell.case.name} ({cell.rounds} rounds, {cell.seconds:.1f} s): {', '.join(numbers)}"


def _measure(job: _Run, session: Session, started: float) -> None:
    """Run every cell; keeps the record up to date."""
    from tileloom.bench import Plan, affordable_rounds, run_cell
    from tileloom.bench.bound import bound_notes
    from tileloom.bench.ceilings import measure_ceilings
    from tileloom.bench.function_run import copy_bandwidth

    session.step("ceilings: matmul and launch")
    short = Plan(5, sample_ms=10.0, warm_ms=10.0, pause_s=0.02)
    job.ceilings = measure_ceilings(session.device, session.timer, short)
    session = replace(session, matmul_tflops=job.ceilings.matmul_tflops)
    copy = copy_bandwidth(session.device, session.timer, short) if job.args.features else None
    budget = job.args.budget or (80.0 if job.args.quick else 230.0)
    for done, case in enumerate(job.cases):
        contenders = [
            contender
            for contender, patterns in job.contenders
            if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns.split(","))
        ]
        left = budget - (time.perf_counter() - started)
        rounds = affordable_rounds(job.plan, len(contenders), len(job.cases) - done, left)
        plan = replace(job.plan, rounds=rounds)
        cell = run_cell(case, contenders, replace(session, plan=plan))
        job.cells.append(cell)
        _say(_line_of(cell))
        job.finished = done + 1 == len(job.cases)
        if job.finished and copy is not None:
            job.notes += bound_notes(job.cells, OURS, copy, job.machine["sms"])
        job.keep()


def _report(job: _Run) -> int:
    """Print the tables; the exit status."""
    from rich.console import Console

    from tileloom.bench.table import header, show

    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=170)
    for line in header(job.machine, job.code, job.ceilings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    judged = job.judged()
    show(console, job.cells, job.baseline, judged)
    for note in job.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    kept = f"record: {job.args.out}" if job.args.out else "no record is kept; --out FILE keeps one"
    console.print(kept, markup=False, highlight=False, soft_wrap=True)
    bad = [
        entry
        for cell in job.cells
        for entry in cell.entries
        if entry.side == "ours" and entry.status in ("wrong", "failed")
    ]
    missed = job.args.strict and not all(one.met for one in judged)
    return 1 if bad or missed or not job.finished else 0


def _device() -> torch.device:
    """The current GPU.

    Raises:
        DeviceError: If there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(_NO_GPU)
    return torch.device(torch.cuda.current_device())


def _run(args: argparse.Namespace, started: float) -> int:
    import torch

    from tileloom.bench.machine import Watch
    from tileloom.bench.stats import FEWEST_ROUNDS
    from tileloom.bench.watchdog import Watchdog, end_process

    job, device = _set_up(args)
    watch = Watch(device)
    if watch.reason is not None:
        job.notes.append(f"clock and power are not known: {watch.reason}")
    if job.plan.rounds < FEWEST_ROUNDS:
        job.notes.append(
            f"{job.plan.rounds} rounds are too few to call anything faster; {FEWEST_ROUNDS} are "
            "needed"
        )

    def expired(text: str) -> None:
        job.notes.append(text)
        job.keep()
        watch.close()
        _report(job)
        end_process(text)

    dog = Watchdog(args.step_limit, on_expiry=expired)
    try:
        with dog.running(), torch.no_grad():
            _measure(job, _session(job, device, watch, dog), started)
    except (RuntimeError, ValueError) as error:
        job.notes.append(
            f"the run ended early, after {len(job.cells)} of {len(job.cases)} cases, in the step "
            f"{dog.what!r}: {type(error).__name__}: {error}"
        )
        job.keep()
    finally:
        watch.close()
    return _report(job)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser gave.

    Returns:
        0; 1 if one of our kernels is wrong or failed, if the run ended early, or with ``--strict``
        if a bar is missed.

    Raises:
        OptionError: If an argument names something that does not exist.
        DeviceError: If there is no GPU.
    """
    started = time.perf_counter()
    _check_common(args)
    if args.operator == "gemm":
        from tileloom.cli.bench_gemm import run as run_gemm

        return run_gemm(args, args.cases_file or _shipped("gemm_cases.json"), _device)
    if args.operator == "rowwise":
        from tileloom.cli.bench_rowwise import run as run_rowwise

        return run_rowwise(args, args.cases_file or _shipped("rowwise_cases.json"), _device)
    return _run(args, started)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command by itself.

    Args:
        argv: Arguments without the program's name; default: the process's.

    Returns:
        The exit status, as of `tileloom bench`.
    """
    from tileloom.cli.main import main as tileloom_main

    return tileloom_main(["bench", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
