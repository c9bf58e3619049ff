"""GPU kernels for PyTorch on NVIDIA Hopper, and the tools to write, check, tune and launch them.

Importing this module loads no Triton, touches no GPU and reads no environment variable: the public
names are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom import emulator, errors, knobs, testing
    from tileloom.ops.attention import masks
    from tileloom.ops.attention.api import attention

__version__ = "0.1.0"

_PUBLIC = {
    "attention": "tileloom.ops.attention.api:attention",
    "masks": "tileloom.ops.attention.masks",
    "emulator": "tileloom.emulator",
    "errors": "tileloom.errors",
    "knobs": "tileloom.knobs",
    "testing": "tileloom.testing",
}

__all__ = ["__version__", "attention", "emulator", "errors", "knobs", "masks", "testing"]


def __getattr__(name: str) -> Any:
    target = _PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'tileloom' has no attribute '{name}'")
    module, _, attribute = target.partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
