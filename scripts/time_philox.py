"""What integer instructions cost on this GPU, in times of a fused multiply-add: for bench/bound.py.

    python scripts/time_philox.py

Philox is wide products (32 bits by 32, IMAD.WIDE) and what is done to their halves. Each kernel
does 64 steps in a loop, in four independent chains, in as many warps as a multiprocessor holds.
"""

from __future__ import annotations

import torch

from tileloom.bench.pieces_products import chains

KINDS = ("FFMA", "wide product, xors and sums", "LOP3", "low product", "upper product")
TURNS = 2000


def milliseconds(kind: int) -> float:
    """The median of five launches that fill the device."""
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs * 256, dtype=torch.int32, device="cuda")
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        chains[programs,](out, 12345, TURNS, kind, num_warps=8)  # pyright: ignore[reportCallIssue]
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[2]


if __name__ == "__main__":
    print(torch.cuda.get_device_name())
    found = [milliseconds(kind) for kind in range(len(KINDS))]
    for name, time in zip(KINDS, found, strict=True):
        print(f"{name}: {time:.3f} ms, {time / found[0]:.2f} times an FFMA")
