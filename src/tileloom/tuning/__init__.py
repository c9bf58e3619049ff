"""Choosing the config of a kernel: lists of candidates, their measuring, and a store of winners.

The names are resolved on first use; neither Triton nor torch is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.tuning.config import Config
    from tileloom.tuning.heuristics_lists import configs
    from tileloom.tuning.hints import AutotuneHint, Facts, ReductionHint, TileHint

_PUBLIC = {
    "AutotuneHint": "tileloom.tuning.hints:AutotuneHint",
    "Config": "tileloom.tuning.config:Config",
    "Facts": "tileloom.tuning.hints:Facts",
    "ReductionHint": "tileloom.tuning.hints:ReductionHint",
    "TileHint": "tileloom.tuning.hints:TileHint",
    "configs": "tileloom.tuning.heuristics_lists:configs",
}

__all__ = [
    "AutotuneHint",
    "Config",
    "Facts",
    "ReductionHint",
    "TileHint",
    "configs",
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
