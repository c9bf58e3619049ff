"""Compiling kernels ahead of time and launching them, on every Triton from 3.6 to 3.9.

>>> from tileloom import launch
>>> launcher = launch.prepare(kernel, num_warps=4)  # doctest: +SKIP
>>> launcher[grid](x, y, n, BLOCK=1024)  # doctest: +SKIP

The names are resolved on first use; neither Triton nor torch is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.launch.launcher import Launcher, prepare

_PUBLIC = {
    "prepare": "tileloom.launch.launcher:prepare",
    "Launcher": "tileloom.launch.launcher:Launcher",
}

__all__ = ["Launcher", "prepare"]


def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'tileloom.launch' has no attribute '{name}'")
    module, _, attribute = target.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
