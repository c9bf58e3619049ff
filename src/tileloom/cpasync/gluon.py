"""Asynchronous copies for Gluon kernels: the vocabulary of `tileloom.cpasync`.

The names are those of the functions for CuTe DSL; the arguments are Gluon's: descriptors and tiles
instead of pointers, coordinates in the tensor's order. docs/cpasync_gluon.md has the table. They
compile on Triton 3.6 to 3.9, and the emulator reports a missing wait, fence or barrier.

>>> from tileloom.cpasync import gluon as cp  # doctest: +SKIP
"""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from tileloom.cpasync.pieces_gluon import mbarrier_wait, tma_load, tma_reduce, tma_store
from tileloom.device.barriers import (
    arrive_each_thread,
    mbarrier_allocate,
    named_barrier_arrive,
    named_barrier_sync,
)
from tileloom.device.compat import thread_barrier
from tileloom.device.cp_async import cp_async, mbarrier_cp_async_arrive
from tileloom.device.fences import fence_barrier_init, fence_proxy_async
from tileloom.device.memory import load_acquire, store_release
from tileloom.device.tma import tma_store_wait

__all__ = [
    "arrive_and_expect_tx",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "fence_barrier_init",
    "fence_proxy_async",
    "load_acquire",
    "mbarrier_allocate",
    "mbarrier_arrive",
    "mbarrier_arrive_each_thread",
    "mbarrier_cp_async_arrive",
    "mbarrier_cp_async_arrive_noinc",
    "mbarrier_init",
    "mbarrier_invalidate",
    "mbarrier_wait",
    "named_barrier_arrive",
    "named_barrier_sync",
    "store_release",
    "thread_barrier",
    "tma_load",
    "tma_reduce",
    "tma_store",
    "tma_store_wait",
]

cp_async_commit = async_copy.commit_group
cp_async_wait = async_copy.wait_group
mbarrier_init = mbarrier.init
mbarrier_invalidate = mbarrier.invalidate
mbarrier_arrive = mbarrier.arrive
mbarrier_arrive_each_thread = mbarrier_cp_async_arrive_noinc = arrive_each_thread
arrive_and_expect_tx = mbarrier.expect
