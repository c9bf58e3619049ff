"""mbarriers, and the fences that asynchronous copies need.

An mbarrier has an arrival count, a count of bytes on their way, and a phase that flips when both
are used up. A wait names the parity of the phase whose end it waits for.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as prims

from tileloom.cpasync.pieces_checks import (
    assert_at_run_time,
    known_int,
    pointer_of,
    require_tma,
)
from tileloom.errors import OptionError

_LARGEST = 2**20 - 1


def _barrier(function, given):
    return pointer_of(function, "mbar_ptr", given, "barrier", 8)


def _count(function, argument, given, fewest):
    """A count as a 32-bit integer, checked where it is known."""
    known = known_int(given)
    if known is None:
        given = cutlass.Int32(given)
        assert_at_run_time(
            (given >= fewest) & (given <= _LARGEST),
            f"{function}: {argument} is not in {fewest} to {_LARGEST}",
        )
    elif not fewest <= known <= _LARGEST:
        raise OptionError(
            f"{function}: {argument} is {known}; accepted are {fewest} to {_LARGEST}. "
            f"Try: {fewest if known < fewest else _LARGEST}, or several phases."
        )
    return cutlass.Int32(given)


@dsl_user_op
def mbarrier_init(mbar_ptr, arrive_count, *, loc=None, ip=None):
    """Set up an mbarrier; one thread does it, then `fence_barrier_init` and a barrier of the block.

    Args:
        mbar_ptr: Pointer to 8 bytes of shared memory, at a multiple of 8.
        arrive_count: Arrivals that end a phase, 1 to 2^20 - 1; a constant or a run-time integer.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the count, the memory or a known address is none of these.

    PTX:
        ``mbarrier.init.shared.b64 [mbar], count;``
    """
    name = "mbarrier_init"
    count = _count(name, "arrive_count", arrive_count, 1)
    prims.mbarrier_init(_barrier(name, mbar_ptr), count, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_expect_tx(mbar_ptr, tx_count, *, loc=None, ip=None):
    """Let the current phase wait for `tx_count` further bytes, without an arrival.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        tx_count: Bytes, 0 to 2^20 - 1; a constant or a run-time integer.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the count, the memory or a known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture before sm_90.

    PTX:
        ``mbarrier.expect_tx.relaxed.cta.shared.b64 [mbar], bytes;``
    """
    name = "mbarrier_expect_tx"
    require_tma(name)
    count = _count(name, "tx_count", tx_count, 0)
    prims.mbarrier_expect_tx(_barrier(name, mbar_ptr), count, loc=loc, ip=ip)


@dsl_user_op
def arrive_and_expect_tx(mbar_ptr, tx_count, *, loc=None, ip=None):
    """Arrive, and let the current phase wait for `tx_count` further bytes.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        tx_count: Bytes, 0 to 2^20 - 1; a constant or a run-time integer.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the count, the memory or a known address is none of these.
        UnsupportedError: If the kernel is compiled for an architecture before sm_90.

    PTX:
        ``mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [mbar], bytes;``
    """
    name = "arrive_and_expect_tx"
    require_tma(name)
    count = _count(name, "tx_count", tx_count, 0)
    prims.mbarrier_arrive_expect_tx(_barrier(name, mbar_ptr), count, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_arrive(mbar_ptr, cta_id=None, *, loc=None, ip=None):
    """Arrive once at an mbarrier of this block, or of another block of the cluster.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        cta_id: Rank of the block in the cluster whose barrier at that address is meant; None, this
            block's.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the memory or a known address is none of these, or the rank is negative.
        UnsupportedError: If `cta_id` is given on an architecture before sm_90.

    PTX:
        ``mbarrier.arrive.shared.b64 state, [mbar];``, or ``mapa.shared::cluster`` and
        ``mbarrier.arrive.release.cluster.shared::cluster.b64 _, [mbar];``
    """
    name = "mbarrier_arrive"
    barrier = _barrier(name, mbar_ptr)
    if cta_id is not None:
        require_tma(f"{name} with cta_id")
        known = known_int(cta_id)
        if known is not None and not 0 <= known < 16:
            raise OptionError(
                f"{name}: cta_id is {known}; accepted are ranks in the cluster, 0 to 15. "
                "Try: None for this block."
            )
        barrier = prims.mapa(barrier, cutlass.Int32(cta_id), loc=loc, ip=ip)
    prims.mbarrier_arrive(barrier, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_cp_async_arrive(mbar_ptr, *, loc=None, ip=None):
    """Let the mbarrier know when this thread's cp.async so far are done; adds its own arrival.

    The pending count is raised by one and lowered when the copies are done: the count of
    `mbarrier_init` does not include it.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the memory or a known address is wrong.

    PTX:
        ``cp.async.mbarrier.arrive.shared.b64 [mbar];``
    """
    barrier = _barrier("mbarrier_cp_async_arrive", mbar_ptr)
    prims.cp_async_mbarrier_arrive(barrier, noinc=False, loc=loc, ip=ip)


@dsl_user_op
def mbarrier_cp_async_arrive_noinc(mbar_ptr, *, loc=None, ip=None):
    """Arrive at the mbarrier when this thread's cp.async so far are done.

    The count of `mbarrier_init` includes it, once for each thread that calls it.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        OptionError: If the memory or a known address is wrong.

    PTX:
        ``cp.async.mbarrier.arrive.noinc.shared.b64 [mbar];``
    """
    barrier = _barrier("mbarrier_cp_async_arrive_noinc", mbar_ptr)
    prims.cp_async_mbarrier_arrive(barrier, noinc=True, loc=loc, ip=ip)


@cute.jit
def _wait(barrier, phase, timeout, how: cutlass.Constexpr):
    while not prims.mbarrier_try_wait_parity(barrier, phase, time_limit=timeout, **how):
        pass


def mbarrier_wait(mbar_ptr, phase, timeout_ns=10_000_000, *, scope="cta"):
    """Wait until the phase of this parity has ended, however long that takes.

    Args:
        mbar_ptr: Pointer to the mbarrier.
        phase: 0 for the first phase, 1 for the second, and so on in turn; a constant or a run-time
            integer. The parity of a phase not begun yet returns at once.
        timeout_ns: How long the hardware may suspend the thread before it looks again; the wait
            itself has no limit.
        scope: Whose ordinary writes before their arrivals are seen after the wait: ``"cta"``, those
            of this block; ``"cluster"``, also those of the blocks that arrive by `cta_id`. What
            bulk copies wrote is seen either way.

    Raises:
        OptionError: If a constant phase is neither 0 nor 1, the time is negative, the scope is none
            of these, or the memory or a known address is wrong.
        UnsupportedError: If the kernel is compiled for an architecture before sm_90.

    PTX:
        A loop of ``mbarrier.try_wait.parity.acquire.{cta,cluster}.shared::cta.b64 done, [mbar],
        phase, nanoseconds;``

    Source: `tilelang.contrib.cutedsl` (its first versions tried once, so that waits of more than
    about 10 ms fell through).
    """
    name = "mbarrier_wait"
    require_tma(name)
    known = known_int(phase)
    if known is not None and known not in (0, 1):
        raise OptionError(
            f"{name}: phase is {known}; accepted are the parities 0 and 1. Try: {known & 1}."
        )
    time = known_int(timeout_ns)
    if time is not None and not 0 <= time < 1 << 31:
        raise OptionError(
            f"{name}: timeout_ns is {time}; accepted are 0 to {2**31 - 1}. Try: 10_000_000."
        )
    if scope not in ("cta", "cluster"):
        raise OptionError(
            f"{name}: scope is {scope!r}; accepted are 'cta' and 'cluster'. Try: 'cta'."
        )
    if known is None:
        phase = cutlass.Int32(phase)
        assert_at_run_time((phase >> 1) == 0, f"{name}: phase is neither 0 nor 1")
    how = {} if scope == "cta" else {"scope": prims.MBarrierScope.CLUSTER}
    _wait(_barrier(name, mbar_ptr), cutlass.Int32(phase), cutlass.Int32(timeout_ns), how)


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None):
    """Let bulk copies see what this thread wrote to the block's shared memory.

    Every thread that wrote calls it, before the barrier after which one thread issues the store.

    PTX:
        ``fence.proxy.async.shared::cta;``

    Args:
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        UnsupportedError: If the kernel is compiled for an architecture before sm_90.
    """
    require_tma("fence_proxy_async")
    prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta, loc=loc, ip=ip)


@dsl_user_op
def fence_barrier_init(*, loc=None, ip=None):
    """Let the cluster and bulk copies see the mbarriers that this thread set up.

    PTX:
        ``fence.mbarrier_init.release.cluster;``

    Args:
        loc: Source location, of the DSL's own making.
        ip: Insertion point, of the DSL's own making.

    Raises:
        UnsupportedError: If the kernel is compiled for an architecture before sm_90.
    """
    require_tma("fence_barrier_init")
    prims.fence_mbarrier_init(loc=loc, ip=ip)
