"""Asynchronous copies for kernels: cp.async, TMA, mbarriers and fences under one vocabulary.

The functions are for kernels in CuTe DSL, under the names and signatures of
`tilelang.contrib.cutedsl.cpasync`. They need the extra ``cute`` (nvidia-cutlass-dsl 4.7 or newer),
which is loaded when one of them is first used; importing this package loads nothing.
docs/cpasync.md lists every function with the PTX that it emits.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileloom.cpasync.eviction import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL, cache_policy
    from tileloom.cpasync.extra import MissingCuteError
    from tileloom.cpasync.pieces_copy import (
        cp_async_commit,
        cp_async_gs,
        cp_async_gs_conditional,
        cp_async_shared_global,
        cp_async_wait,
    )
    from tileloom.cpasync.pieces_mbarrier import (
        arrive_and_expect_tx,
        fence_barrier_init,
        fence_proxy_async,
        mbarrier_arrive,
        mbarrier_cp_async_arrive,
        mbarrier_cp_async_arrive_noinc,
        mbarrier_expect_tx,
        mbarrier_init,
        mbarrier_wait,
    )
    from tileloom.cpasync.pieces_tma import (
        bulk_load,
        bulk_store,
        extract_tensormap_ptr,
        prefetch_tma_descriptor,
        tma_load,
        tma_reduce,
        tma_store,
        tma_store_arrive,
        tma_store_wait,
    )
    from tileloom.cpasync.tensormap import TensorMap, TensorMapTable

BYTES_PER_TENSORMAP = 128
"""Size of one TMA descriptor; it lies at a multiple of 64 bytes."""

BYTES_PER_POINTER = 8
"""Size of a device pointer."""

# What needs no extra, and what is written in CuTe DSL.
_PLAIN = {
    "EVICT_FIRST": "eviction",
    "EVICT_LAST": "eviction",
    "EVICT_NORMAL": "eviction",
    "MissingCuteError": "extra",
    "TensorMap": "tensormap",
    "TensorMapTable": "tensormap",
    "cache_policy": "eviction",
}
_CUTE = {
    name: module
    for module, names in {
        "pieces_copy": (
            "cp_async_commit",
            "cp_async_gs",
            "cp_async_gs_conditional",
            "cp_async_shared_global",
            "cp_async_wait",
        ),
        "pieces_mbarrier": (
            "arrive_and_expect_tx",
            "fence_barrier_init",
            "fence_proxy_async",
            "mbarrier_arrive",
            "mbarrier_cp_async_arrive",
            "mbarrier_cp_async_arrive_noinc",
            "mbarrier_expect_tx",
            "mbarrier_init",
            "mbarrier_wait",
        ),
        "pieces_tma": (
            "bulk_load",
            "bulk_store",
            "extract_tensormap_ptr",
            "prefetch_tma_descriptor",
            "tma_load",
            "tma_reduce",
            "tma_store",
            "tma_store_arrive",
            "tma_store_wait",
        ),
    }.items()
    for name in names
}

__all__ = [
    "BYTES_PER_POINTER",
    "BYTES_PER_TENSORMAP",
    "EVICT_FIRST",
    "EVICT_LAST",
    "EVICT_NORMAL",
    "MissingCuteError",
    "TensorMap",
    "TensorMapTable",
    "arrive_and_expect_tx",
    "bulk_load",
    "bulk_store",
    "cache_policy",
    "cp_async_commit",
    "cp_async_gs",
    "cp_async_gs_conditional",
    "cp_async_shared_global",
    "cp_async_wait",
    "extract_tensormap_ptr",
    "fence_barrier_init",
    "fence_proxy_async",
    "mbarrier_arrive",
    "mbarrier_cp_async_arrive",
    "mbarrier_cp_async_arrive_noinc",
    "mbarrier_expect_tx",
    "mbarrier_init",
    "mbarrier_wait",
    "prefetch_tma_descriptor",
    "tma_load",
    "tma_reduce",
    "tma_store",
    "tma_store_arrive",
    "tma_store_wait",
]


def __getattr__(name: str) -> Any:
    module = _PLAIN.get(name) or _CUTE.get(name)
    if module is None:
        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise AttributeError(f"module 'tileloom.cpasync' has no attribute '{name}'{hint}")
    if name in _CUTE:
        from tileloom.cpasync.extra import require_cute

        require_cute(name)
    value = getattr(importlib.import_module(f"tileloom.cpasync.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
