"""One config from the sizes of a problem: its blocks and its warps, for each kind of kernel.

The rules and numbers are those of Inductor's `triton_heuristics` for CUDA (PyTorch 2.10), restated;
`heuristics_lists.py` puts candidates together from them. Where the original is wrong:

- the limit of a grid counts programs, not threads, and no block grows beyond what is allowed;
- tiling scores that are all zero mean equal scores and divide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tileloom.errors import OptionError
from tileloom.tuning.config import Config
from tileloom.tuning.hints import (
    MAX_BLOCK,
    MAX_GRID,
    ReductionHint,
    Sizes,
    block_name,
    is_reduced,
    next_power_of_2,
    reduced_size,
)

WARP = 32


def warps_for(
    wanted: int, *, most: int = 8, least: int = 2, register_intensive: bool = False
) -> int:
    """Return a power of two of warps between two limits, rounded up.

    Args:
        wanted: Warps by the size of the block.
        most: The upper limit, halved if the kernel needs many registers. It wins over the lower.
        least: The lower limit.
        register_intensive: Whether each thread needs many registers.
    """
    if register_intensive:
        most //= 2
    return next_power_of_2(min(max(wanted, least), most))


def triton_config(
    size_hints: Sizes,
    x: int,
    y: int | None = None,
    z: int | None = None,
    num_stages: int = 1,
    num_elements_per_warp: int = 256,
    min_elem_per_thread: int = 0,
    num_warps: int | None = None,
) -> Config:
    """Make the config of a pointwise kernel.

    The block has as many elements as asked for, if the problem has them: a dimension that is
    shorter than its block makes others longer.

    Args:
        size_hints: Size of each dimension, powers of two.
        x: Wanted block of x.
        y: Wanted block of y, where there is one.
        z: Wanted block of z, where there is one.
        num_stages: Depth of the software pipeline.
        num_elements_per_warp: Elements that make one more warp worth while.
        min_elem_per_thread: Elements that each thread has at least, if x is long enough.
        num_warps: Warps; by default they follow from the size of the block, and are at least 4
            from 128 elements on.

    Raises:
        OptionError: If no block is legal, or more than 2^31 - 1 programs were needed.
    """
    wanted = {dim: block for dim, block in zip("xyz", (x, y, z)) if block}
    target = math.prod(wanted.values())
    if math.prod(size_hints.values()) < target:
        target //= 8
    blocks = {dim: min(block, size_hints[dim]) for dim, block in wanted.items()}
    for dim, size in ((dim, size_hints[dim]) for dim in blocks):
        while blocks[dim] < min(size, MAX_BLOCK[dim]) and (
            blocks[dim] * MAX_GRID[dim] < size or math.prod(blocks.values()) < target
        ):
            blocks[dim] *= 2
    product = math.prod(blocks.values())
    if num_warps is None:
        num_warps = warps_for(product // num_elements_per_warp, least=1)
    if product >= 128:  # fewer met errors of the assembler
        num_warps = max(num_warps, 4)
    threads = min_elem_per_thread * WARP * num_warps
    longer = blocks["x"] * next_power_of_2(math.ceil(threads / product))
    blocks["x"] = min(_fit_grid(size_hints, longer), size_hints["x"], MAX_BLOCK["x"])
    return _checked(size_hints, blocks, num_warps, num_stages)


def triton_config_reduction(
    size_hints: Sizes,
    x: int,
    r: int,
    num_stages: int = 1,
    num_warps: int | None = None,
    register_intensive: bool = False,
    dynamic_scale_rblock: bool = True,
    reduction_hint: ReductionHint | None = None,
    min_num_warps: int = 2,
) -> Config:
    """Make the config of a reduction whose programs share out x.

    Args:
        size_hints: Size of each dimension, powers of two.
        x: Wanted block of x.
        r: Wanted elements of the reduced dimensions together, laid into them last one first.
        num_stages: Depth of the software pipeline.
        num_warps: Warps; by default one for 128 elements, along the reduction if it is INNER.
        register_intensive: Whether each thread needs many registers: half as many warps at most.
        dynamic_scale_rblock: Whether the reduction block may be halved later.
        reduction_hint: How the elements of a reduction lie.
        min_num_warps: Warps at least.

    Raises:
        OptionError: If no block is legal, or more than 2^31 - 1 programs were needed.
    """
    blocks = {"x": min(x, size_hints["x"]), **_reduction_blocks(size_hints, r)}
    target = math.prod(blocks.values())
    if num_warps is None:
        num_warps = (r if reduction_hint is ReductionHint.INNER else target) // 128
    num_warps = warps_for(
        num_warps,
        most=16 if r <= 8192 else 32,
        least=min_num_warps,
        register_intensive=register_intensive,
    )
    blocks["x"] = _fit_grid(size_hints, blocks["x"])
    for dim in sorted(filter(is_reduced, blocks)):
        while math.prod(blocks.values()) > target and blocks[dim] > 1:
            blocks[dim] //= 2
    return _checked(size_hints, blocks, num_warps, num_stages, dynamic_scale_rblock)


def triton_config_tiled_reduction(
    size_hints: Sizes,
    x: int,
    y: int,
    r: int,
    num_stages: int = 1,
    register_intensive: bool = False,
) -> Config:
    """Make the config of a reduction whose programs share out x and y.

    Args:
        size_hints: Size of each dimension, powers of two.
        x: Wanted block of x.
        y: Wanted block of y.
        r: Wanted elements of the reduced dimensions together.
        num_stages: Depth of the software pipeline.
        register_intensive: Whether each thread needs many registers: half as many warps at most.

    Raises:
        OptionError: If no block is legal.
    """
    blocks = {"x": min(x, size_hints["x"]), "y": min(y, size_hints["y"])}
    blocks |= _reduction_blocks(size_hints, r)
    num_warps = warps_for(math.prod(blocks.values()) // 256, least=1)
    num_warps = warps_for(num_warps, most=16, register_intensive=register_intensive)
    return _checked(size_hints, blocks, num_warps, num_stages)


def make_matmul_triton_config(sizes: Sizes, num_warps: int, num_stages: int) -> Config:
    """Make the config of a matrix product: x, y, z and r name its blocks, absent ones are left out.

    Args:
        sizes: Block of each dimension; `r` is R0_BLOCK.
        num_warps: Warps.
        num_stages: Depth of the software pipeline.
    """
    names = {"x": "XBLOCK", "y": "YBLOCK", "z": "ZBLOCK", "r": "R0_BLOCK"}
    blocks = {name: sizes[dim] for dim, name in names.items() if sizes.get(dim) is not None}
    return Config(blocks, num_warps=num_warps, num_stages=num_stages)


def match_target_block_product(
    size_hints: Sizes,
    tiling_scores: Mapping[str, float],
    target_block_product: int,
    min_block_size: int = 1,
) -> dict[str, int]:
    """Share a block out among dimensions in proportion to their scores.

    The dimension whose score is highest doubles and its score is halved, until the product is
    reached or no dimension can grow. A dimension of score 0 keeps block 1; scores that are all 0
    count as equal.

    Args:
        size_hints: Size of each dimension, powers of two.
        tiling_scores: Score of each dimension to share out among.
        target_block_product: Wanted product of the blocks, a power of two.
        min_block_size: The block that a dimension with a score starts from.

    Returns:
        The block of each dimension that has a score.
    """
    scores = dict(tiling_scores)
    if not any(scores.values()):
        scores, min_block_size = dict.fromkeys(scores, 1.0), 1
    blocks = {dim: min_block_size if score else 1 for dim, score in scores.items()}
    scores = {dim: score for dim, score in scores.items() if score}
    while scores and math.prod(blocks.values()) < target_block_product:
        dim = max(scores, key=lambda name: scores[name])
        if blocks[dim] >= min(MAX_BLOCK[dim], size_hints[dim]):
            del scores[dim]
            continue
        blocks[dim] *= 2
        scores[dim] /= 2
    return blocks


def adapt_config_for_tiling(
    size_hints: Sizes,
    tiling_scores: Mapping[str, float] | None,
    original_x: int,
    original_r: int,
    num_stages: int = 1,
    register_intensive: bool = False,
) -> Config:
    """Share a block of x and r out among x, y and r by their tiling scores.

    Args:
        size_hints: Size of each dimension, powers of two.
        tiling_scores: Score of each dimension; equal ones by default.
        original_x: Block of x, were there no y.
        original_r: Block of r.
        num_stages: Depth of the software pipeline.
        register_intensive: Whether each thread needs many registers.

    Raises:
        OptionError: If a dimension has no score.
    """
    scores = tiling_scores or dict.fromkeys(size_hints, 1)
    missing = [dim for dim in size_hints if dim not in scores]
    if missing:
        raise OptionError(
            f"tiling_scores: {', '.join(missing)} has no score, but {', '.join(scores)} have. "
            "Try: give every dimension of size_hints one."
        )
    blocks = match_target_block_product(size_hints, scores, original_x * original_r)
    return triton_config_tiled_reduction(
        size_hints,
        blocks["x"],
        blocks["y"],
        blocks["r0_"],
        num_stages=num_stages,
        register_intensive=register_intensive,
    )


def _reduction_blocks(size_hints: Sizes, r: int) -> dict[str, int]:
    """Lay r elements into the reduced dimensions, last one first: neighbours stay neighbours."""
    remaining = min(r, reduced_size(size_hints))
    blocks: dict[str, int] = {}
    for dim in sorted(filter(is_reduced, size_hints), reverse=True):
        blocks[dim] = min(size_hints[dim], MAX_BLOCK[dim], remaining)
        remaining //= blocks[dim]
    if remaining > 1:
        most = ", ".join(f"{MAX_BLOCK[dim]} of {dim}" for dim in sorted(blocks))
        raise OptionError(
            f"size_hints: {r} elements of a reduction are to be held at once, in blocks of at most "
            f"{most}. Try: a reduction that loops over its row."
        )
    return blocks


def _fit_grid(size_hints: Sizes, x: int) -> int:
    """Make the block of x larger while there would be more programs than a grid may have."""
    size = size_hints["x"]
    while size > MAX_GRID["x"] * x and x < MAX_BLOCK["x"]:
        x *= 2
    if size > MAX_GRID["x"] * x:
        raise OptionError(
            f"size_hints: x is {size}, which with the largest XBLOCK, {x}, is more than "
            f"{MAX_GRID['x']} programs. Try: launch the kernel over parts of x."
        )
    return x


def _checked(
    size_hints: Sizes,
    blocks: Mapping[str, int],
    num_warps: int,
    num_stages: int,
    is_scalable: bool = True,
) -> Config:
    """A config of these blocks, which must be legal."""
    for dim, block in blocks.items():
        check_block(block_name(dim), block, size_hints.get(dim))
    kwargs = {block_name(dim): block for dim, block in blocks.items()}
    return Config(kwargs, num_warps, num_stages, is_scalable=is_scalable)


def check_block(name: str, block: int, size: int | None = None) -> None:
    """Refuse a block that kernels are not made for.

    Args:
        name: For example ``"XBLOCK"``.
        block: Its size.
        size: Size of the dimension, if known: of a dimension of size 1 the block is 1.

    Raises:
        OptionError: If the block is too large, or does not divide the largest one.
    """
    most = MAX_BLOCK[name.removesuffix("BLOCK").lower()]
    if block < 1 or block > most or most % block or (size == 1 and block != 1):
        least = "1, because the dimension has size 1" if size == 1 else f"a divisor of {most}"
        raise OptionError(f"{name} is {block}; it must be {least}. Try: {name}=1.")
