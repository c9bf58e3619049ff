"""Choosing the config of a kernel: lists of candidates, their measuring, and a store of winners.

The names are resolved on first use; neither Triton nor torch is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.tuning.autotuner import CachingAutotuner
    from tileloom.tuning.bandwidth import DebugAutotuner, end_graph, start_graph
    from tileloom.tuning.bundled import bundle_winners
    from tileloom.tuning.cached import cached_autotune
    from tileloom.tuning.config import Config
    from tileloom.tuning.coordinate_descent import CoordescTuner
    from tileloom.tuning.filters import filter_for_determinism, filter_for_tma
    from tileloom.tuning.front import (
        cooperative_reduction,
        persistent_reduction,
        pointwise,
        reduction,
        split_scan,
    )
    from tileloom.tuning.generated import fixed_config, foreach, template, user_autotune
    from tileloom.tuning.grids import (
        BatchMatmulGrid3D,
        ComboKernelGrid,
        CooperativeReductionGrid,
        FixedGrid,
        Grid1D,
        Grid2D,
        Grid2DWithYZOverflow,
        Grid3D,
        GridExpr,
        MixOrderReductionGrid,
        PrecomputedGrid,
        RoundRobinComboKernelGrid,
        SequentialComboKernelGrid,
        SequentialFlattenComboKernelGrid,
        SplitScanGrid,
    )
    from tileloom.tuning.heuristics import (
        make_matmul_triton_config,
        match_target_block_product,
        triton_config,
        triton_config_reduction,
        triton_config_tiled_reduction,
    )
    from tileloom.tuning.heuristics_lists import configs
    from tileloom.tuning.hints import (
        AutotuneHint,
        DeviceProperties,
        Facts,
        HeuristicType,
        ReductionHint,
        TileHint,
    )
    from tileloom.tuning.loaded import NoTritonConfigsError
    from tileloom.tuning.of_operators import operators
    from tileloom.tuning.registers import scaled_config
    from tileloom.tuning.store import Store
    from tileloom.tuning.tuned_kernel import TunedKernel

_NAMES = {
    "autotuner": ("CachingAutotuner",),
    "bandwidth": ("DebugAutotuner", "end_graph", "start_graph"),
    "bundled": ("bundle_winners",),
    "cached": ("cached_autotune",),
    "config": ("Config",),
    "coordinate_descent": ("CoordescTuner",),
    "filters": ("filter_for_determinism", "filter_for_tma"),
    "front": (
        "cooperative_reduction", "persistent_reduction", "pointwise", "reduction", "split_scan",
    ),
    "generated": ("fixed_config", "foreach", "template", "user_autotune"),
    "grids": (
        "BatchMatmulGrid3D", "ComboKernelGrid", "CooperativeReductionGrid", "FixedGrid", "Grid1D",
        "Grid2D", "Grid2DWithYZOverflow", "Grid3D", "GridExpr", "MixOrderReductionGrid",
        "PrecomputedGrid", "RoundRobinComboKernelGrid", "SequentialComboKernelGrid",
        "SequentialFlattenComboKernelGrid", "SplitScanGrid",
    ),
    "heuristics": (
        "make_matmul_triton_config", "match_target_block_product", "triton_config",
        "triton_config_reduction", "triton_config_tiled_reduction",
    ),
    "heuristics_lists": ("configs",),
    "hints": (
        "AutotuneHint", "DeviceProperties", "Facts", "HeuristicType", "ReductionHint", "TileHint",
    ),
    "loaded": ("NoTritonConfigsError",),
    "of_operators": ("operators",),
    "registers": ("scaled_config",),
    "store": ("Store",),
    "tuned_kernel": ("TunedKernel",),
}  # fmt: skip
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AutotuneHint", "BatchMatmulGrid3D", "CachingAutotuner", "ComboKernelGrid", "Config",
    "CooperativeReductionGrid", "CoordescTuner", "DebugAutotuner", "DeviceProperties", "Facts",
    "FixedGrid", "Grid1D", "Grid2D", "Grid2DWithYZOverflow", "Grid3D", "GridExpr", "HeuristicType",
    "MixOrderReductionGrid", "NoTritonConfigsError", "PrecomputedGrid", "ReductionHint",
    "RoundRobinComboKernelGrid", "SequentialComboKernelGrid", "SequentialFlattenComboKernelGrid",
    "SplitScanGrid", "Store", "TileHint", "TunedKernel", "bundle_winners", "cached_autotune",
    "configs", "cooperative_reduction", "end_graph", "filter_for_determinism", "filter_for_tma",
    "fixed_config", "foreach", "make_matmul_triton_config", "match_target_block_product",
    "operators", "persistent_reduction", "pointwise", "reduction", "scaled_config", "split_scan",
    "start_graph", "template", "triton_config", "triton_config_reduction",
    "triton_config_tiled_reduction", "user_autotune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'tileloom.tuning' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"tileloom.tuning.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
