"""TileLang's namespace for CuTe DSL kernels, with our copy functions in place of its own.

Kernels that TileLang generates for its CuTe DSL target know the module
`tilelang.contrib.cutedsl` as ``tl``. With this module in its place they run on this package's
copies, mbarriers and fences; everything else is that of the installed TileLang, which is looked for
when a kernel first asks for it. docs/cpasync_tilelang.md has more.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tileloom import cpasync
from tileloom.errors import TileloomError

_THEIRS = "tilelang.contrib.cutedsl"

OURS = frozenset({
    "BYTES_PER_POINTER", "BYTES_PER_TENSORMAP",
    "cp_async_commit", "cp_async_gs", "cp_async_gs_conditional", "cp_async_shared_global",
    "cp_async_wait",
    "extract_tensormap_ptr", "prefetch_tma_descriptor", "tma_load", "tma_reduce", "tma_store",
    "tma_store_arrive", "tma_store_wait",
    "arrive_and_expect_tx", "mbarrier_arrive", "mbarrier_cp_async_arrive",
    "mbarrier_cp_async_arrive_noinc", "mbarrier_expect_tx", "mbarrier_init", "mbarrier_wait",
    "fence_barrier_init", "fence_proxy_async",
})  # fmt: skip
"""The names that are ours: all that `tilelang.contrib.cutedsl.cpasync` defines."""


class MissingTileLangError(TileloomError, ImportError):
    """TileLang is not installed, and a kernel uses a part of its namespace that is not ours."""


def __getattr__(name: str) -> Any:
    if name in OURS:
        return getattr(cpasync, name)
    if name.startswith("__"):  # what the import system asks of every module
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if importlib.util.find_spec("tilelang") is None:
        raise MissingTileLangError(
            f"cpasync.tilelang: {name} is TileLang's own, and TileLang is not installed; ours are "
            "the copies, mbarriers and fences. Try: pip install 'tilelang==0.1.15'."
        )
    try:
        return getattr(importlib.import_module(_THEIRS), name)
    except AttributeError:
        raise AttributeError(
            f"module '{__name__}' has no attribute '{name}', and neither has {_THEIRS}"
        ) from None


def __dir__() -> list[str]:
    return sorted(OURS)
