"""The demo's part on the emulator: the Hopper kernel on a model's own Q, K, V, whole and damaged.

The damaged kernel comes from a copy of the kernel's file in a temporary folder, and stands in the
place of the whole one for the time of a run; the package's own file is never touched.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tileloom.ops._op import has_triton, record_choices
from tileloom.ops.attention import masks
from tileloom.ops.attention.api import attention
from tileloom.ops.attention.config import choose
from tileloom.ops.attention.reference import attention_reference
from tileloom.report.findings import Played, PlayedRow, Span, Track
from tileloom.target import H100
from tileloom.testing import AccuracyError, CaseError, assert_accurate

if TYPE_CHECKING:
    from tileloom.emulator import Run

KERNEL = "tileloom.ops.attention.kernel_gluon_sm90_fwd"
LAUNCHED = "attention_fwd_kernel"
REMOVED = "mbarrier.wait(ring_full[0].index(slot // 2), phase)"  # for K of the first block
TIMELINE = "timeline.json"
DTYPE = torch.float16
SHOWN_STEPS = 140
# Few multiprocessors: each program computes several tiles, and the buffers go round.
SMS = 4

_KINDS = {"TMA load": "load", "TMA store": "store", "wgmma": "wgmma"}


def play(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, folder: Path
) -> Played:
    """Play the Hopper attention kernel on the CPU, then once more without one of its waits.

    Args:
        q: Queries of a model, `[B, Hq, L, D]`, on the CPU; cast to float16 here, as k and v are.
        k: Keys, `[B, Hkv, L, D]`.
        v: Values, `[B, Hkv, L, D]`.
        lengths: Tokens of each text, `[B]`; the keys behind them are hidden.
        folder: Where to write the timeline of the first run, ``timeline.json``.

    Returns:
        What came of it; `why_not` says why if the kernel does not take the problem.
    """
    texts, heads, length, width = q.shape
    problem = (
        f"{texts} texts, {heads} heads of {width}, {length} tokens of which {int(lengths.min())} "
        f"to {int(lengths.max())} are text, cast to float16"
    )
    if not has_triton():
        return Played(problem, "Triton is not installed; it compiles the kernel.")
    player = _Player(problem, (q, k, v), lengths, folder)
    why_not = player.why_not()
    return Played(problem, why_not) if why_not else player.play()


class _Player:
    """Runs the kernel on one problem and judges what comes out."""

    def __init__(
        self, problem: str, given: Sequence[torch.Tensor], lengths: torch.Tensor, folder: Path
    ) -> None:
        self.problem = problem
        self.given = [x.detach().to("cpu", DTYPE) for x in given]
        self.mask = masks.key_lengths(lengths.to("cpu", torch.int32))
        self.folder = folder
        self.exact = self._formula(torch.float64)
        self.plain = self._formula(DTYPE)

    def _formula(self, dtype: torch.dtype) -> torch.Tensor:
        out = attention_reference(*self.given, mask=self.mask, compute_dtype=dtype)
        assert isinstance(out, torch.Tensor), "the log-sum-exp was not asked for"
        return out

    def why_not(self) -> str:
        """Say why the Hopper kernel would not take the problem; empty if it would."""
        with record_choices() as choices:
            self._attention()  # on the CPU, with no emulator: by the reference
        reasons = choose(choices[0].problem, H100).refused.get("gluon_sm90", ())
        return f"The Hopper kernel does not take it: {'; '.join(reasons)}." if reasons else ""

    def play(self) -> Played:
        shipped, run = self._run("as shipped", "late", timeline=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / TIMELINE
        run.timeline(trace)
        with _without_a_wait() as removed:
            # The lucky run first: what a GPU would most often do.
            lucky, run_lucky = self._run("one wait removed", "eager", changed=True)
            unlucky, _ = self._run("one wait removed", "late", changed=True)
            report = run_lucky.errors[0].text() if run_lucky.errors else ""
        launch = run.launches[0]
        return Played(
            problem=self.problem,
            plain_error=_most(self.plain - self.exact),
            rows=(shipped, lucky, unlucky),
            programs=launch.grid[0],
            accesses=launch.shared_accesses + launch.global_accesses,
            removed=removed,
            report=report,
            timeline=TIMELINE,
            tracks=tracks_of(json.loads(trace.read_text(encoding="utf-8")), SHOWN_STEPS),
        )

    def _run(
        self, kernel: str, schedule: str, *, timeline: bool = False, changed: bool = False
    ) -> tuple[PlayedRow, Run]:
        from tileloom import emulator

        with emulator.run(schedule=schedule, collect=True, timeline=timeline, sms=SMS) as run:
            out = self._attention()
        rule = ""
        try:
            assert_accurate(out, self.exact, self.plain, name="attention")
        except (AccuracyError, CaseError) as error:
            rule = " ".join(str(error).split())
        error = _most(out - self.exact)
        row = PlayedRow(kernel, schedule, error, rule, len(run.errors), changed)
        return row, run

    def _attention(self) -> torch.Tensor:
        out = attention(*self.given, mask=self.mask)
        assert isinstance(out, torch.Tensor), "the log-sum-exp was not asked for"
        return out


def _most(difference: torch.Tensor) -> float:
    return float(difference.double().abs().max())


@contextlib.contextmanager
def _without_a_wait() -> Generator[str]:
    """Put a kernel that lacks one wait in the place of the whole one; say what was removed."""
    from tileloom.emulator.mutate import mutants

    module = importlib.import_module(KERNEL)
    path = Path(str(module.__file__))
    mutant = next(
        m
        for m in mutants(path.read_text(encoding="utf-8"))
        if m.source == REMOVED and m.text.splitlines()[m.line - 1].strip() == "pass"
    )
    with tempfile.TemporaryDirectory(prefix="tileloom-demo-") as folder:
        copy = Path(folder) / path.name
        copy.write_text(mutant.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(KERNEL, copy)
        assert spec is not None, "a Python file has a loader"
        assert spec.loader is not None, "a Python file has a loader"
        damaged = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(damaged)
        whole = getattr(module, LAUNCHED)
        # Whoever launches the kernel has imported it by name.
        holders = [
            holder
            for name, holder in list(sys.modules.items())
            if name.startswith("tileloom.") and vars(holder).get(LAUNCHED) is whole
        ]
        try:
            for holder in holders:
                setattr(holder, LAUNCHED, getattr(damaged, LAUNCHED))
            yield f"{path.name}:{mutant.line}  {mutant.source}"
        finally:
            for holder in holders:
                setattr(holder, LAUNCHED, whole)


def tracks_of(trace: dict[str, Any], steps: int) -> tuple[Track, ...]:
    """Take the beginning of one program out of a Chrome trace that the emulator wrote.

    Args:
        trace: The trace.
        steps: Where to end.

    Returns:
        A track for each partition, then what is in flight: copies, and matrix multiplications.
    """
    events = [e for e in trace["traceEvents"] if e["pid"] == 1]
    named = {
        e["tid"]: str(e["args"]["name"]).lstrip("_") for e in events if e["name"] == "thread_name"
    }
    found: dict[str, list[Span]] = {name: [] for _, name in sorted(named.items())}
    begun: dict[int, dict[str, Any]] = {}
    copies, products = "copies in flight", "wgmma in flight"
    found |= {copies: [], products: []}
    for event in events:
        if event["ph"] == "b":
            begun[event["id"]] = event
            continue
        if event["ph"] not in "Xe":
            continue
        first = begun.pop(event["id"]) if event["ph"] == "e" else event
        start, end = first["ts"], min(event["ts"] + event.get("dur", 0), steps)
        if start >= end:
            continue
        place = Path(first["args"]["line"]).name
        text = f"{first['name']}, steps {start} to {end}" + (f", {place}" if place else "")
        if event["ph"] == "X":
            kind = "run" if event["name"] == "run" else "wait"
            found[named[event["tid"]]].append(Span(start, end, kind, text))
            continue
        kind = next((kind for name, kind in _KINDS.items() if first["name"].startswith(name)), "")
        if kind:
            found[products if kind == "wgmma" else copies].append(Span(start, end, kind, text))
    return tuple(Track(name, tuple(spans)) for name, spans in found.items())
