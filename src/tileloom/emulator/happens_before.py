"""Who knows what: vector clocks, access records, and the checks on shared and global memory.

A clock maps keys to counters. A key stands for a partition (counter: its accesses), for an mbarrier
(counter: completed phases, which is how a TMA load is known to be complete), or for a partition's
queue of wgmma, of cp.async or of TMA stores (counter: how many are known complete, in order).
An access is ordered before another one iff the newcomer's clock has reached its epoch. ``fence``,
the second clock, is what was known at the last proxy fence: under ``key`` for shared memory, under
``-key`` for global memory, since Gluon's ``fence_async_shared`` orders shared memory only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tileloom.emulator.ir import Loc
from tileloom.emulator.report import Access

if TYPE_CHECKING:
    from tileloom.emulator.machine import Partition
    from tileloom.emulator.memory import SharedBuffer, Storage, View

Clock = dict[int, int]
UNKNOWN_EPOCH = math.inf


def join(into: Clock, other: Clock) -> None:
    """Make a clock know what another one knows."""
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value


class Record:
    """One access that later ones are checked against."""

    __slots__ = ("atomic", "epoch", "key", "kind", "loc", "partition", "proxy", "value", "write")

    def __init__(
        self, partition: Partition, kind: str, proxy: str, write: bool, loc: Loc,
        key: int, epoch: float, atomic: bool = False,
    ) -> None:  # fmt: skip
        self.partition = partition
        self.kind = kind
        self.proxy = proxy
        self.write = write
        self.loc = loc
        self.key = key
        self.epoch = epoch
        self.atomic = atomic

    def known_to(self, clock: Clock) -> bool:
        """Whether a clock has reached this access."""
        return clock.get(self.key, 0) >= self.epoch

    def side(self) -> Access:
        """Return the access as a report shows it."""
        what = f"{self.kind} {'write' if self.write else 'read'}"
        return Access(self.loc, what, self.partition.name, self.partition.cta.program)


_HINTS = {
    "TMA load": "wait on the mbarrier that the TMA load signals before this access",
    "wgmma": "warpgroup_mma_wait() with fewer outstanding must come before the release or "
    "overwrite",
    "cp.async": "async_copy.wait_group() with fewer outstanding groups must come before this "
    "access",
    "TMA store": "tma.store_wait() must come before the buffer is used again",
    "TMA reduce": "tma.store_wait() must come before the buffer is used again",
}
_SHARED_HINT = (
    "no mbarrier or named barrier orders the two: arrive after the first, wait before this"
)
_GLOBAL_HINT = (
    "order them: a release (atomic or st.release) after the first access, and an acquire that "
    "reads "
    "it before this one"
)


def _sentence(name: str, old: Record, new: Record) -> str:
    if new.write and not old.write:
        return (
            f"{name} is overwritten by a {new.kind} while a {old.kind} read of it is not known to "
            "be complete"
        )
    verb = "written by" if new.write else "read by"
    return (
        f"{name} is {verb} a {new.kind} while a {old.kind} write of it is not known to be complete"
    )


class SharedChecker:
    """Checks accesses to shared memory."""

    def __init__(self, war_fence: str) -> None:
        self.war_fence = war_fence
        self.fences = True
        self.count = 0

    def access(
        self, view: View, partition: Partition, kind: str, loc: Loc, *,
        write: bool, proxy: str = "generic", key: int | None = None,
        epoch: float = UNKNOWN_EPOCH,
    ) -> Record:  # fmt: skip
        """Check an access against all that overlap it, and remember it.

        Args:
            view: What is accessed.
            partition: Who accesses, or issues the asynchronous operation.
            kind: For the report: ``TMA load``, ``local store``, ...
            loc: The statement.
            write: Whether it writes.
            proxy: ``generic`` or ``async``.
            key: For asynchronous operations, the clock key that tells of their completion.
            epoch: The counter that means complete.

        Returns:
            The record; its epoch may be set later.
        """
        self.count += 1
        clock = partition.clock
        clock[partition.key] += 1
        if key is None:
            key, epoch = partition.key, clock[partition.key]
        new = Record(partition, kind, proxy, write, loc, key, epoch)
        buffer = view.buffer
        region = view.region
        geometry = buffer.geometry
        self._against(buffer, region, view, new)
        for other in geometry.over[region]:
            self._against(buffer, other, view, new)
        for alias in buffer.aliases:
            self._against_alias(alias, buffer.byte_span(region), view, new)
        if write:
            buffer.writes[region] = new
            buffer.reads[region] = []
            for other in geometry.covers[region]:
                buffer.writes.pop(other, None)
                buffer.reads.pop(other, None)
        else:
            kept = [
                r for r in buffer.reads.get(region, ())
                if not (r.partition is partition and r.kind == kind and r.key == key
                        and (r.epoch <= epoch))
            ]  # fmt: skip
            kept.append(new)
            buffer.reads[region] = kept
        return new

    def _against(self, buffer: SharedBuffer, region: int, view: View, new: Record) -> None:
        old = buffer.writes.get(region)
        if old is not None:
            self._conflict(view, old, new)
        if new.write:
            for old in buffer.reads.get(region, ()):
                self._conflict(view, old, new)

    def _against_alias(
        self, alias: SharedBuffer, span: tuple[int, int], view: View, new: Record
    ) -> None:
        touched = [
            r for r in {*alias.writes, *alias.reads}
            if alias.byte_span(r)[0] < span[1] and span[0] < alias.byte_span(r)[1]
        ]  # fmt: skip
        for region in touched:
            self._against(alias, region, view, new)
            if new.write:
                alias.writes.pop(region, None)
                alias.reads.pop(region, None)
        if touched and new.write:
            alias.init.fill(False)

    def _conflict(self, view: View, old: Record, new: Record) -> None:
        partition = new.partition
        reporter = partition.cta.launch.reporter
        if old.key == new.key and old.epoch < new.epoch and old.kind == new.kind == "wgmma":
            return
        if not old.known_to(partition.clock):
            name = f"shared buffer {view.name}"
            hint = _HINTS.get(old.kind, _SHARED_HINT)
            reporter.add("race", _sentence(name, old, new), new.side(), other=old.side(), hint=hint)
        elif (
            self.fences and old.proxy == "generic" and new.proxy == "async"
            and not old.known_to(partition.fence)
        ):  # fmt: skip
            severity = "error" if old.write else self.war_fence
            if severity == "ignore":
                return
            message = (
                f"shared buffer {view.name}: a generic-proxy {old.kind} "
                f"{'write' if old.write else 'read'} is followed by a {new.kind} through the "
                "async proxy without fence_async_shared() in between"
            )
            hint = "fence_async_shared() after the first and before the barrier or operation that hands it on"  # noqa: E501
            reporter.add(
                "proxy", message, new.side(), other=old.side(), hint=hint, severity=severity
            )


class GlobalShadow:
    """For each element of a storage the last write and the last two readers, as record numbers."""

    def __init__(self, count: int) -> None:
        self.write = np.zeros(count, np.int32)
        self.read = np.zeros(count, np.int32)
        self.read2 = np.zeros(count, np.int32)
        self.written = False
        self.was_read = False


class GlobalChecker:
    """Checks accesses to global memory, between partitions and between programs of a launch."""

    def __init__(self) -> None:
        self.records: list[Record | None] = [None]
        self.owners = np.zeros(1024, np.int32)
        self.count = 0

    def access(
        self, storage: Storage, select: Any, partition: Partition, kind: str, loc: Loc, *,
        write: bool, proxy: str = "generic", atomic: bool = False, key: int | None = None,
        epoch: float = UNKNOWN_EPOCH,
    ) -> Record:  # fmt: skip
        """Check an access to elements of a storage and remember it.

        Args:
            storage: The storage.
            select: Takes a shadow array; returns a view or an ``(array, index)`` pair to it.
            partition: Who accesses.
            kind: For the report.
            loc: The statement.
            write: Whether it writes.
            proxy: ``generic`` or ``async``.
            atomic: Whether it is atomic; two atomic accesses never conflict.
            key: For asynchronous operations, the clock key of their completion.
            epoch: The counter that means complete.

        Returns:
            The record.
        """
        self.count += 1
        clock = partition.clock
        clock[partition.key] += 1
        if key is None:
            key, epoch = partition.key, clock[partition.key]
        new = Record(partition, kind, proxy, write, loc, key, epoch, atomic)
        number = len(self.records)
        self.records.append(new)
        if number >= self.owners.size:
            self.owners = np.concatenate([self.owners, np.zeros_like(self.owners)])
        self.owners[number] = partition.key
        shadow = storage.shadow
        if shadow is None:
            shadow = storage.shadow = GlobalShadow(-(-storage.nbytes // storage.elem_size))
        if shadow.written:
            self._check(storage, select(shadow.write), new)
        if write:
            if shadow.was_read:
                self._check(storage, select(shadow.read), new)
                self._check(storage, select(shadow.read2), new)
                _assign(select(shadow.read), 0)
                _assign(select(shadow.read2), 0)
            _assign(select(shadow.write), number)
            shadow.written = True
        else:
            self._remember_read(shadow, select, number, partition.key)
        return new

    def _remember_read(self, shadow: GlobalShadow, select: Any, number: int, owner: int) -> None:
        shadow.was_read = True
        first = _values(select(shadow.read))
        top = int(first.max()) if first.size else 0
        if top and int(first.min()) == top:
            if self.owners[top] != owner:
                _assign(select(shadow.read2), top)
        elif top:
            keep = _values(select(shadow.read2))
            others = (self.owners[first] != owner) & (first != 0)
            _assign(select(shadow.read2), np.where(others, first, keep))
        _assign(select(shadow.read), number)

    def _check(self, storage: Storage, selection: Any, new: Record) -> None:
        values = _values(selection)
        if not values.size:
            return
        top = int(values.max())
        if top == 0:
            return
        numbers = [top] if int(values.min()) == top else np.unique(values).tolist()
        partition = new.partition
        reporter = partition.cta.launch.reporter
        for number in numbers:
            old = self.records[number]
            if old is None or (old.atomic and new.atomic) or not (old.write or new.write):
                continue
            name = f"global tensor '{storage.name}'"
            if not old.known_to(partition.clock):
                hint = _GLOBAL_HINT
                if old.kind in ("TMA store", "TMA reduce") and old.partition is partition:
                    hint = (
                        "tma.store_wait() only waits until shared memory was read; the store to "
                        "global memory needs cp.async.bulk.wait_group, or the end of the kernel"
                    )
                reporter.add(
                    "race", _sentence(name, old, new), new.side(), other=old.side(), hint=hint
                )
            elif (
                old.proxy == "generic" and new.proxy == "async"
                and old.write and partition.fence.get(-old.key, 0) < old.epoch
            ):  # fmt: skip
                message = (
                    f"{name}: a generic-proxy {old.kind} write is followed by a {new.kind} through "
                    "the async proxy without fence.proxy.async for global memory in between"
                )
                reporter.add(
                    "proxy", message, new.side(), other=old.side(),
                    hint="fence.proxy.async after the write, or after the acquire that saw it; "
                    "fence_async_shared() orders shared memory only",
                )  # fmt: skip


def _values(selection: Any) -> np.ndarray:
    if isinstance(selection, tuple):
        array, index = selection
        return array[index]
    return selection


def _assign(selection: Any, value: Any) -> None:
    if isinstance(selection, tuple):
        array, index = selection
        array[index] = value
    else:
        selection[...] = value
