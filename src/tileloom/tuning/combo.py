"""Combo kernels, several independent kernels in one launch, each with blocks of its own.

The blocks of kernel `i` carry its number: XBLOCK_0, XBLOCK_1. Trying every combination would take
the product of all lists, so they are chosen in turn: kernels whose lists are the same form a group
and take the same blocks; the largest group first, each starting from what was chosen before; warps
and stages last, with all blocks in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tileloom.errors import OptionError, shown_value
from tileloom.tuning.config import Config, distinct
from tileloom.tuning.heuristics_lists import configs
from tileloom.tuning.hints import (
    MAX_BLOCK,
    Facts,
    ReductionHint,
    TileHint,
    check_sizes,
    member,
)

KINDS = ("pointwise", "reduction", "persistent_reduction")
"""Kinds of kernels that a combo kernel may hold."""

MeasureAll = Callable[[Sequence[Config]], Sequence[float]]
"""From configs, of which the first is the one to beat, to their times; infinity for a failure."""


@dataclass(frozen=True)
class Group:
    """Kernels of a combo kernel that take the same blocks.

    Attributes:
        members: Their numbers.
        sizes: Size of each dimension.
        candidates: Their list of configs.
    """

    members: tuple[int, ...]
    sizes: Mapping[str, int]
    candidates: tuple[Config, ...]

    @property
    def fields(self) -> dict[str, int]:
        """The blocks that may be tuned, with the largest value of each."""
        blocks = [name for name in self.candidates[0].kwargs if name.endswith("BLOCK")]
        limits = {name: self._limit(name) for name in blocks}
        return {f"{name}_{i}": limits[name] for i in self.members for name in blocks}

    def _limit(self, block: str) -> int:
        dim = block.removesuffix("BLOCK").lower()
        return min(MAX_BLOCK[dim], self.sizes.get(dim, MAX_BLOCK[dim]))


@dataclass(frozen=True)
class ComboPlan:
    """How a combo kernel is tuned.

    Attributes:
        base: Where tuning starts: each kernel's first blocks, the most warps and stages of any.
        groups: What is tuned in turn, the largest first.
        pairs: Warps and stages to try with all blocks in place.
        parameters: Names of the kernel's parameters; a block whose numbered name is none of them
            keeps its own name.
    """

    base: Config
    groups: tuple[Group, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    parameters: frozenset[str] = frozenset()

    @property
    def fields(self) -> dict[str, int]:
        """All blocks that may be tuned, in order, with the largest value of each."""
        return {name: most for group in self.groups for name, most in group.fields.items()}

    def applied(self, config: Config, group: Group, candidate: Config) -> Config:
        """Return a config in which the kernels of a group take a candidate's blocks."""
        named = {
            self._name(name, i): value
            for i in group.members
            for name, value in candidate.kwargs.items()
        }
        return config.with_kwargs(**named)

    def _name(self, name: str, i: int) -> str:
        numbered = f"{name}_{i}"
        return numbered if numbered in self.parameters else name

    def tune(self, measure: MeasureAll) -> Config:
        """Choose blocks, warps and stages in turn.

        Args:
            measure: Times configs; of equal ones the first wins.

        Returns:
            The best config that was met.
        """
        best = self.base
        for group in self.groups:
            tried = [self.applied(best, group, candidate) for candidate in group.candidates]
            best = _fastest([best, *tried], measure)
        tried = [replace(best, num_warps=warps, num_stages=stages) for warps, stages in self.pairs]
        return _fastest([best, *tried], measure)


def _fastest(tried: Sequence[Config], measure: MeasureAll) -> Config:
    tried = distinct(tried)
    if len(tried) == 1:
        return tried[0]
    times = measure(tried)
    return tried[min(range(len(tried)), key=lambda i: times[i])]


def combo_plan(
    inductor_meta: Mapping[str, Any], triton_meta: Mapping[str, Any]
) -> ComboPlan | None:
    """Plan the tuning of a combo kernel.

    Args:
        inductor_meta: The kernel's facts; `combo_grid_meta` in it tells those of each kernel,
            `min_elem_per_thread` how many elements each thread has at least.
        triton_meta: Its signature and device.

    Returns:
        The plan; None if the kernel is no combo kernel whose kernels have blocks of their own.

    Raises:
        OptionError: If a kernel is of a kind that combo kernels do not hold.
    """
    combo = inductor_meta.get("combo_grid_meta")
    if combo is None or "heuristic_0" not in combo:
        return None
    if combo.get("stitched_num_warps") is not None:  # chosen when the kernel was written
        warps, stages = combo["stitched_num_warps"], combo["stitched_num_stages"]
        return ComboPlan(Config(dict(combo["stitched_backend_kwargs"]), warps, stages))
    shared = {name: value for name, value in inductor_meta.items() if name != "combo_grid_meta"}
    found: list[tuple[Any, Group]] = []
    for i in range(combo["num_kernels"]):
        meta = {**shared, **combo.get(f"inductor_meta_{i}", {})}
        known = {
            "reduction_hint": member(ReductionHint, combo.get(f"reduction_hint_{i}")),
            "tile_hint": member(TileHint, combo.get(f"tile_hint_{i}")),
            "min_elem_per_thread": inductor_meta.get("min_elem_per_thread", 0),
        }
        kind, facts = combo[f"heuristic_{i}"], Facts.of(meta, triton_meta, **known)
        if kind not in KINDS:
            raise OptionError(
                f"combo_grid_meta: heuristic_{i} is {shown_value(kind)}; it must be one of "
                f"{', '.join(KINDS)}. Try: a launch of its own for that kernel."
            )
        sizes = check_sizes(f"combo_grid_meta: size_hints_{i}", combo[f"size_hints_{i}"])
        identity = (kind, sizes, facts)
        same = [g for g, (known_as, _) in enumerate(found) if known_as == identity]
        if same and combo.get("autotune_grouping"):
            group = found[same[0]][1]
            found[same[0]] = (identity, replace(group, members=(*group.members, i)))
        else:
            found.append((identity, Group((i,), sizes, tuple(configs(kind, sizes, facts)))))
    groups = sorted((g for _, g in found), key=lambda g: -math.prod(g.sizes.values()))
    firsts = [group.candidates[0] for group in groups]
    most = (max(c.num_warps for c in firsts), max(c.num_stages for c in firsts))
    pairs = dict.fromkeys((c.num_warps, c.num_stages) for g in groups for c in g.candidates)
    names = frozenset(triton_meta.get("signature", ()))
    plan = ComboPlan(Config({}, *most), tuple(groups), (*dict.fromkeys([*pairs, most]),), names)
    base = plan.base
    for group, first in zip(groups, firsts):
        base = plan.applied(base, group, first)
    return replace(plan, base=base)
