"""Filters of candidates: what TMA can load, what is deterministic, and blocks that a kernel needs.

Each takes a list of configs and the facts about the kernel, and returns a list that is not empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tileloom.errors import OptionError
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.heuristics import check_block
from tileloom.tuning.hints import Facts, is_reduced


def filter_for_tma(configs: Sequence[Config], facts: Facts) -> list[Config]:
    """Keep the configs whose blocks TMA can load, after one that is sure to be.

    That one is the first config with the minimums as its blocks; where no other is left, with its
    blocks raised to the minimums, which alone may be much too small. Reduction blocks of persistent
    kernels are constants and not asked for.

    Raises:
        OptionError: If a minimum is given for a block that the configs do not have.
    """
    least = dict(facts.tma_min_block_sizes or {})
    if facts.persistent:
        least = {name: size for name, size in least.items() if not is_reduced(name.lower())}
    if not least:
        return list(configs)
    first = configs[0]
    unknown = [name for name in least if name not in first.kwargs]
    if unknown:
        raise OptionError(
            f"tma_min_block_sizes: {', '.join(unknown)} is no block of the kernel; its configs "
            f"have {', '.join(first.kwargs)}. Try: name one of these."
        )
    fit = [c for c in configs if all(c.kwargs[name] >= size for name, size in least.items())]
    if not fit:
        least = {name: max(first.kwargs[name], size) for name, size in least.items()}
    return distinct([first.with_kwargs(**least), *fit])


def filter_for_determinism(configs: Sequence[Config], facts: Facts) -> list[Config]:
    """Choose one config without timing, so that no result depends on a measurement.

    Where the facts ask for it: drop reduction blocks of at most 4, and blocks of one row in kernels
    that touch nothing contiguous along the reduction, each as long as something remains. Of the
    rest take the second largest reduction block, then the second most warps, then the second
    largest XBLOCK, then the first.
    """
    left = distinct(configs)
    if not facts.deterministic or len(left) == 1:
        return left

    def second_largest(value: Callable[[Config], int]) -> None:
        nonlocal left
        ranks = sorted({value(config) for config in left})
        chosen = ranks[-2] if len(ranks) > 1 else ranks[0]
        left = [config for config in left if value(config) == chosen]

    left = [c for c in left if _block(c, "R0_BLOCK", 5) > 4] or left
    if not facts.contiguous_r:
        left = [c for c in left if _block(c, "XBLOCK") != 1] or left
    second_largest(lambda config: _block(config, "R0_BLOCK"))
    second_largest(lambda config: config.num_warps)
    second_largest(lambda config: _block(config, "XBLOCK"))
    return left[:1]


def _block(config: Config, name: str, absent: int = -1) -> int:
    return config.kwargs.get(name, absent)


def raise_to_minimums(configs: Sequence[Config], facts: Facts) -> list[Config]:
    """Raise XBLOCK and R0_BLOCK to what the kernel needs; the other shrinks to keep the tile.

    Raises:
        OptionError: If the configs have other blocks, or a minimum is larger than any block.
    """
    least = {"R0_BLOCK": facts.min_rblock, "XBLOCK": facts.min_xblock}
    if max(least.values()) <= 1:
        return list(configs)
    return [_raised(config, least) for config in configs]


def _raised(config: Config, least: dict[str, int]) -> Config:
    others = [n for n in config.kwargs if n.endswith("BLOCK") and n not in least]
    if others:
        raise OptionError(
            f"min_xblock and min_rblock: the configs also have {', '.join(others)}; minimums are "
            "for kernels with XBLOCK and R0_BLOCK alone. Try: leave the minimums out."
        )
    blocks = {n: config.kwargs[n] for n in least if n in config.kwargs}
    tile = math.prod(blocks.values())
    blocks = {n: max(block, least[n]) for n, block in blocks.items()}
    for name in blocks:
        while math.prod(blocks.values()) > tile and blocks[name] > least[name]:
            blocks[name] //= 2
        check_block(name, blocks[name])
    return replace(config, kwargs={**config.kwargs, **blocks})
