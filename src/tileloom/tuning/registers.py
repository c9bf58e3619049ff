"""Halving the reduction block of a kernel whose registers keep programs off the SMs.

A pure function from what the compiler said about a kernel to one more candidate, after the rule of
Inductor's `_dynamic_scale_rblock`. Where the original is wrong: the config's own flag counts, and
the smallest block that the kernel needs is kept.
"""

from __future__ import annotations

import math

from tileloom.tuning.config import Config
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.hints import DeviceProperties, Facts, HeuristicType, Sizes

LEAST_BLOCK = 64
"""Elements of a reduction block that is not worth halving."""


def may_scale(kind: HeuristicType, facts: Facts, device: DeviceProperties) -> bool:
    """Whether reduction blocks of a kernel may follow from registers at all.

    They may not where results must be deterministic, as the order of additions depends on the
    block, nor in kernels that hold their whole row, nor on a device that tells too little or has a
    compute capability below 8.

    Args:
        kind: The kernel's decorator.
        facts: Facts about the kernel.
        device: The device that it runs on.
    """
    known = device.regs_per_multiprocessor and device.max_threads_per_multi_processor
    return bool(
        kind is HeuristicType.REDUCTION
        and not facts.persistent
        and not facts.deterministic
        and known
        and (device.major or 0) >= 8
    )


def scaled_config(
    config: Config,
    registers: int | None,
    programs: int,
    device: DeviceProperties,
    *,
    min_rblock: int = 1,
) -> Config | None:
    """Return the config with its largest reduction block halved, if registers limit the kernel.

    Args:
        config: A config that was compiled.
        registers: Registers of each thread, as the compiler said; None if it did not.
        programs: Programs of the grid with that config; see `programs_of`.
        device: The device that the kernel runs on, which tells its registers and threads.
        min_rblock: The smallest R0_BLOCK that the kernel needs.

    Returns:
        One more candidate, or None: if the block has at most 64 elements, the registers let all
        threads of an SM run, or all programs run at once anyway.
    """
    blocks = {n: v for n, v in config.kwargs.items() if n.startswith("R") and n.endswith("BLOCK")}
    total = device.regs_per_multiprocessor
    threads = device.max_threads_per_multi_processor
    if not config.is_scalable or not registers or not total or not threads:
        return None
    if math.prod(blocks.values()) <= LEAST_BLOCK or registers <= total // threads:
        return None
    each = registers * device.warp_size_or_default * config.num_warps
    if programs <= max(total // each, 1) * device.multi_processor_count:
        return None
    name = max(blocks, key=lambda block: blocks[block])
    if name == "R0_BLOCK" and blocks[name] // 2 < min_rblock:
        return None
    return config.with_kwargs(**{name: blocks[name] // 2})


def programs_of(grid: GridExpr, size_hints: Sizes) -> int:
    """Return the programs of a grid by size hints; what it reads beside sizes counts as 1."""
    sizes = {grid.numel(dim): size for dim, size in size_hints.items()}
    return math.prod(grid.evaluate({name: sizes.get(name, 1) for name in grid.names}))
