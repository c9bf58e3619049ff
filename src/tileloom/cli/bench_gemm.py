"""`tileloom bench gemm`: matrix products beside cuBLAS, Inductor, the seed, Triton and QuACK."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom.bench.case import select
from tileloom.bench.function_run import FunctionContender, FunctionEntry
from tileloom.bench.gemm_bars import CUBLAS, OURS, PLAIN, Cell, GemmBar, judge_gemm
from tileloom.bench.gemm_case import GemmCase, load_gemm_cases
from tileloom.bench.gemm_peers import DEFAULT_GEMM_PEERS, GEMM_PEERS, takes_part
from tileloom.cli.bench_functions import FunctionJob
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
    from tileloom.ops.gemm.problem import MatmulProblem
    from tileloom.ops.gemm.rule import choose
    from tileloom.target import target_of

    given = dict(zip(case.extras, inputs[2:]))
    residual = given.get("residual")
    a, b = inputs[0].unsqueeze(0), inputs[1].unsqueeze(0)
    out = a.new_empty((1, case.m, case.n))
    problem = MatmulProblem.of(
        *(a, b, out, given.get("bias")),
        None if residual is None else residual.unsqueeze(0),
        case.activation,
        case.chunks,
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
    if config is None or not config.encode().startswith(text):
        raise OptionError(
            f"bench: --config {text!r} is no config of a matrix product; it must be a text of "
            "config.encode(), of which the end may be missing. Try: --config "
            f"{GluonSm90Config().encode()}."
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


def run(args: argparse.Namespace, cases_file: Path, device: Callable[[], torch.device]) -> int:
    """Measure matrix products.

    Args:
        args: What the parser of `tileloom bench` gave.
        cases_file: JSON with the cases.
        device: Gives the GPU, once all options are checked.

    Returns:
        0; 1 if one of ours is wrong or failed somewhere, the run ended early, or with ``--strict``
        a bar is not met.

    Raises:
        OptionError: If an argument names something that does not exist.
        DeviceError: If there is no GPU.
    """
    cases = select(load_gemm_cases(cases_file), args.cases)
    every = contenders(args.peers, args.config)
    job = FunctionJob(
        "gemm",
        args,
        cases,
        lambda case: _columns(every, case),
        _number,
        lambda case: {"flops": case.flops, "bytes": case.bytes_moved},
        lambda cells: {"bars": [asdict(bar) for bar in judge_gemm(cells)]},
    )
    job.run(device(), budget_s=500.0, pause_s=0.02)
    bars = judge_gemm(job.cells)
    job.show(_table(job.cells), _lines(job.cells, bars), width=190)
    own = {one.name for one in every if one.name not in GEMM_PEERS}
    bad = [e for c in job.cells for e in c.entries if e.name in own and e.status != "ok"]
    missed = args.strict and not all(bar.met for bar in bars)
    return 1 if bad or missed or not job.finished else 0
