"""Lists of candidates: `configs(kind, sizes, facts)` for every kind of kernel.

>>> from tileloom.tuning import Facts, configs
>>> for config in configs("pointwise", {"x": 1 << 20}, Facts()):
...     print(config)
XBLOCK: 1024, num_warps: 4, num_stages: 1
XBLOCK: 512, num_warps: 8, num_stages: 1

The lists are those of Inductor's `triton_heuristics` for CUDA (PyTorch 2.10), restated. Where the
original is wrong:

- under max-autotune the config that would be taken without it is always a candidate (the last);
- max-autotune also counts for three-dimensional pointwise kernels;
- a cooperative reduction has as many programs as the device has SMs, down to a power of two, where
  their number is known: the original's 64 leave SMs idle, or wait for each other for ever where
  there are fewer. No row is split among more than it has elements;
- the blocks of a mix-order reduction divide its rows, and respect the minimum of TMA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tileloom.errors import OptionError, UnsupportedError, known_keywords, shown_value
from tileloom.tuning import filters
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.heuristics import (
    WARP,
    adapt_config_for_tiling,
    make_matmul_triton_config,
    match_target_block_product,
    triton_config,
    triton_config_reduction,
    triton_config_tiled_reduction,
)
from tileloom.tuning.hints import (
    MAX_RSPLIT,
    MAX_TENSOR,
    MIN_DOT,
    AutotuneHint,
    Facts,
    ReductionHint,
    Sizes,
    TileHint,
    block_name,
    check_sizes,
    is_reduced,
    last_power_of_2,
    next_power_of_2,
    reduced_size,
)

PERSISTENT_BLOCK = 4096
"""Elements that a persistent reduction holds at most, unless one row has more."""

# Blocks of x, y, r; warps; stages.
_MATMUL = (
    (32, 32, 16, 2, 1), (32, 32, 128, 4, 2), (32, 64, 32, 8, 5), (64, 32, 32, 8, 5),
    (64, 32, 128, 4, 5), (64, 64, 16, 4, 2), (64, 64, 32, 4, 2), (64, 64, 64, 8, 3),
    (64, 64, 128, 4, 5), (64, 128, 32, 4, 3), (64, 128, 32, 8, 4), (64, 128, 64, 4, 3),
    (64, 128, 128, 4, 4), (128, 64, 32, 4, 3), (128, 64, 32, 8, 4), (128, 128, 32, 8, 2),
    (128, 128, 32, 4, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 5),
)  # fmt: skip


def pointwise_configs(sizes: Sizes, facts: Facts) -> list[Config]:
    """List the candidates of a pointwise kernel of one, two or three dimensions."""
    block = max(256, min(math.prod(sizes.values()) // 128, 1024))

    def config(*blocks: int, elements: int = 256) -> Config:
        return triton_config(
            sizes,
            *blocks,
            num_elements_per_warp=elements,
            min_elem_per_thread=facts.min_elem_per_thread,
        )

    first = {1: (block,), 2: (32, 32), 3: (16, 16, 16)}.get(len(sizes))
    if first is None or set(sizes) != set("xyz"[: len(sizes)]):
        raise UnsupportedError(
            f"pointwise: size_hints has {', '.join(sizes)}; a pointwise kernel has x, x and y, or "
            "x, y and z. Try: a reduction, or fewer dimensions."
        )
    square = len(sizes) == 2 and facts.tile_hint is TileHint.SQUARE
    if not facts.max_autotune and (square or not facts.autotune_pointwise):
        return [config(*first)]
    if len(sizes) == 1:
        listed = [config(block), config(block // 2, elements=64)]
    elif len(sizes) == 2:
        tiles = ((64, 64), (256, 16), (16, 256), (block, 1), (1, block))
        listed = [config(*tile) for tile in (first, *tiles)]
    else:
        tiles = ((64, 8, 8), (8, 64, 8), (8, 8, 64))
        lines = ((block, 1, 1), (1, block, 1), (1, 1, block))
        listed = [config(*tile) for tile in (first, *tiles, *lines)]
    return listed + hinted_configs(sizes, facts, block)


def hinted_configs(sizes: Sizes, facts: Facts, block: int) -> list[Config]:
    """List what the kernel's own hints add: a quarter of the block along each dimension in turn."""
    if AutotuneHint.ONE_ELEMENT_PER_THREAD not in facts.autotune_hints:
        return []
    places = range(len(sizes))
    lines = [[block // 4 if i == place else 1 for i in places] for place in places]
    return [triton_config(sizes, *line, num_elements_per_warp=WARP) for line in lines]


def reduction_configs(sizes: Sizes, facts: Facts) -> list[Config]:
    """List the candidates of a reduction that loops over its row."""
    if facts.native_matmul:
        return _matmul_configs(sizes, persistent=False)
    r = reduced_size(sizes)
    work = facts.num_load + facts.num_reduction
    intensive = sizes["x"] >= 1024 and work >= 10
    max_r = 1024 if intensive or facts.major >= 10 else 2048

    def config(
        x: int,
        r: int,
        warps: int | None = None,
        *,
        intensive: bool = intensive,
        is_scalable: bool = True,
    ) -> Config:
        if "y" in sizes:
            scores = facts.tiling_scores
            return adapt_config_for_tiling(sizes, scores, x, r, register_intensive=intensive)
        return triton_config_reduction(
            sizes,
            x,
            r,
            num_warps=warps,
            register_intensive=intensive,
            dynamic_scale_rblock=is_scalable,
            reduction_hint=facts.reduction_hint,
        )

    whole: list[Config] = []
    if facts.add_persistent_rblock and work <= 8:
        whole = [config(max(4096 // r, 1), min(r, 32768), is_scalable=False)]
    by_hint = {
        ReductionHint.INNER: config(2 if r <= 2048 else 1, min(r, max_r)),
        ReductionHint.OUTER: config(*_outer_blocks(sizes["x"], r, facts)),
        ReductionHint.OUTER_TINY: config(2 * (256 // r) if r <= 256 else 1, min(r, max_r)),
    }
    if facts.reduction_hint in by_hint and "y" not in sizes and not facts.max_autotune:
        return [*whole, by_hint[facts.reduction_hint]]
    return [
        *whole,
        *by_hint.values(),
        config(64, 64, intensive=False),
        config(8, 512, intensive=False),
        config(64, 4, 8, intensive=False),
    ]


def _outer_blocks(x: int, r: int, facts: Facts) -> tuple[int, int, int | None]:
    """Blocks of x and r, and warps, of a reduction whose neighbours belong to other reductions."""
    if x <= 1024:  # use all SMs
        return max(min(x // 128, 8), 2), min(r, 64), None
    if x // 4096 <= 8:
        return 16, 32, None
    if facts.num_dynamic > 1:
        return 64, max(min(r // 64, 64), 8), None
    if facts.num_dynamic == 1:  # its index arithmetic takes registers
        block = 1 if facts.num_load >= 3 else min(next_power_of_2(max(r, 128) // 128), 8)
        return 64, block, None
    block = max(min(256, next_power_of_2(x // 4096)), 64)
    if facts.num_load < 4 or r <= 128:
        return block, 512 // block, None
    return min(block, 32), 64 if r >= 2048 else 32, 4


def persistent_reduction_configs(sizes: Sizes, facts: Facts) -> list[Config]:
    """List the candidates of a reduction that holds its whole row.

    Blocks of reduced dimensions are constants of such a kernel, and left out.
    """
    if facts.native_matmul:
        return _matmul_configs(sizes, persistent=True)
    r = reduced_size(sizes)
    blocks = [1, *(block for block in (8, 32, 128) if r * block <= PERSISTENT_BLOCK)]
    if "y" in sizes:
        listed = [_persistent_tile(sizes, facts, product) for product in blocks]
    else:
        listed = [
            triton_config_reduction(
                sizes, x, r, register_intensive=True, reduction_hint=facts.reduction_hint
            )
            for x in blocks
            if x == 1 or x <= sizes["x"]
        ]
        default = _persistent_default(sizes, facts, listed)
        if not facts.max_autotune:
            listed = default
        elif not facts.deterministic:  # where nothing is measured, the list alone decides
            listed += default
    constant = [block_name(dim) for dim in sizes if is_reduced(dim)]
    return [config.without_kwargs(*constant) for config in listed]


def _persistent_tile(sizes: Sizes, facts: Facts, product: int) -> Config:
    scores = facts.tiling_scores or {"x": 1, "y": 1}
    shared = {dim: scores[dim] for dim in ("x", "y")}
    blocks = match_target_block_product(sizes, shared, product)
    return triton_config_tiled_reduction(sizes, blocks["x"], blocks["y"], reduced_size(sizes))


def _persistent_default(sizes: Sizes, facts: Facts, listed: list[Config]) -> list[Config]:
    """What the hint chooses from the list, or takes instead."""
    x, r = sizes["x"], reduced_size(sizes)
    if facts.reduction_hint is ReductionHint.INNER and r >= 256:
        if r > 1024 or x // 8 < 128 or facts.rsplit_size:
            return listed[:1]
        # One warp needs no shared memory to reduce across warps.
        block = min(1024 // r, 8)
        return [
            triton_config_reduction(
                sizes, block, r, num_warps=1, min_num_warps=1, register_intensive=True
            )
        ]
    if facts.reduction_hint is ReductionHint.OUTER:
        return listed[-1:]
    if facts.reduction_hint is ReductionHint.OUTER_TINY:
        return [triton_config_reduction(sizes, 2 * (256 // r) if r <= 256 else 1, r)]
    return listed


def _mix_order_configs(configs: list[Config], sizes: Sizes, facts: Facts) -> list[Config]:
    """Fit configs to a kernel that reduces over both orders: a program walks a slab of rows."""
    rows, r = facts.rsplit_size, sizes["r0_"]
    block = min(max(rows // 32, 4 if r <= 512 else 1), 16)
    block = max(block, (facts.tma_min_block_sizes or {}).get("XBLOCK", 1))
    while rows % block:
        block //= 2
    most = (2 if r > 8192 else 3) if facts.multi_stages else 1
    stages = min(max(rows // block // 4, 1), most)
    made: list[Config] = []
    for config in configs:
        fitted = config.with_kwargs(RSPLIT_SIZE=rows, XBLOCK=block, NUM_STAGES=stages)
        if r <= 1024:
            fitted = replace(fitted, num_warps=max(config.num_warps // 2, 1))
            made += [fitted, replace(fitted, num_warps=2)]
        elif config.num_warps < 32:
            made += [fitted, replace(fitted, num_warps=config.num_warps * 2)]
        else:
            made.append(fitted)
    return made


def cooperative_reduction_configs(sizes: Sizes, facts: Facts) -> list[Config]:
    """List the candidates of a reduction whose rows several programs share."""
    if set(sizes) != {"x", "r0_"}:
        raise UnsupportedError(
            f"cooperative_reduction: size_hints has {', '.join(sizes)}; it must have x and r0_ "
            "alone. Try: reduction, or one reduced dimension."
        )
    x, r = sizes["x"], sizes["r0_"]
    # All must run at once, and should be many.
    programs = last_power_of_2(facts.multi_processor_count or MAX_RSPLIT)
    split = max(1, min(programs // x, MAX_RSPLIT, r))
    make = persistent_reduction_configs if facts.persistent else reduction_configs
    listed = make({"x": x, "r0_": r // split}, facts)
    return [config.with_kwargs(RSPLIT=split) for config in listed]


def split_scan_configs(sizes: Sizes, facts: Facts) -> list[Config]:
    """List the candidates of a scan whose rows several programs share."""
    if len(sizes) != 2:
        raise UnsupportedError(
            f"split_scan: size_hints has {', '.join(sizes)}; it must have x and one reduced "
            "dimension. Try: reduction, or one reduced dimension."
        )
    least = facts.min_split_scan_rblock
    return [
        config.with_kwargs(**{n: max(v, least) for n, v in config.kwargs.items() if n[0] == "R"})
        for config in reduction_configs(sizes, facts)
    ]


def _matmul_configs(sizes: Sizes, *, persistent: bool) -> list[Config]:
    """The table of matrix products by `tl.dot`: mm has x, y and r0_; bmm has z too."""
    shared = {"x", "y", "r0_"}
    if set(sizes) not in (shared, shared | {"z"}):
        raise UnsupportedError(
            f"native_matmul: size_hints has {', '.join(sizes)}; a matrix product has x, y and r0_, "
            "a batched one also z. Try: a reduction without native_matmul."
        )
    batch = {"z": 1} if "z" in sizes else {}
    made: list[Config] = []
    for x, y, r, warps, stages in _MATMUL:
        if persistent:
            depth = max(sizes["r0_"], MIN_DOT)
            while x * y * depth > MAX_TENSOR and max(x, y) > MIN_DOT:
                x, y = (x // 2, y) if x >= y else (x, y // 2)
            blocks = {"x": x, "y": y}
            if x * y * depth > MAX_TENSOR:
                continue
        else:
            blocks = {"x": x, "y": y, "r": r}
        made.append(make_matmul_triton_config({**blocks, **batch}, warps, stages))
    return distinct(made)


def foreach_configs(facts: Facts) -> list[Config]:
    """List the candidates of a kernel that does the same for many tensors: warps alone."""
    return [Config({}, w, num_stages=1) for w in ((8, 1, 2, 4) if facts.max_autotune else (8,))]


_KINDS: dict[str, Callable[[Sizes, Facts], list[Config]]] = {
    "pointwise": pointwise_configs,
    "reduction": reduction_configs,
    "persistent_reduction": persistent_reduction_configs,
    "cooperative_reduction": cooperative_reduction_configs,
    "split_scan": split_scan_configs,
}


@known_keywords
def configs(kind: str, size_hints: Mapping[str, int], facts: Facts | None = None) -> list[Config]:
    """List the candidates of a kernel.

    Args:
        kind: ``"pointwise"``, ``"reduction"``, ``"persistent_reduction"``,
            ``"cooperative_reduction"`` or ``"split_scan"``.
        size_hints: Size of each dimension, powers of two.
        facts: What is known about the kernel; see `Facts`.

    Returns:
        Distinct configs, at least one; for a reduction of which the facts ask for determinism
        exactly one.

    Raises:
        OptionError: If a size is no power of two, or no block fits it.
        UnsupportedError: If the kind does not have such dimensions.
    """
    if not isinstance(kind, str) or kind not in _KINDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"configs: kind is {shown_value(kind)}; it must be one of {', '.join(_KINDS)}. "
            "Try: configs('pointwise', {'x': 1024})."
        )
    facts = Facts() if facts is None else facts
    if not isinstance(facts, Facts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"configs: facts is a {type(facts).__name__}; it must be a tileloom.tuning.Facts. Try: "
            "Facts(num_load=2)."
        )
    sizes = check_sizes(kind, size_hints)
    reduces = kind != "pointwise"
    if reduces:
        _check_reduces(kind, sizes, facts)
        if facts.no_x_dim:
            sizes["x"] = 1
    if kind == "persistent_reduction":
        facts = replace(facts, persistent=True)
    made = filters.filter_for_tma(_KINDS[kind](sizes, facts), facts)
    if kind == "persistent_reduction" and facts.rsplit_size:
        made = _mix_order_configs(made, sizes, facts)
    if reduces:
        made = filters.filter_for_determinism(made, facts)
        made = filters.raise_to_minimums(made, facts)
    return distinct(made)


def _check_reduces(kind: str, sizes: Mapping[str, Any], facts: Facts) -> None:
    odd = "z" in sizes and not facts.native_matmul
    if odd or "x" not in sizes or not any(map(is_reduced, sizes)):
        raise UnsupportedError(
            f"{kind}: size_hints has {', '.join(sizes)}; a reduction has x and at least r0_, and "
            "may have y and r1_. Try: size_hints={'x': 1, 'r0_': 4096} for a single row."
        )
