"""Hardware named barriers, and arrivals that cost no partition barrier.

Gluon has neither. Triton itself uses barrier ids 0, 1 and one for each partition, so ids 8 to 15
are free (Triton 3.6 to 3.9; `tests/launch/test_order.py` reads the PTX).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


@gluon.constexpr_function
def _named_barrier_ptx(operation, ident, threads):
    if ident not in range(8, 16):
        raise ValueError(
            f"named_barrier_{operation}: ident is {ident}; 8 to 15 are free, the others are "
            "Triton's own. Try: 8."
        )
    if threads not in range(32, 1025, 32):
        raise ValueError(
            f"named_barrier_{operation}: threads is {threads}; it must be a multiple of 32, the "
            "threads of a warp, up to 1024. Try: 128."
        )
    return f"bar.{operation} {ident}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def named_barrier_sync(ident: gl.constexpr, threads: gl.constexpr):
    """Wait until `threads` threads have arrived at barrier `ident`, this thread among them."""
    text: gl.constexpr = _named_barrier_ptx("sync", ident, threads)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def named_barrier_arrive(ident: gl.constexpr, threads: gl.constexpr):
    """Arrive at barrier `ident` without waiting; `threads` counts those that wait as well."""
    text: gl.constexpr = _named_barrier_ptx("arrive", ident, threads)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def arrive_each_thread(barrier):
    """Arrive at an mbarrier once for each thread of the partition.

    `mbarrier.arrive` lets one thread arrive after a barrier of the whole partition; this form needs
    no such barrier (measured +16 % for attention at 1k, H100, 2026-11-27). Initialise the mbarrier
    with the number of threads. It lowers to `cp.async.mbarrier.arrive.noinc`: with no cp.async of
    the thread in flight the arrival is immediate. It orders what the thread has finished, so wait
    for a wgmma before handing back the shared memory that it reads.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def mbarrier_allocate(count: gl.constexpr):
    """Allocate `count` mbarriers; `.index(i)` is one of them. They are not initialised."""
    return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
