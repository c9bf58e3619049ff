"""What dropout's arithmetic costs on this GPU, in times of a multiply-add: for bench/bound.py.

    python scripts/time_philox.py

Philox is wide products (32 bits by 32, IMAD.WIDE) and what is done to their halves. Each of the
first kernels does 64 steps in a loop, in four independent chains, in as many warps as a
multiprocessor holds. The last one decides on blocks of 64 x 128 scores as the Hopper forward does
(`pieces_dropout_sm90.py`), in 16 warps a multiprocessor: a call is four scores of a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pieces_decisions import decisions

from tileloom.bench.pieces_products import chains

KINDS = ("FFMA", "wide product, xors and sums", "LOP3", "low product", "upper product")
TURNS = 2000
BLOCKS = 400


def milliseconds(launch: Callable[[], object]) -> float:
    """The median of five launches that fill the device."""
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[2]


def main() -> None:
    """Print what each kind of step costs, and a whole call."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(8 * sms * 256, dtype=torch.int32, device="cuda")

    def steps(kind: int) -> None:
        chains[8 * sms,](out, 12345, TURNS, kind, num_warps=8)  # pyright: ignore[reportCallIssue]

    def calls() -> None:
        launch: Any = decisions
        launch[4 * sms,](out, 2**40 + 77, 2**32 // 10, 128 * BLOCKS, BLOCKS, num_warps=4)

    print(torch.cuda.get_device_name())
    found = [milliseconds(partial(steps, kind)) for kind in range(len(KINDS))]
    for name, time in zip(KINDS, found, strict=True):
        print(f"{name}: {time:.3f} ms, {time / found[0]:.2f} times an FFMA")
    time = milliseconds(calls)
    ratio = time / (4 * 16 * BLOCKS) / (found[0] / (16 * 64 * TURNS))
    print(f"a call and its decisions: {time:.3f} ms, {ratio:.1f} times an FFMA")


if __name__ == "__main__":
    main()
