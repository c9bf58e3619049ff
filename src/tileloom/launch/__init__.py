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
    from tileloom.launch.aot import KernelSpec, compile_aot
    from tileloom.launch.bundle import Bundle, load_bundle
    from tileloom.launch.bundle_build import build_bundle
    from tileloom.launch.bundle_descriptor import TensorDescriptor
    from tileloom.launch.bundle_specs import Signature, specs_of
    from tileloom.launch.bundle_use import record_specs, use_bundle
    from tileloom.launch.launcher import Launcher, prepare
    from tileloom.launch.watch import refresh

_PUBLIC = {
    "Bundle": "tileloom.launch.bundle:Bundle",
    "KernelSpec": "tileloom.launch.aot:KernelSpec",
    "Signature": "tileloom.launch.bundle_specs:Signature",
    "TensorDescriptor": "tileloom.launch.bundle_descriptor:TensorDescriptor",
    "build_bundle": "tileloom.launch.bundle_build:build_bundle",
    "compile_aot": "tileloom.launch.aot:compile_aot",
    "load_bundle": "tileloom.launch.bundle:load_bundle",
    "record_specs": "tileloom.launch.bundle_use:record_specs",
    "specs_of": "tileloom.launch.bundle_specs:specs_of",
    "use_bundle": "tileloom.launch.bundle_use:use_bundle",
    "prepare": "tileloom.launch.launcher:prepare",
    "Launcher": "tileloom.launch.launcher:Launcher",
    "refresh": "tileloom.launch.watch:refresh",
}

__all__ = [
    "Bundle",
    "KernelSpec",
    "Launcher",
    "Signature",
    "TensorDescriptor",
    "build_bundle",
    "compile_aot",
    "load_bundle",
    "prepare",
    "record_specs",
    "refresh",
    "specs_of",
    "use_bundle",
]


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
