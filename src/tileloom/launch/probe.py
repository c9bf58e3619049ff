"""The self-test of a tier: the same small launch, by Triton's own path and by the tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GRID, BLOCK = (3, 2, 1), 32


def launch_probe(
    device: int, prepare: Callable[[Any, Any, tuple[int, int, int]], Callable[..., Any]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the probe by Triton's own path once, and by a tier twice.

    Args:
        device: The device's number; it is the current one.
        prepare: From Triton's CompiledKernel, the jitted function and a grid to the tier's entry
            `entry(stream, out, source, number)`.

    Returns:
        What Triton's path wrote, and what the tier wrote.
    """
    from triton.runtime.driver import driver

    from tileloom.launch.pieces_probe import probe

    active: Any = driver.active
    where = active.get_active_torch_device()
    source = torch.arange(BLOCK, dtype=torch.int64, device=where)
    expected, found = torch.zeros((2, 6, BLOCK), dtype=torch.int64, device=where).unbind(0)
    kernel: Any = probe
    made = kernel[GRID](expected, source, *SCALARS, None, BLOCK=BLOCK)
    entry = prepare(made, kernel, GRID)
    for _ in range(2):
        found.zero_()
        entry(active.get_current_stream(device), found.data_ptr(), source.data_ptr(), SCALARS[2])
    return expected, found


SCALARS = (-7, 2**40 + 5, 1.5, True)
