"""What the card can do at best, measured in the same run: matrix products and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.bench.stats import quantile
from tileloom.bench.timer import Plan, Runner, Timer, interleave

# cuBLAS is at its best at 4096 on an H100 (short enough not to be held back by power); 8192 is what
# it sustains.
_SIZES = (4096, 8192)


@dataclass(frozen=True)
class Ceilings:
    """Bounds for the numbers of a run.

    Attributes:
        matmul_tflops: The best of `matmul_by_size`.
        matmul_by_size: cuBLAS on square bf16 matrices of N(0, 1), TFLOP/s by size.
        launch_us: Device time of a kernel that does next to nothing, back to back.
        launch_host_us: Host time of queuing it (`torch.add(out=)`).
    """

    matmul_tflops: float
    matmul_by_size: Mapping[str, float]
    launch_us: float
    launch_host_us: float


def _matmul(size: int, device: torch.device) -> Callable[[int], Any]:
    generator = torch.Generator(device=device).manual_seed(size)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    return lambda i: torch.mm(a, b.t(), out=out)


def measure_ceilings(
    device: torch.device, timer: Timer, plan: Plan, sizes: tuple[int, ...] = _SIZES
) -> Ceilings:
    """Measure the ceilings.

    Args:
        device: The device.
        timer: Takes the time.
        plan: Rounds, lengths and pauses.
        sizes: Sides of the square matrices.

    Returns:
        The ceilings.

    Raises:
        RuntimeError: If one of the measurements fails.
    """
    x, y, z = (torch.randn(16, device=device) for _ in range(3))
    runners = [Runner(str(size), _matmul(size, device)) for size in sizes]
    runners.append(Runner("launch", lambda i: torch.add(x, y, out=z)))
    timed = interleave(runners, plan, timer)
    for name, one in timed.items():
        if one.error is not None:
            raise RuntimeError(f"bench: the ceiling {name} cannot be measured: {one.error}")
    by_size = {
        str(n): 2.0 * n**3 / quantile([s.device_ms for s in timed[str(n)].samples], 0.5) / 1e9
        for n in sizes
    }
    launches = timed["launch"].samples
    return Ceilings(
        matmul_tflops=max(by_size.values()),
        matmul_by_size=by_size,
        launch_us=quantile([s.device_ms * 1000 for s in launches], 0.5),
        launch_host_us=quantile([s.host_us for s in launches], 0.5),
    )
