"""The one table of Gluon names that differ between Triton 3.6 and 3.9.

| here | 3.6, 3.7 | 3.9 |
|---|---|---|
| `tma_load` | `tma.async_copy_global_to_shared` | `tma.async_load` |
| `tma_store` | `tma.async_copy_shared_to_global` | `tma.async_store` |
| `async_copy_load` | `async_copy.async_copy_global_to_shared` | `async_copy.async_load` |
| `thread_barrier` | `gl.thread_barrier` (3.6) | `gl.barrier` (3.7 and later) |
| `reinterpret` | `smem._reinterpret` | `smem.reinterpret` |
| `aggregate` | `triton.language.core._aggregate` | `triton.aggregate` |

Where a later version kept the old name it raises, so the new name is asked for first.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language import core

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_copy_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
aggregate = getattr(triton, "aggregate", None) or core._aggregate
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
