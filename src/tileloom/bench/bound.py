"""How fast a feature of attention could be: the least of three speeds, in TFLOP/s.

    bound = min(plain, FLOP * bandwidth / bytes, FLOP * rate / (scores * instructions))

`plain` is what the same contender reaches at the same head dim without the feature; `bandwidth` is
that of a copy in the same run, `bytes` all that must be read and written; `rate` is 128
instructions of a thread a clock for each multiprocessor, at the clock of the cell; `instructions`
are those of a thread for each score (`INSTRUCTIONS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tileloom.bench.case import AttentionCase
from tileloom.bench.run import CellResult

INSTRUCTIONS = {"forward": (6.0, 2.5, 22.5), "backward": (9.0, 2.5, 22.5)}
"""Of the plain kernel, and what a bias and dropout add: estimates for each score.

Those of the forward rest on counts in the SASS of its main loop; the backward's 9.0 is a guess.

A bias: 1.5 to make it float32, and one multiply-add. Dropout: a quarter of a Philox call, whose 19
wide products take, each with its xors and sums, as long as 4.1 multiply-adds (two H200s on
2026-11-28: 4.10 and 4.23; `scripts/time_philox.py`), and 3 that make a decision of it and apply it.
The kernels' present Philox has fewer and other products and comes to the same: see
docs/benchmarks.md.
"""
_LANES = 128


@dataclass(frozen=True)
class Bound:
    """What bounds a feature.

    Attributes:
        tflops: The bound.
        by: What gives it.
    """

    tflops: float
    by: Literal["plain speed", "bytes", "instructions"]


def bound_of(
    case: AttentionCase, plain_tflops: float, copy_gb_s: float, clock_mhz: float, sms: int
) -> Bound:
    """Bound a case.

    Args:
        case: The problem with its feature.
        plain_tflops: Of the same kernel without it.
        copy_gb_s: Bytes read plus bytes written by a copy, in GB/s.
        clock_mhz: Clock of the multiprocessors.
        sms: Their number.

    Returns:
        The least of the three speeds.
    """
    plain, of_bias, of_dropout = INSTRUCTIONS[case.direction]
    each = plain + (of_bias if case.bias else 0.0) + (of_dropout if case.dropout_p else 0.0)
    rate = sms * _LANES * clock_mhz * 1e6
    bounds = (
        Bound(plain_tflops, "plain speed"),
        Bound(case.flops * copy_gb_s * 1e9 / case.bytes_moved / 1e12, "bytes"),
        Bound(case.flops * rate / (case.scores * each) / 1e12, "instructions"),
    )
    return min(bounds, key=lambda bound: bound.tflops)


def _plain_of(case: AttentionCase) -> AttentionCase:
    plain = replace(case, bias="", bias_gradient=False, dropout_p=0.0, window=0, name="")
    return replace(plain, heads_kv=plain.heads_q)


def bound_notes(cells: Sequence[CellResult], name: str, copy_gb_s: float, sms: int) -> list[str]:
    """Say of each case with a feature what its bound is and how much of it a contender reaches.

    Args:
        cells: All cells of a run; the plain ones may be anywhere among them.
        name: The contender.
        copy_gb_s: See `bound_of`.
        sms: See `bound_of`.

    Returns:
        A sentence for each case whose plain case was measured.
    """
    speeds = {_plain_of(cell.case): cell.entry(name) for cell in cells if _is_plain(cell.case)}
    notes: list[str] = []
    for cell in cells:
        plain, own = speeds.get(_plain_of(cell.case)), cell.entry(name)
        if _is_plain(cell.case) or plain is None or plain.tflops is None or cell.card is None:
            continue
        bound = bound_of(cell.case, plain.tflops, copy_gb_s, cell.card.clock_mhz, sms)
        text = f"{cell.case.name}: bound {bound.tflops:.0f} TFLOP/s by {bound.by}"
        if own is not None and own.tflops is not None:
            text += f", {name} reaches {own.tflops / bound.tflops:.2f} of it"
            seed = cell.entry("efficient")
            if seed is not None and seed.tflops is not None:
                text += f", {own.tflops / seed.tflops:.1f} times the seed's kernel"
        notes.append(text)
    return notes


def _is_plain(case: AttentionCase) -> bool:
    return not (case.bias or case.dropout_p or case.window) and case.heads_q == case.heads_kv
