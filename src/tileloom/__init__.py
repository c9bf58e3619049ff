"""GPU kernels for PyTorch on NVIDIA Hopper, and the tools to write, check, tune and launch them.

Importing this module loads no Triton, touches no GPU and reads no environment variable: the public
names are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom import emulator, errors, knobs, launch, testing
    from tileloom.ops.attention import masks
    from tileloom.ops.attention.api import attention
    from tileloom.ops.attention.varlen.api import attention_varlen
    from tileloom.ops.rowwise.cross_entropy.api import cross_entropy
    from tileloom.ops.rowwise.layer_norm.api import layer_norm
    from tileloom.ops.rowwise.rms_norm.api import rms_norm
    from tileloom.ops.rowwise.softmax.api import softmax
    from tileloom.ops.rowwise.swiglu.api import swiglu

__version__ = "0.1.0"

_PUBLIC = {
    "attention": "tileloom.ops.attention.api:attention",
    "attention_varlen": "tileloom.ops.attention.varlen.api:attention_varlen",
    "cross_entropy": "tileloom.ops.rowwise.cross_entropy.api:cross_entropy",
    "layer_norm": "tileloom.ops.rowwise.layer_norm.api:layer_norm",
    "masks": "tileloom.ops.attention.masks",
    "rms_norm": "tileloom.ops.rowwise.rms_norm.api:rms_norm",
    "softmax": "tileloom.ops.rowwise.softmax.api:softmax",
    "swiglu": "tileloom.ops.rowwise.swiglu.api:swiglu",
    "emulator": "tileloom.emulator",
    "errors": "tileloom.errors",
    "knobs": "tileloom.knobs",
    "launch": "tileloom.launch",
    "testing": "tileloom.testing",
}

__all__ = [
    "__version__", "attention", "attention_varlen", "cross_entropy", "emulator", "errors", "knobs",
    "launch", "layer_norm", "masks", "rms_norm", "softmax", "swiglu", "testing",
]  # fmt: skip


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
