"""Every shipped kernel compiled with no GPU, as far as the given time goes, in rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tileloom.report.findings import KernelRow

if TYPE_CHECKING:
    from tileloom.launch.aot import CompileResult, KernelSpec

Pair = tuple["KernelSpec", str]


def compile_rows(
    pairs: Sequence[Pair],
    *,
    seconds: float,
    on_result: Callable[[CompileResult], None] | None = None,
) -> tuple[list[KernelRow], str, int]:
    """Compile kernels in child processes until the time is up.

    Args:
        pairs: Kernels and architectures, the most wanted first.
        seconds: No further kernels are begun after this time; what runs is finished.
        on_result: Called with each result as it arrives.

    Returns:
        Rows in the order of the pairs; the compiler's version, empty if nothing compiled; and how
        many pairs were left out.
    """
    from tileloom.launch.aot import compile_in_workers
    from tileloom.launch.budget import faults

    started = time.perf_counter()
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    rows: list[KernelRow] = []
    versions: set[str] = set()
    done = 0
    with TemporaryDirectory(prefix="tileloom-demo-") as cache:
        while done < len(pairs) and (done == 0 or time.perf_counter() - started < seconds):
            # Starting workers costs seconds (they import Triton), so few and large rounds; but a
            # round cannot be stopped, so none that would take all of the time.
            some = pairs[done : done + 3 * workers]
            results = compile_in_workers(
                some, workers=workers, cache_dir=Path(cache), on_result=on_result
            )
            for (spec, _), result in zip(some, results, strict=True):
                rows.append(_row(spec, result, faults(spec, result)))
                versions |= {result.triton} if result.error is None else set()
            done += len(some)
    return rows, ", ".join(sorted(versions)), len(pairs) - done


def _row(spec: KernelSpec, result: CompileResult, faults: Sequence[str]) -> KernelRow:
    short = tuple(text.strip().splitlines()[0] for text in faults if text.strip())
    if result.error is not None:
        return KernelRow(spec.name, result.arch, faults=short)
    return KernelRow(
        name=spec.name,
        arch=result.arch,
        registers=result.registers,
        spill_bytes=result.spill_bytes,
        shared_bytes=result.shared_bytes,
        stages=result.stages,
        blocks_per_sm=result.occupancy,
        compile_s=None if result.cached else result.compile_s,
        faults=short,
    )
