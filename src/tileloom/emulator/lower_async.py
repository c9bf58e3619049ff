"""Lowerings of asynchronous work: mbarriers, fences, TMA, cp.async, wgmma and their waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dtypes, global_access, global_edges
from tileloom.emulator.barriers import MAX_COUNT, Barrier
from tileloom.emulator.dialect import STORE_WAIT_SAYS_READ_ONLY
from tileloom.emulator.ir import Loc, Op
from tileloom.emulator.lower import STEP, Program, Run, lowers
from tileloom.emulator.lower_global import (
    REDUCE_WORDS,
    lanes,
    pointee,
    reduction,
    tma_read,
    tma_write,
)
from tileloom.emulator.lower_shared import check_written, view_of
from tileloom.emulator.machine import Frame, Partition, Wait
from tileloom.emulator.memory import View
from tileloom.emulator.report import Access


# ---- mbarriers
def barrier_of(partition: Partition, view: View, loc: Loc, what: str) -> Barrier | None:
    """Return the mbarrier in a view, reporting one that was not initialised."""
    barrier = view.buffer.bars.get(view.key[0])
    if barrier is None:
        partition.report(
            "barrier", f"mbarrier {view.name} is used before mbarrier.init", loc, what,
            other=Access(view.buffer.loc, "allocation", partition.name, partition.cta.program),
        )  # fmt: skip
        return None
    if partition.clock.get(barrier.made_by.key, 0) < barrier.made_at:
        partition.report(
            "barrier", f"mbarrier {view.name} is used by a partition that need not see its "
            "initialisation yet", loc, what,
            other=Access(barrier.loc, "mbarrier.init", barrier.made_by.name, partition.cta.program),
            hint="initialise barriers before warp_specialize",
        )  # fmt: skip
    return barrier


def enabled(f: Frame, slot: int | None) -> bool:
    """Whether a predicate operand is absent or true."""
    return slot is None or bool(f[slot])


@lowers("ttng.init_barrier", kind=STEP)
def _init(op: Op, program: Program) -> Run:
    (a,) = op.operands
    count = int(op.words[0])

    def run(f: Frame) -> None:
        partition, view = f[0], view_of(f, a)
        old = view.buffer.bars.get(view.key[0])
        if old is not None:
            partition.report(
                "barrier", f"mbarrier {view.name} is initialised again without invalidate", op.loc,
                "mbarrier.init",
                other=Access(old.loc, "mbarrier.init", old.made_by.name, partition.cta.program),
                hint="mbarrier.invalidate first",
            )  # fmt: skip
        if not 1 <= count <= MAX_COUNT:
            partition.report(
                "barrier", f"mbarrier {view.name} is initialised with count {count}; the hardware "
                f"takes 1 to {MAX_COUNT}", op.loc, "mbarrier.init",
            )  # fmt: skip
        launch = partition.cta.launch
        launch.shared.access(view, partition, "mbarrier.init", op.loc, write=True)
        view.init[...] = True
        barrier = Barrier(view.name, count, launch.new_key(), op.loc, partition)
        partition.clock[partition.key] += 1
        view.buffer.bars[view.key[0]] = barrier

    return run


@lowers("ttng.inval_barrier", kind=STEP)
def _invalidate(op: Op, program: Program) -> Run:
    (a,) = op.operands

    def run(f: Frame) -> None:
        partition, view = f[0], view_of(f, a)
        barrier = barrier_of(partition, view, op.loc, "mbarrier.invalidate")
        if barrier is None:
            return
        if barrier.loads or partition.clock.get(barrier.key, 0) < barrier.last_load:
            partition.report(
                "barrier", f"mbarrier {view.name} is invalidated while a copy that signals it is "
                           f"not "
                "known to be complete", op.loc, "mbarrier.invalidate", hint="wait for it first",
            )  # fmt: skip
        view.buffer.bars.pop(view.key[0], None)

    return run


@lowers("ttng.barrier_expect", kind=STEP)
def _expect(op: Op, program: Program) -> Run:
    a, *rest = op.operands
    predicate = rest[0] if rest else None
    nbytes = int(op.words[0])

    def run(f: Frame) -> None:
        if not enabled(f, predicate):
            return
        barrier = barrier_of(f[0], view_of(f, a), op.loc, "mbarrier.expect")
        if barrier is not None:
            barrier.tx += nbytes
            barrier.arrive(f[0], 1, op.loc, "mbarrier.expect")

    return run


@lowers("ttng.arrive_barrier", kind=STEP, attrs=["perThread"], words=r"\d+|perThread")
def _arrive(op: Op, program: Program) -> Run:
    a, *rest = op.operands
    predicate = rest[0] if rest else None
    count = int(op.words[0])
    each = "perThread" in op.words or "perThread" in op.attrs

    def run(f: Frame) -> None:
        if not enabled(f, predicate):
            return
        barrier = barrier_of(f[0], view_of(f, a), op.loc, "mbarrier.arrive")
        if barrier is not None:
            times = 32 * f[0].warps if each else 1
            barrier.arrive(f[0], count * times, op.loc, "mbarrier.arrive")

    return run


@lowers("ttng.wait_barrier", kind=STEP, words=r"deps")
def _wait(op: Op, program: Program) -> Run:
    own = op.text.split(" : ")[0].split(" deps ")[0].count("%")
    a, parity_slot = op.operands[:2]
    predicate = op.operands[2] if own > 2 else None
    loc = op.loc

    def run(f: Frame) -> Wait | None:
        if not enabled(f, predicate):
            return None
        partition: Partition = f[0]
        barrier = barrier_of(partition, view_of(f, a), loc, "mbarrier.wait")
        if barrier is None:
            return None
        parity = f[parity_slot] & 1
        if barrier.passed(parity):
            barrier.acquire(partition)
            return None

        def text() -> str:
            return f"parity {parity} of {barrier.state()}"

        return Wait(lambda: barrier.passed(parity), text, loc, lambda: barrier.acquire(partition))

    return run


@lowers("ttng.fence_async_shared", "ttng.fence_async", kind=STEP, attrs=["bCluster"], words=r"")
def _proxy_fence(op: Op, program: Program) -> Run:
    def run(f: Frame) -> None:
        f[0].fence_proxies(memory=False)

    return run


@lowers(
    "ttng.fence_mbarrier_init_release_cluster", "ttng.fence_mbarrier_init", kind=STEP, words=r""
)
def _init_fence(op: Op, program: Program) -> Run:
    def run(f: Frame) -> None:
        for buffer in f[0].cta.buffers.values():
            for barrier in buffer.bars.values():
                barrier.fenced = True

    return run


def _check_init_fence(partition: Partition, barrier: Barrier, loc: Loc) -> None:
    """Note an mbarrier that the TMA unit may meet before its initialisation."""
    if barrier.fenced or not partition.cta.launch.shared.fences:
        return
    barrier.fenced = True
    if partition.fence.get(barrier.made_by.key, 0) < barrier.made_at:
        partition.report(
            "barrier", f"mbarrier {barrier.name} is given to a TMA load with no fence since its "
            "mbarrier.init", loc, "TMA load", severity="info",
            other=Access(barrier.loc, "mbarrier.init", barrier.made_by.name, partition.cta.program),
            hint="fence_async_shared() after the last mbarrier.init",
        )  # fmt: skip


@lowers("ttng.fence", kind=STEP, attrs=["scope"], words=r"gpu|cta|sys|release|acquire|acq_rel")
def _other_fence(op: Op, program: Program) -> Run:
    def run(f: Frame) -> None:
        global_edges.fence(f[0])

    return run


# ---- TMA
_TMA_ATTRS = ["isVolatile", "cache", "evict", "operandSegmentSizes", "multicast", "offsets"]


@lowers("ttng.async_tma_copy_global_to_local", kind=STEP, attrs=_TMA_ATTRS,
        words=r"evict_\w+|ca|cg|cacheModifier|evictionPolicy")  # fmt: skip
def _tma_load(op: Op, program: Program) -> Run:
    source, *rest = op.operands
    count = op.groups[0]
    at, (target, bar, predicate) = rest[:count], rest[count:]
    loc = op.loc

    def run(f: Frame) -> None:
        if not f[predicate]:
            return
        partition: Partition = f[0]
        cta = partition.cta
        desc, corner = f[source], [f[s] for s in at]
        view = view_of(f, target)
        barrier = barrier_of(partition, view_of(f, bar), loc, "TMA load")
        if barrier is None:
            return
        _check_init_fence(partition, barrier, loc)
        record = cta.launch.shared.access(
            view, partition, "TMA load", loc, write=True, proxy="async", key=barrier.key
        )
        source_record = tma_read(partition, desc, corner, loc, "TMA load", key=barrier.key)
        if dtypes.is_float(view.buffer.elem):
            view.data.fill(np.nan)
        view.init[...] = True
        nbytes = view.data.size * dtypes.size_of(view.buffer.elem)
        barrier.loads.append(record)

        def complete() -> None:
            view.data[...] = desc.read(corner).reshape(view.data.shape)
            record.epoch = source_record.epoch = barrier.last_load = barrier.phase + 1
            barrier.loads.remove(record)
            barrier.transfer(nbytes)

        cta.issue("TMA load", partition, complete, loc)

    return run


def _issue_store(
    f: Frame, desc: Any, corner: list[int], view: View, loc: Loc, kind: str,
    effect: Callable[[np.ndarray], None], atomic: bool = False,
) -> None:  # fmt: skip
    partition: Partition = f[0]
    cta = partition.cta
    queue = partition.stores
    queue.issued += 1
    queue.last = loc
    number = queue.issued
    cta.launch.shared.access(
        view, partition, kind, loc, write=False, proxy="async", key=queue.key, epoch=number
    )
    check_written(partition, view, kind, loc)
    tma_write(
        partition, desc, corner, loc, kind, key=partition.stored_key, epoch=number, atomic=atomic
    )

    def complete() -> None:
        effect(view.data)
        queue.done = number
        cta.launch.changed()

    cta.issue(kind, partition, complete, loc, queue=("TMA store", partition.key))


@lowers("ttng.async_tma_copy_local_to_global", kind=STEP, attrs=_TMA_ATTRS, words=r"evict_\w+")
def _tma_store(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, source = rest[:count], rest[count]

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        view = view_of(f, source)
        _issue_store(f, desc, corner, view, op.loc, "TMA store", lambda x: desc.write(corner, x))

    return run


@lowers("ttng.async_tma_reduce", kind=STEP, attrs=_TMA_ATTRS, words=REDUCE_WORDS)
def _tma_reduce(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, source = rest[:count], rest[count]
    combine = reduction(op)

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        view = view_of(f, source)

        def effect(x: np.ndarray) -> None:
            desc.write(corner, combine(desc.read(corner), x.reshape(desc.block)))

        _issue_store(f, desc, corner, view, op.loc, "TMA reduce", effect, atomic=True)

    return run


def wait_stores(partition: Partition, pending: int, loc: Loc, what: str, full: bool) -> Wait | None:
    """Wait until all but the last stores have read shared memory (`full`: have written too)."""
    queue = partition.stores
    target = queue.issued - pending
    if target <= partition.clock.get(queue.key, 0) and not full:
        return None

    def known() -> None:
        for key in (queue.key, partition.stored_key) if full else (queue.key,):
            partition.clock[key] = max(partition.clock.get(key, 0), target)

    if queue.done >= target:
        known()
        return None
    return Wait(lambda: queue.done >= target, lambda: what, loc, known)


_READ_ONLY = "false" if STORE_WAIT_SAYS_READ_ONLY else "true"


@lowers(
    "ttng.async_tma_store_wait", kind=STEP, attrs=["pendings", "read_only"], words=r""
)
def _store_wait(op: Op, program: Program) -> Run:
    pending = op.int_attr("pendings", 0)
    read_only = op.attrs.get("read_only", _READ_ONLY) != "false"

    def run(f: Frame) -> Wait | None:
        return wait_stores(f[0], pending, op.loc, f"tma.store_wait({pending})", not read_only)

    return run


# ---- cp.async
@lowers("ttg.async_copy_global_to_local", kind=STEP, words=r"mask|other|evict_\w+|ca|cg",
        attrs=["cacheModifier", "evictionPolicy", "isVolatile", "contiguity"])  # fmt: skip
def _copy(op: Op, program: Program) -> Run:
    address, target, *rest = op.operands
    mask_slot = rest[0] if "mask" in op.words else None
    other_slot = rest[-1] if "other" in op.words else None
    d = op.results[0] if op.results else None
    elem = pointee(op)
    loc = op.loc

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        cta = partition.cta
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        other = None if other_slot is None else f[other_slot]
        view = view_of(f, target)
        queue = partition.copies
        queue.issued += 1
        number = queue.issued
        cta.launch.shared.access(
            view, partition, "cp.async", loc, write=True, key=queue.key, epoch=number
        )
        # Read now, so that bounds and races are judged at the statement; the value lands later.
        value = global_access.read(partition, where, mask, other, elem, loc, "cp.async")
        if dtypes.is_float(view.buffer.elem):
            view.data.fill(np.nan)
        view.init[...] = True
        partition.flying.add(number)

        def complete() -> None:
            view.data[...] = value
            partition.flying.discard(number)

        cta.issue("cp.async", partition, complete, loc)
        if d is not None:
            f[d] = None

    return run


@lowers("ttg.async_commit_group", kind=STEP, words=r"tokens")
def _commit(op: Op, program: Program) -> Run:
    d = op.results[0] if op.results else None

    def run(f: Frame) -> None:
        f[0].groups.append(f[0].copies.issued)
        if d is not None:
            f[d] = None

    return run


@lowers("ttg.async_wait", kind=STEP, attrs=["num"], words=r"")
def _copy_wait(op: Op, program: Program) -> Run:
    pending = op.int_attr("num", 0)
    d = op.results[0] if op.results else None

    def run(f: Frame) -> Wait | None:
        if d is not None:
            f[d] = None
        partition: Partition = f[0]
        groups = partition.groups
        if len(groups) <= pending:
            return None
        target = groups[len(groups) - pending - 1]
        partition.groups = groups[len(groups) - pending - 1 :]

        def ready() -> bool:
            return not any(n <= target for n in partition.flying)

        def known() -> None:
            key = partition.copies.key
            partition.clock[key] = max(partition.clock.get(key, 0), target)

        if ready():
            known()
            return None
        return Wait(ready, lambda: f"async_copy.wait_group({pending})", op.loc, known)

    return run


@lowers("ttng.async_copy_mbarrier_arrive", kind=STEP, attrs=["noIncrement"], words=r"noIncrement")
def _copy_arrive(op: Op, program: Program) -> Run:
    (a,) = op.operands
    fixed = "noIncrement" in op.attrs or "noIncrement" in op.words
    loc = op.loc
    what = "async_copy.mbarrier_arrive"

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        barrier = barrier_of(partition, view_of(f, a), loc, what)
        if barrier is None:
            return
        threads = 32 * partition.warps
        target = partition.copies.issued
        partition.clock[partition.key] += 1
        clock, proxy = dict(partition.clock), dict(partition.fence)
        clock[partition.copies.key] = target
        if not fixed:
            barrier.pending += threads

        def complete() -> None:
            barrier.join(clock, proxy)
            barrier.count_down(partition, threads, loc, what)

        def guard() -> bool:
            return not any(n <= target for n in partition.flying)

        if guard():
            complete()
        else:
            partition.cta.issue(what, partition, complete, loc, guard=guard)

    return run
