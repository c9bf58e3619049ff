"""GPU kernels for PyTorch on NVIDIA Hopper, and the tools to write, check, tune and launch them.

Importing this module loads no Triton, touches no GPU and reads no environment variable: the public
names are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom import (
        cpasync,
        emulator,
        errors,
        knobs,
        launch,
        log,
        scheduling,
        testing,
        tuning,
    )
    from tileloom.ops.attention import attention, attention_varlen, masks
    from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
    from tileloom.ops.rowwise.cross_entropy import cross_entropy
    from tileloom.ops.rowwise.layer_norm import layer_norm
    from tileloom.ops.rowwise.rms_norm import rms_norm
    from tileloom.ops.rowwise.softmax import softmax
    from tileloom.ops.rowwise.swiglu import swiglu

__version__ = "0.1.0"

_ROWWISE = ("cross_entropy", "layer_norm", "rms_norm", "softmax", "swiglu")
_MODULES = (
    "cpasync", "emulator", "errors", "knobs", "launch", "log", "scheduling", "testing", "tuning",
)  # fmt: skip
_PUBLIC = {
    "attention": "tileloom.ops.attention.api:attention",
    "attention_varlen": "tileloom.ops.attention.varlen.api:attention_varlen",
    "async_input_matmul": "tileloom.ops.gemm.async_api:async_input_matmul",
    "check_signals": "tileloom.ops.gemm.signals:check_signals",
    "masks": "tileloom.ops.attention.masks",
    "matmul": "tileloom.ops.gemm.api:matmul",
    **{name: f"tileloom.ops.rowwise.{name}.api:{name}" for name in _ROWWISE},
    **{name: f"tileloom.{name}" for name in _MODULES},
}

__all__ = [
    "__version__", "async_input_matmul", "attention", "attention_varlen", "check_signals",
    "cpasync", "cross_entropy", "emulator", "errors", "knobs", "launch", "layer_norm", "log",
    "masks", "matmul", "rms_norm", "scheduling", "softmax", "swiglu", "testing", "tuning",
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
