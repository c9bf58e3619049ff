"""Lowerings of asynchronous work: TMA, cp.async, and their waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator import dtypes, global_access, phases
from tileloom.emulator.barriers import Barrier
from tileloom.emulator.cluster import Spread, spread_of
from tileloom.emulator.dialect import STORE_WAIT_SAYS_READ_ONLY
from tileloom.emulator.happens_before import Clock, Record, join
from tileloom.emulator.inflight import Queue
from tileloom.emulator.ir import Loc, Op, Type, parse_type, split_top
from tileloom.emulator.lower import STEP, Program, Run, lowers
from tileloom.emulator.lower_barriers import barrier_of, check_init_fence, owners
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
from tileloom.emulator.report import UnsupportedKernelError

# ---- TMA
_TMA_ATTRS = ["isVolatile", "cache", "evict", "operandSegmentSizes", "multicast", "offsets"]


@lowers("ttng.async_tma_copy_global_to_local", kind=STEP, attrs=_TMA_ATTRS,
        words=r"evict_\w+|ca|cg|cacheModifier|evictionPolicy|multicast")  # fmt: skip
def _tma_load(op: Op, program: Program) -> Run:
    source, *rest = op.operands
    count = len(rest) - 3  # coordinates, and the offsets of a load in im2col mode
    at, (target, bar, predicate) = rest[:count], rest[count:]
    loc = op.loc
    routes, pieces = _load_routes(op, program)

    def run(f: Frame) -> None:
        if not f[predicate]:
            return
        partition: Partition = f[0]
        cta = partition.cta
        desc, corner = f[source], [f[s] for s in at]
        view, bars = view_of(f, target), view_of(f, bar)
        signals: list[tuple[Barrier, list[Record]]] = []
        for sender, part, receivers in routes:
            issuer = partition.team[sender]
            for rank in receivers:
                barrier = barrier_of(issuer, bars, loc, "TMA load", rank)
                if barrier is None:
                    return
                check_init_fence(issuer, barrier, loc)
                record = cta.launch.shared.access(
                    view, issuer, "TMA load", loc, write=True, proxy="async", key=barrier.key,
                    rank=rank,
                )  # fmt: skip
                signals.append((barrier, [record]))
            barrier, records = signals[-1]
            records.append(
                tma_read(issuer, desc, corner, loc, "TMA load", key=barrier.key, part=part)
            )
        if dtypes.is_float(view.buffer.elem):
            view.data.fill(np.nan)
        view.init[...] = True
        nbytes = view.data.size * dtypes.size_of(view.buffer.elem) // pieces
        knowledge = [
            phases.known(partition.team[sender]) for sender, _, many in routes for _ in many
        ]
        for barrier, records in signals:
            barrier.loads += records

        def complete() -> None:
            view.current()[...] = desc.read(corner).reshape(view.data.shape)
            for (barrier, records), knows in zip(signals, knowledge):
                barrier.last_load = records[0]
                for record in records:
                    record.epoch = barrier.phase + 1
                    barrier.loads.remove(record)
                barrier.transfer(nbytes, knows, (records[0].partition, loc, "TMA load"))

        cta.issue("TMA load", partition, complete, loc)

    return run


def _load_routes(
    op: Op, program: Program
) -> tuple[list[tuple[int, tuple[slice, ...] | None, list[int]]], int]:
    """Return which CTA loads which part of the box into which CTAs, and the number of parts."""
    module = program.module
    if module.num_ctas == 1:
        return [(0, None, [0])], 1
    spread = spread_of(op.type, module)
    if spread_of(op.operand_types()[-1], module).pieces < module.num_ctas:
        raise UnsupportedKernelError(
            "a TMA load that signals an mbarrier which CTAs share, which is Blackwell's: allocate "
            "it with two_ctas=False",
            op.loc,
        )
    everyone = range(module.num_ctas)
    if "multicast" not in op.attrs and "multicast" not in op.words:
        return [(rank, spread.parts[rank], [rank]) for rank in everyone], spread.pieces
    leads = sorted(set(spread.leads))
    return [(rank, spread.parts[rank], spread.group(rank)) for rank in leads], spread.pieces


def _issue_store(
    f: Frame, desc: Any, corner: list[int], view: View, loc: Loc, kind: str,
    effect: Callable[[np.ndarray], None], spread: Spread, atomic: bool = False,
) -> None:  # fmt: skip
    """Issue a store of a box; in a cluster each CTA stores the part that it holds.

    It reads the tile, and later writes memory: a wait for the one is none for the other.
    """
    partition: Partition = f[0]
    cta = partition.cta
    done: list[tuple[Queue, int]] = []
    for one in owners(partition, spread):
        queue = one.stores
        queue.issued += 1
        queue.last = loc
        done.append((queue, queue.issued))
        cta.launch.shared.access(
            view, one, kind, loc, write=False, proxy="async", key=queue.key, epoch=queue.issued
        )
        tma_write(
            one, desc, corner, loc, kind, key=one.stored_key, epoch=queue.issued, atomic=atomic,
            part=spread.parts[one.rank] if cta.clustered else None,
        )  # fmt: skip
    check_written(partition, view, kind, loc)

    def read() -> None:
        tile = view.current().copy()
        for queue, number in done:
            queue.done = number
        cta.issue(
            f"{kind}: write", partition, lambda: land(tile), loc,
            queue=("TMA write", partition.key), outlives=True,
        )  # fmt: skip

    def land(tile: np.ndarray) -> None:
        effect(tile)
        for queue, number in done:
            queue.landed = number
        cta.launch.changed()

    cta.issue(kind, partition, read, loc, queue=("TMA store", partition.key))


@lowers("ttng.async_tma_copy_local_to_global", kind=STEP, attrs=_TMA_ATTRS, words=r"evict_\w+")
def _tma_store(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, source = rest[:count], rest[count]
    spread = spread_of(op.operand_types()[-1], program.module)

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        view = view_of(f, source)
        _issue_store(
            f, desc, corner, view, op.loc, "TMA store", lambda x: desc.write(corner, x), spread
        )

    return run


@lowers("ttng.async_tma_reduce", kind=STEP, attrs=_TMA_ATTRS, words=REDUCE_WORDS)
def _tma_reduce(op: Op, program: Program) -> Run:
    target, *rest = op.operands
    count = op.groups[0]
    at, source = rest[:count], rest[count]
    combine = reduction(op)
    spread = spread_of(op.operand_types()[-1], program.module)
    if spread.pieces < program.module.num_ctas:
        raise UnsupportedKernelError(
            "a TMA reduction of a buffer of which several CTAs hold a copy", op.loc
        )

    def run(f: Frame) -> None:
        desc, corner = f[target], [f[s] for s in at]
        view = view_of(f, source)

        def effect(x: np.ndarray) -> None:
            desc.write(corner, combine(desc.read(corner), x.reshape(desc.block)))

        _issue_store(f, desc, corner, view, op.loc, "TMA reduce", effect, spread, atomic=True)

    return run


def wait_stores(
    partition: Partition, pending: int, loc: Loc, what: str, *, full: bool, meets: bool
) -> Wait | None:
    """Wait until all but the last stores have read shared memory (`full`: have written too).

    The instruction waits in the thread that issued them. `meets` says that a barrier of all threads
    follows, as the compiler puts it behind Gluon's wait; without, only that thread knows.
    """
    targets = [(one, one.stores, one.stores.issued - pending) for one in partition.team]

    def ready() -> bool:
        return all((queue.landed if full else queue.done) >= target for _, queue, target in targets)

    def known() -> None:
        for one, queue, target in targets:
            over = dict.fromkeys((queue.key, one.stored_key) if full else (queue.key,), target)
            if meets:
                one.learn(over, {})
            else:
                join(one.clock, over)

    if ready():
        known()
        return None
    return Wait(ready, lambda: what, loc, known)


_READ_ONLY = "false" if STORE_WAIT_SAYS_READ_ONLY else "true"


@lowers(
    "ttng.async_tma_store_wait", kind=STEP, attrs=["pendings", "read_only"],
    words=r"read_only",
)  # fmt: skip
def _store_wait(op: Op, program: Program) -> Run:
    pending = op.int_attr("pendings", 0)
    read_only = op.attrs.get("read_only", _READ_ONLY) != "false"

    def run(f: Frame) -> Wait | None:
        what = f"tma.store_wait({pending})"
        return wait_stores(f[0], pending, op.loc, what, full=not read_only, meets=True)

    return run


# ---- stores to shared memory of the cluster
@lowers("ttng.async_shared_store", kind=STEP, words=r"")
def _shared_store(op: Op, program: Program) -> Run:
    value, target, bar = op.operands
    loc = op.loc
    source_type, target_type, _ = _types_of_store(op)
    source, spread = (spread_of(t, program.module) for t in (source_type, target_type))
    if not set(map(str, spread.parts)) <= set(map(str, source.parts)):
        raise UnsupportedKernelError(
            "an asynchronous store whose parts are cut otherwise than the buffer's", loc
        )
    senders = [
        rank if source.parts[rank] == part else source.parts.index(part)
        for rank, part in enumerate(spread.parts)
    ]

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        view, bars = view_of(f, target), view_of(f, bar)
        signals: list[tuple[Barrier, Record, Clock]] = []
        for rank, sender in enumerate(senders):
            issuer = partition.team[sender]
            barrier = barrier_of(issuer, bars, loc, "asynchronous store", rank)
            if barrier is None:
                return
            record = partition.cta.launch.shared.access(
                view, issuer, "asynchronous store", loc, write=True, key=barrier.key, rank=rank
            )
            signals.append((barrier, record, phases.known(issuer)))
            barrier.loads.append(record)
        new = np.asarray(f[value]).reshape(view.data.shape)
        if dtypes.is_float(view.buffer.elem):
            view.data.fill(np.nan)
        view.init[...] = True
        nbytes = view.data.size * dtypes.size_of(view.buffer.elem) // spread.pieces

        def complete() -> None:
            view.current()[...] = new
            for barrier, record, knows in signals:
                barrier.last_load = record
                record.epoch = barrier.phase + 1
                barrier.loads.remove(record)
                barrier.transfer(nbytes, knows, (record.partition, loc, record.kind))

        partition.cta.issue("asynchronous store", partition, complete, loc)

    return run


def _types_of_store(op: Op) -> list[Type]:
    before, _, after = op.signature.partition(" -> ")
    return [parse_type(before), *(parse_type(t) for t in split_top(after))]


# ---- cp.async
@lowers("ttg.async_copy_global_to_local", kind=STEP, words=r"mask|other|evict_\w+|ca|cg",
        attrs=["cacheModifier", "evictionPolicy", "isVolatile", "contiguity"])  # fmt: skip
def _copy(op: Op, program: Program) -> Run:
    address, target, *rest = op.operands
    mask_slot = rest[0] if "mask" in op.words else None
    other_slot = rest[-1] if "other" in op.words else None
    d = op.results[0] if op.results else None
    elem = pointee(op)
    size = dtypes.size_of(elem)
    loc = op.loc
    spread = spread_of(op.operand_types()[0], program.module)

    def run(f: Frame) -> None:
        partition: Partition = f[0]
        cta = partition.cta
        where = np.asarray(f[address])
        mask = lanes(f, mask_slot, where.shape)
        if mask is not None and size < _LEAST_COPY and _cuts_a_piece(where, mask):
            raise UnsupportedKernelError(
                f"cp.async of elements of {size} bytes with a mask that cuts pieces of "
                f"{_LEAST_COPY} bytes: the hardware copies no less, and the compiler refuses it",
                loc,
            )
        other = None if other_slot is None else f[other_slot]
        view = view_of(f, target)
        number = 0
        for one in partition.team:
            queue = one.copies
            queue.issued += 1
            number = queue.issued
            cta.launch.shared.access(
                view, one, "cp.async", loc, write=True, key=queue.key, epoch=number
            )
        # Read now, so that bounds and races are judged at the statement; the value lands later.
        value = global_access.read(
            partition, where, mask, other, elem, loc, "cp.async", spread=spread
        )
        if dtypes.is_float(view.buffer.elem):
            view.data.fill(np.nan)
        view.init[...] = True
        partition.flying.add(number)

        def complete() -> None:
            view.current()[...] = value
            partition.flying.discard(number)

        cta.issue("cp.async", partition, complete, loc)
        if d is not None:
            f[d] = None

    return run


_LEAST_COPY = 4  # bytes of a cp.async


def _cuts_a_piece(where: np.ndarray, mask: np.ndarray) -> bool:
    """Whether neighbours that lie together in one piece of memory are masked otherwise."""
    shown = np.broadcast_to(mask, where.shape)
    for axis in range(where.ndim):
        ones, others = (np.moveaxis(x, axis, 0) for x in (where, shown))
        together = ones[1:] // _LEAST_COPY == ones[:-1] // _LEAST_COPY
        together &= ones[1:] > ones[:-1]
        if (together & (others[1:] != others[:-1])).any():
            return True
    return False


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
            for one in partition.team:
                key = one.copies.key
                one.clock[key] = max(one.clock.get(key, 0), target)

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
        view = view_of(f, a)
        threads = 32 * partition.warps
        target = partition.copies.issued
        arrivals: list[tuple[Partition, Barrier, Clock, Clock]] = []
        for one in partition.team:
            barrier = barrier_of(one, view, loc, what)
            if barrier is None:
                return
            one.clock[one.key] += 1
            clock = dict(one.clock)
            clock[one.copies.key] = target
            arrivals.append((one, barrier, clock, dict(one.fence)))
            if not fixed:
                barrier.pending += threads

        def complete() -> None:
            for one, barrier, clock, proxy in arrivals:
                barrier.join(clock, proxy)
                barrier.count_down(one, threads, loc, what)

        def guard() -> bool:
            return not any(n <= target for n in partition.flying)

        if guard():
            complete()
        else:
            partition.cta.issue(what, partition, complete, loc, guard=guard)

    return run
