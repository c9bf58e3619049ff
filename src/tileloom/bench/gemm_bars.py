"""What is asked of a matrix product's speed, and whether a run has reached it: the one statement.

| case | time compared with | at least as fast |
|---|---|---|
| a product, M, N and K of 4,096 or more | cuBLAS (`torch.mm`) | 1.02 times |
| a product of M <= 64 rows, which is bound by memory | cuBLAS | 1 / 1.05 times |
| any other product | cuBLAS | 1.00 times |
| a call with the host (`judged` is `"call"`) | cuBLAS | 1 / 1.2 times |
| a fused epilogue | our own product without it | 1 / 1.03 times |
| a fused epilogue | `torch.compile` of the same expression | faster |
| chunks that are all there, 100 us or more | our own product without flags | 1 / 1.01 times |
| the same in under 100 us | our own product without flags | at most 1 us more |
| the products, geometric mean | cuBLAS | 1.03 times |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tileloom.bench.function_run import FunctionCell
from tileloom.bench.gemm_case import GemmCase
from tileloom.bench.stats import geometric_mean

OURS, PLAIN, CUBLAS = "tileloom", "plain", "torch"
MEAN = 1.03
_SHORT_US, _MORE_US = 100.0, 1.0
Cell = FunctionCell[GemmCase]


@dataclass(frozen=True)
class GemmBar:
    """One bar: `met` is None where it cannot be told, since one of the two has no number."""

    case: str
    asked: str
    found: str
    met: bool | None


def least_ratio(case: GemmCase) -> tuple[str, float]:
    """Return whom a case is compared with, and how many times as fast it must be."""
    if case.judged == "call":
        return CUBLAS, 1 / 1.2
    if case.chunks:
        return PLAIN, 1 / 1.01
    if case.is_fused:
        return PLAIN, 1 / 1.03
    if case.m <= 64:
        return CUBLAS, 1 / 1.05
    return CUBLAS, 1.02 if min(case.m, case.n, case.k) >= 4096 else 1.0


def _ratio_bar(cell: Cell, other: str, least: float, word: str) -> GemmBar:
    own = cell.entry(OURS)
    asked = f"{word} {least:.3f} x {other}"
    if own is None or own.status != "ok":
        return GemmBar(cell.case.name, asked, "no number" if own is None else own.status, None)
    ratio = (own.call_ratios if cell.case.judged == "call" else own.ratios).get(other)
    if ratio is None:
        return GemmBar(cell.case.name, asked, f"{other} has no number", None)
    found = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    met = ratio.verdict == "faster" if word == "faster than" else ratio.value >= least
    return GemmBar(cell.case.name, asked, found, met)


def _short_bar(cell: Cell) -> GemmBar | None:
    """The bar of chunks in a product of under 100 us; None for a longer one."""
    own, plain = cell.entry(OURS), cell.entry(PLAIN)
    if own is None or plain is None or own.time_ms is None or plain.time_ms is None:
        return None
    us, plain_us = own.time_ms.median * 1000, plain.time_ms.median * 1000
    if plain_us >= _SHORT_US:
        return None
    asked = f"at most {_MORE_US:.0f} us more than {PLAIN}"
    more = us - plain_us
    return GemmBar(cell.case.name, asked, f"{more:+.1f} us", more <= _MORE_US)


def judge_gemm(cells: Sequence[Cell]) -> list[GemmBar]:
    """Hold what is asked against the cells of a run, and the geometric mean at the end."""
    bars: list[GemmBar] = []
    for cell in cells:
        short = _short_bar(cell) if cell.case.chunks else None
        other, least = least_ratio(cell.case)
        bars.append(short or _ratio_bar(cell, other, least, "at least"))
        if cell.case.is_fused and not cell.case.chunks:
            bars.append(_ratio_bar(cell, "compile", 1.0, "faster than"))
    mean, count = mean_ratio(cells)
    if mean is not None:
        asked = f"at least {MEAN} x {CUBLAS}"
        bars.append(GemmBar("geometric mean", asked, f"{mean:.3f} ({count} cases)", mean >= MEAN))
    return bars


def mean_ratio(cells: Sequence[Cell]) -> tuple[float | None, int]:
    """Return the geometric mean of the products' ratios to cuBLAS, and their number."""
    plain = [
        c for c in cells if c.case.judged == "device" and not (c.case.is_fused or c.case.chunks)
    ]
    entries = [cell.entry(OURS) for cell in plain]
    ratios = [e.ratios[CUBLAS].value for e in entries if e is not None and CUBLAS in e.ratios]
    return (geometric_mean(ratios) if ratios else None), len(ratios)
