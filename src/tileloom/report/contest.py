"""tileloom timed beside PyTorch's own attention: one call of a model's layer, and whole passes.

Nobody is timed before its result has passed the accuracy rule. All contenders run interleaved in
one process, by the machinery of `tileloom.bench`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileloom.bench.stats import ratio_of, summarise
from tileloom.bench.timer import Plan, Runner, Timed, Timer, interleave
from tileloom.ops._op import record_choices
from tileloom.ops.attention import masks
from tileloom.ops.attention.api import attention
from tileloom.ops.attention.reference import attention_reference
from tileloom.report.findings import Contest, TimeRow
from tileloom.testing import AccuracyError, CaseError, assert_accurate

OURS = "tileloom"
SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PLAN = Plan(rounds=7, sample_ms=10.0, warm_ms=5.0, pause_s=0.02, least_calls=4)


@dataclass(frozen=True)
class Entrant:
    """A contender: its name, what it runs, and the context in which it runs."""

    name: str
    call: Callable[[], torch.Tensor]
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"


def run_contest(
    title: str,
    entrants: Sequence[Entrant],
    truth: torch.Tensor,
    baseline: torch.Tensor,
    timer: Timer,
    plan: Plan = PLAN,
) -> Contest:
    """Judge the contenders' results, then time those that are right.

    Args:
        title: What is computed.
        entrants: The contenders; ours are those whose name starts with ``"tileloom"``, and the
            first of them is the one that others are compared with.
        truth: The result in float64.
        baseline: The plain formula's result in the contenders' dtype.
        timer: Takes the time.
        plan: Rounds, lengths and pauses.

    Returns:
        One row for each contender, in order; one that refuses or is wrong has no time.
    """
    notes: dict[str, tuple[str, str]] = {}
    runners: list[Runner] = []
    for entrant in entrants:
        status, note = _judge(entrant, truth, baseline)
        notes[entrant.name] = (status, note)
        if status == "ok":
            call = entrant.call
            runners.append(Runner(entrant.name, lambda i, call=call: call(), scope=entrant.scope))
    timed = interleave(runners, plan, timer)
    ours = next((r.name for r in runners if r.name.startswith(OURS)), None)
    rows = [_row(name, notes[name], timed, ours) for name in notes]
    return Contest(title, tuple(rows))


def _judge(entrant: Entrant, truth: torch.Tensor, baseline: torch.Tensor) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as told, record_choices() as choices:
        warnings.simplefilter("always")
        try:
            with torch.inference_mode(), entrant.scope():
                out = entrant.call()
            assert_accurate(out, truth, baseline, name=entrant.name)
        except (AccuracyError, CaseError) as error:
            return "wrong", _first_line(error)
        except Exception as error:  # a contender that fails must not take the others with it
            return "refused", "; ".join([_first_line(error), *_reasons(told)])
    backends = sorted({choice.backend for choice in choices})
    return "ok", f"by {', '.join(backends)}" if backends else ""


def _reasons(told: Sequence[warnings.WarningMessage]) -> list[str]:
    """What PyTorch warns of when a backend refuses; not that we have switched off the others."""
    texts = [str(w.message).partition("(Triggered internally")[0].strip() for w in told]
    return [t for t in dict.fromkeys(texts) if not t.endswith(("because:", "runtime disabled."))]


def _row(name: str, note: tuple[str, str], timed: Mapping[str, Timed], ours: str | None) -> TimeRow:
    status, text = note
    if status == "ok" and timed[name].error is not None:
        status, text = "refused", timed[name].error or ""
    if status != "ok":
        return TimeRow(name, status, note=text)
    times = [sample.device_ms * 1000 for sample in timed[name].samples]
    summary = summarise(times)
    row = TimeRow(name, status, summary.median, summary.q20, summary.q80, note=text)
    if ours is None or name == ours or timed[ours].error is not None:
        return row
    ratio = ratio_of([s.device_ms * 1000 for s in timed[ours].samples], times, name)
    return replace(row, speedup=ratio.value, speedup_low=ratio.low, speedup_high=ratio.high)


def attention_contest(
    title: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    timer: Timer,
    plan: Plan = PLAN,
) -> Contest:
    """Time one call of attention beside each backend of `scaled_dot_product_attention`.

    Args:
        title: What is computed.
        q: Queries, `[B, H, Lq, D]`.
        k: Keys, `[B, H, Lk, D]`.
        v: Values, `[B, H, Lk, D]`.
        lengths: Number of keys of each sequence, `[B]`, int32; None if all count. PyTorch gets
            them as the bool mask that transformers gives it, which is made outside the timing.
        timer: Takes the time.
        plan: Rounds, lengths and pauses.

    Returns:
        Our row first, then PyTorch's.
    """
    mask = None if lengths is None else masks.key_lengths(lengths)
    visible = None
    if mask is not None:
        size = (q.shape[0], q.shape[2], k.shape[2])
        visible = mask.materialize(*size, q.device).expand(q.shape[0], 1, *size[1:])
    truth = attention_reference(q, k, v, mask=mask, compute_dtype=torch.float64)
    baseline = attention_reference(q, k, v, mask=mask, compute_dtype=q.dtype)

    def own() -> torch.Tensor:
        return cast("torch.Tensor", attention(q, k, v, mask=mask))

    def peer() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    entrants = [Entrant(OURS, own)]
    for name, backend in SDPA.items():
        entrants.append(
            Entrant(f"PyTorch {name}", peer, lambda b=backend: cast("Any", sdpa_kernel)([b]))
        )
    return run_contest(
        title, entrants, cast("torch.Tensor", truth), cast("torch.Tensor", baseline), timer, plan
    )


class Replay:
    """A call captured as a CUDA graph when it first runs, so that only the device's time counts."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        """Take a call that never waits for the device."""
        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: torch.Tensor | None = None

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Warm the call up on a side stream, as capturing needs it, and capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._out = self._call()
        return graph

    def __call__(self) -> torch.Tensor:
        """Run the graph; the result is overwritten by the next run."""
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        assert self._out is not None, "the captured call gave nothing"
        return self._out
