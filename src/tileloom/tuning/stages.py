"""What is tried for a kernel, from what generated code states of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tileloom.tuning import registers
from tileloom.tuning.config import Config
from tileloom.tuning.coordinate_descent import CoordescTuner
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.hints import Facts, HeuristicType, Sizes
from tileloom.tuning.tune import SPILLS, Search, Stages

_NEVER_REFINED = (HeuristicType.TEMPLATE, HeuristicType.USER_AUTOTUNE, HeuristicType.FIXED)
_REDUCTIONS = (
    HeuristicType.REDUCTION,
    HeuristicType.PERSISTENT_REDUCTION,
    HeuristicType.SPLIT_SCAN,
)


def stages_of(
    configs: Sequence[Config],
    triton_meta: Mapping[str, Any],
    inductor_meta: Mapping[str, Any],
    kind: HeuristicType,
    size_hints: Sizes | None,
    *,
    name: str,
    is_custom: bool,
    search: Search | None,
) -> Stages:
    """Say what is tried: in a deterministic mode nothing that changes the order of additions.

    Args:
        configs: The list.
        triton_meta: ``device`` and ``native_matmul``.
        inductor_meta: ``coordinate_descent_tuning``, ``dynamic_scale_rblock``, ``spill_threshold``
            and what `Facts` and `CoordescTuner` read.
        kind: The decorator's kind.
        size_hints: Powers of two by dimension, or None.
        name: The kernel's.
        is_custom: Whether a user wrote it.
        search: Chooses among further configs, or None.
    """
    facts, device = Facts.of(inductor_meta, triton_meta), triton_meta["device"]
    is_fixed = facts.deterministic and kind in _REDUCTIONS
    refines = inductor_meta.get("coordinate_descent_tuning") and kind not in _NEVER_REFINED
    scales = (
        size_hints is not None
        and inductor_meta.get("dynamic_scale_rblock", True)
        and registers.may_scale(kind, facts, device)
    )

    def scaled(config: Config, used: int | None) -> Config | None:
        grid = GridExpr.from_meta(inductor_meta, config)
        programs = registers.programs_of(grid, size_hints or {})
        least = inductor_meta.get("min_rblock") or 1
        return registers.scaled_config(config, used, programs, device, min_rblock=least)

    known = ("warp_size", "max_threads_per_block")
    descent = CoordescTuner(
        is_native_matmul=bool(triton_meta.get("native_matmul")),
        is_mix_order_reduction=inductor_meta.get("RSPLIT_SIZE") is not None,
        name=name,
        size_hints=size_hints,
        inductor_meta={**{n: getattr(device, n, None) for n in known}, **inductor_meta},
    )
    return Stages(
        configs,
        None if is_custom else inductor_meta.get("spill_threshold", SPILLS),
        scaled if scales and not is_fixed else None,
        search,
        descent if refines and not is_fixed else None,
    )
