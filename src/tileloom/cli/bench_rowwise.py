"""`tileloom bench rowwise`: the row-wise operators beside PyTorch's own and `torch.compile`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tileloom.bench.case import select
from tileloom.bench.function_run import FunctionCell, FunctionContender, FunctionEntry
from tileloom.bench.rowwise_case import EPS, RowwiseCase, load_rowwise_cases
from tileloom.bench.rowwise_peers import quack, refuse_quack
from tileloom.cli.bench_functions import FunctionJob
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


def run(args: argparse.Namespace, cases_file: Path, device: Callable[[], torch.device]) -> int:
    """Measure the row-wise operators.

    Args:
        args: What the parser of `tileloom bench` gave.
        cases_file: JSON with the cases.
        device: Gives the GPU, once all options are checked.

    Returns:
        0; 1 if ours is wrong or failed somewhere, or the run ended early.

    Raises:
        OptionError: If an argument names something that does not exist.
        DeviceError: If there is no GPU.
    """
    cases = select(load_rowwise_cases(cases_file), args.cases)
    columns = contenders(args.peers)
    job = FunctionJob(
        "rowwise",
        args,
        cases,
        lambda case: columns,
        lambda cell, entry: _number(entry),
        lambda case: {"bytes": case.bytes_moved},
    )
    job.run(device(), budget_s=400.0, pause_s=0.01)
    entries = [(cell, entry) for cell in job.cells for entry in cell.entries]
    why = [f"{cell.case.name}: {e.name}: {e.reason}" for cell, e in entries if e.reason]
    job.show(_table(job.cells), why, width=170)
    bad = [e for _, e in entries if e.name == "tileloom" and e.status != "ok"]
    return 1 if bad or not job.finished else 0
