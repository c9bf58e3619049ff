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
    from tileloom.tuning.front import (
        cooperative_reduction,
        persistent_reduction,
        pointwise,
        reduction,
        split_scan,
    )
    from tileloom.tuning.generated import fixed_config, foreach, template, user_autotune
    from tileloom.tuning.heuristics_lists import configs
    from tileloom.tuning.hints import AutotuneHint, Facts, ReductionHint, TileHint
    from tileloom.tuning.store import Store

_PUBLIC = {
    "AutotuneHint": "tileloom.tuning.hints:AutotuneHint",
    "CachingAutotuner": "tileloom.tuning.autotuner:CachingAutotuner",
    "Config": "tileloom.tuning.config:Config",
    "DebugAutotuner": "tileloom.tuning.bandwidth:DebugAutotuner",
    "Facts": "tileloom.tuning.hints:Facts",
    "ReductionHint": "tileloom.tuning.hints:ReductionHint",
    "Store": "tileloom.tuning.store:Store",
    "TileHint": "tileloom.tuning.hints:TileHint",
    "bundle_winners": "tileloom.tuning.bundled:bundle_winners",
    "cached_autotune": "tileloom.tuning.cached:cached_autotune",
    "configs": "tileloom.tuning.heuristics_lists:configs",
    "end_graph": "tileloom.tuning.bandwidth:end_graph",
    "start_graph": "tileloom.tuning.bandwidth:start_graph",
    **{
        name: f"tileloom.tuning.front:{name}"
        for name in (
            "cooperative_reduction", "persistent_reduction", "pointwise", "reduction", "split_scan",
        )
    },
    **{
        name: f"tileloom.tuning.generated:{name}"
        for name in ("fixed_config", "foreach", "template", "user_autotune")
    },
}  # fmt: skip

__all__ = [
    "AutotuneHint",
    "CachingAutotuner",
    "Config",
    "DebugAutotuner",
    "Facts",
    "ReductionHint",
    "Store",
    "TileHint",
    "bundle_winners",
    "cached_autotune",
    "configs",
    "cooperative_reduction",
    "end_graph",
    "fixed_config",
    "foreach",
    "persistent_reduction",
    "pointwise",
    "reduction",
    "split_scan",
    "start_graph",
    "template",
    "user_autotune",
]


def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'tileloom.tuning' has no attribute '{name}'")
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
