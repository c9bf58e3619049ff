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
    from tileloom.emulator.memory import Book, SharedBuffer, Storage, View

Clock = dict[int, int]
UNKNOWN_EPOCH = math.inf


def join(into: Clock, other: Clock) -> None:
    """Make a clock know what another one knows."""
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value


class Record:
    """One access that later ones are checked against.

    It is done `alone` by the thread that issues TMA operations, or by all threads.
    """

    __slots__ = (
        "ahead", "alone", "atomic", "epoch", "key", "kind", "loc", "partition", "proxy", "rank",
        "write",
    )  # fmt: skip

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
        self.alone = proxy == "async"
        self.rank = partition.rank
        self.ahead = ""  # the kernel's name, once a launch behind it begins early

    def known_to(self, clock: Clock) -> bool:
        """Whether a clock has reached this access."""
        return clock.get(self.key, 0) >= self.epoch

    def side(self) -> Access:
        """Return the access as a report shows it."""
        what = f"{self.kind} {'write' if self.write else 'read'}"
        return Access(self.loc, what, self.partition.title, self.partition.cta.program, self.ahead)


_HINTS = {
    "TMA load": "wait on the mbarrier that the TMA load signals before this access",
    "asynchronous store": "wait on the mbarrier that the store signals before this access",
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
_EARLY_HINT = (
    "a launch with launch_pdl begins while those ahead of it on the stream still run: gdc_wait() "
    "must come first, in the kernels between the two as well"
)
_WAITED_ALONE_HINT = (
    "cp.async.bulk.wait_group waits only in the thread that issued the store: the others know once "
    "they meet, by thread_barrier() (gl.barrier() from Triton 3.7 on)"
)
_ALONE_HINT = (
    "one thread released, and it does not speak for the stores of the others: let them meet "
    "before, by thread_barrier() (gl.barrier() from Triton 3.7 on) or tl.debug_barrier()"
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
        epoch: float = UNKNOWN_EPOCH, rank: int | None = None, atomic: bool = False,
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
            rank: The CTA whose memory it is; the partition's own by default.
            atomic: Whether it is atomic; two atomic accesses never conflict.

        Returns:
            The record; its epoch may be set later.
        """
        self.count += 1
        clock = partition.clock
        clock[partition.key] += 1
        if key is None:
            key, epoch = partition.key, clock[partition.key]
        new = Record(partition, kind, proxy, write, loc, key, epoch, atomic)
        buffer = view.buffer
        if buffer.family is not None:
            buffer.family.claim(buffer)
        region = view.region
        geometry = buffer.geometry
        rank = new.rank = partition.rank if rank is None else rank
        book = buffer.books[rank]
        self._against(book, region, view, new)
        for other in geometry.over[region]:
            self._against(book, other, view, new)
        for alias in buffer.aliases:
            self._against_alias(alias, rank, buffer.byte_span(region), view, new)
        if write and not atomic:
            book.writes[region] = new
            book.reads[region] = []
            for other in geometry.covers[region]:
                book.writes.pop(other, None)
                book.reads.pop(other, None)
        else:
            kept = [
                r for r in book.reads.get(region, ())
                if not (r.partition is partition and r.kind == kind and r.key == key
                        and (r.epoch <= epoch))
            ]  # fmt: skip
            kept.append(new)
            book.reads[region] = kept
        return new

    def _against(self, book: Book, region: int, view: View, new: Record) -> None:
        old = book.writes.get(region)
        if old is not None:
            self._conflict(view, old, new)
        for old in book.reads.get(region, ()):
            if (new.write or old.write) and not (new.atomic and old.atomic):
                self._conflict(view, old, new)

    def _against_alias(
        self, alias: SharedBuffer, rank: int, span: tuple[int, int], view: View, new: Record
    ) -> None:
        book = alias.books[rank]
        touched = [
            r for r in {*book.writes, *book.reads}
            if alias.byte_span(r)[0] < span[1] and span[0] < alias.byte_span(r)[1]
        ]  # fmt: skip
        for region in touched:
            self._against(book, region, view, new)
            low, high = alias.byte_span(region)
            if new.write and span[0] <= low and high <= span[1]:
                book.writes.pop(region, None)
                book.reads.pop(region, None)
        if (
            touched
            and new.write
            and (alias.family is None or alias.family is not view.buffer.family)
        ):
            alias.init.fill(False)

    def _conflict(self, view: View, old: Record, new: Record) -> None:
        partition = new.partition
        reporter = partition.cta.launch.reporter
        name = f"shared buffer {view.name}"
        if partition.cta.clustered:
            name += f" of CTA {new.rank}"
        if old.key == new.key and old.epoch < new.epoch and old.kind == new.kind == "wgmma":
            return
        if not old.known_to(partition.clock):
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
                f"{name}: a generic-proxy {old.kind} "
                f"{'write' if old.write else 'read'} is followed by a {new.kind} through the "
                "async proxy without fence_async_shared() in between"
            )
            hint = "fence_async_shared() after the first and before the barrier or operation that hands it on"  # noqa: E501
            reporter.add(
                "proxy", message, new.side(), other=old.side(), hint=hint, severity=severity
            )


class GlobalShadow:
    """What is known about each element of a storage, as numbers.

    Attributes:
        write: The last write, and atomics before it that it is not ordered after.
        read: The reads since then that are not ordered before one another.
        released: The release that stands there; None as long as there is none.
    """

    def __init__(self, count: int) -> None:
        self.write = np.zeros(count, np.int32)
        self.read = np.zeros(count, np.int32)
        self.released: np.ndarray | None = None
        self.written = False
        self.was_read = False


def shadow_of(storage: Storage) -> GlobalShadow:
    """Return a storage's shadow, making it if it has none."""
    if storage.shadow is None:
        storage.shadow = GlobalShadow(-(-storage.nbytes // storage.elem_size))
    return storage.shadow


class GlobalChecker:
    """Checks accesses to global memory, between partitions and between programs of a launch.

    A number in a shadow array stands for a set of accesses: those that are not ordered, so that
    none of them speaks for another one.
    """

    def __init__(self) -> None:
        self.sets: list[tuple[Record, ...]] = [()]
        self.count = 0

    def access(
        self, storage: Storage, select: Any, partition: Partition, kind: str, loc: Loc, *,
        write: bool, proxy: str = "generic", atomic: bool = False, key: int | None = None,
        epoch: float = UNKNOWN_EPOCH, alone: bool = False,
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
            alone: Whether the first thread of the partition does it.

        Returns:
            The record.
        """
        self.count += 1
        clock = partition.clock
        clock[partition.key] += 1
        if key is None:
            key, epoch = partition.key, clock[partition.key]
        new = Record(partition, kind, proxy, write, loc, key, epoch, atomic)
        new.alone |= alone
        shadow = shadow_of(storage)
        if shadow.written:
            self._check(storage, select(shadow.write), new)
        if write:
            if shadow.was_read:
                self._check(storage, select(shadow.read), new)
                if atomic:
                    self._keep_atomic(select(shadow.read), clock)
                else:
                    assign(select(shadow.read), 0)
            shadow.written = True
            self._remember(select(shadow.write), new, clock, keep=atomic)
        else:
            shadow.was_read = True
            self._remember(select(shadow.read), new, clock, keep=True)
        return new

    def _remember(self, selection: Any, new: Record, clock: Clock, *, keep: bool) -> None:
        """Put a record into a shadow array, with those it is not ordered after if they are kept."""
        alone = len(self.sets)
        self.sets.append((new,))
        if not keep:
            assign(selection, alone)
            return
        standing = values(selection)
        if not standing.size:
            return
        top = int(standing.max())
        if top == int(standing.min()):
            assign(selection, self._together(top, new, clock, alone))
            return
        joint = np.zeros(len(self.sets), np.int32)
        for number in self._distinct(standing):
            joint[number] = self._together(number, new, clock, alone)
        assign(selection, joint[standing])

    def _distinct(self, standing: np.ndarray) -> list[int]:
        """Return the different numbers, without the sort of `np.unique`."""
        seen = np.zeros(len(self.sets), np.bool_)
        seen[standing] = True
        return np.flatnonzero(seen).tolist()

    def _together(self, number: int, new: Record, clock: Clock, alone: int) -> int:
        """Return the number of the set of `new` and of those it does not speak for."""
        kept = tuple(
            r for r in self.sets[number]
            if (r.atomic or not r.write) and clock.get(r.key, 0) < r.epoch
            and not (r.key == new.key and r.epoch <= new.epoch and r.atomic == new.atomic)
        )  # fmt: skip
        if not kept:
            return alone
        self.sets.append((*kept, new))
        return len(self.sets) - 1

    def _keep_atomic(self, selection: Any, clock: Clock) -> None:
        """After an atomic write, plain reads are settled; unordered atomic reads still stand."""
        standing = values(selection)
        for number in self._distinct(standing):
            kept = tuple(r for r in self.sets[number] if r.atomic and not r.known_to(clock))
            if kept == self.sets[number]:
                continue
            now = standing.copy()
            now[standing == number] = len(self.sets) if kept else 0
            if kept:
                self.sets.append(kept)
            assign(selection, now)
            standing = now

    def _check(self, storage: Storage, selection: Any, new: Record) -> None:
        standing = values(selection)
        if not standing.size:
            return
        top = int(standing.max())
        if top == 0:
            return
        numbers = [top] if int(standing.min()) == top else self._distinct(standing)
        for number in numbers:
            for old in self.sets[number]:
                if not (old.atomic and new.atomic) and (old.write or new.write):
                    self._conflict(storage, old, new)

    def _conflict(self, storage: Storage, old: Record, new: Record) -> None:
        partition = new.partition
        reporter = partition.cta.launch.reporter
        name = f"global tensor '{storage.name}'"
        if not old.known_to(partition.clock):
            hint = _GLOBAL_HINT
            if (old.key, partition.clock.get(old.key, 0)) in old.partition.spoke_alone:
                hint = _ALONE_HINT
            if old.ahead:
                hint = _EARLY_HINT
            elif old.kind in ("TMA store", "TMA reduce") and old.partition is partition:
                hint = (
                    "tma.store_wait() only waits until shared memory was read; the store to "
                    "global memory needs cp.async.bulk.wait_group, or the end of the kernel"
                )
            reporter.add("race", _sentence(name, old, new), new.side(), other=old.side(), hint=hint)
        elif (
            old.key == partition.stored_key and old.epoch > partition.met[old.key]
            and partition.warps > 1 and not new.alone
        ):  # fmt: skip
            reporter.add(
                "race", _sentence(name, old, new), new.side(), other=old.side(),
                hint=_WAITED_ALONE_HINT,
            )  # fmt: skip
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


def values(selection: Any) -> np.ndarray:
    """Return the shadow numbers of a selection: a view, or an ``(array, index)`` pair."""
    if isinstance(selection, tuple):
        array, index = selection
        return array[index]
    return selection


def assign(selection: Any, value: Any) -> None:
    """Set the shadow numbers of a selection."""
    if isinstance(selection, tuple):
        array, index = selection
        array[index] = value
    else:
        selection[...] = value
