"""Launches behind one another on a stream, and those that begin before the one ahead has ended.

A launch waits for all that is ahead of it, unless it has Triton's option `launch_pdl` (CUDA's
programmatic dependent launch). Then it knows nothing of what the launches ahead do to global
memory until `gdc_wait`, which waits for the launch just ahead; and for those ahead of that one, if
it has waited itself. Two things are known from the start: what was ahead of a launch whose programs
all waited before they let dependents start; and that a launch which lets none start has read what
it reads, for all its programs have ended. (That its writes are visible, only the wait says.)

The launches are played one after the other. What is kept of them are the books of their accesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tileloom.emulator.happens_before import Clock, join

if TYPE_CHECKING:
    from tileloom.emulator.machine import Launch, Partition
    from tileloom.emulator.memory import Storage

_KEPT = 64  # launches in a row with `launch_pdl` whose books are kept


@dataclass
class Ahead:
    """What is ahead of a launch that may begin early.

    Attributes:
        ends: What `gdc_wait` makes known: the ends of launches.
        waited: The programs that have waited.
        early: Whether one let dependents start that did not know of the ends.
    """

    ends: Clock
    waited: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    early: bool = False

    def settled_by(self, launch: Launch) -> bool:
        """Whether all this is over when a launch behind this one begins."""
        return not self.early and len(self.waited) == math.prod(launch.grid)


class Stream:
    """The launches of a run, in order."""

    def __init__(self) -> None:
        self._last: Launch | None = None
        self._storages: dict[int, Storage] = {}
        self._kept = 0
        self._read = 0

    def begin(self, launch: Launch, *, pdl: bool) -> None:
        """Let a launch know what the stream's order gives it before it starts.

        Args:
            launch: The launch, not yet played.
            pdl: Whether it may begin before the launches ahead have ended.
        """
        last, self._last = self._last, launch
        if not pdl or last is None or self._kept >= _KEPT:
            self._storages, self._kept, self._read = {}, 0, 0
            return
        self._kept += 1
        ends = self._close(last)
        launch.keys = last.keys
        launch.memory.sets = last.memory.sets
        launch.ahead = Ahead(ends)
        launch.settled = dict(last.settled)
        if last.ahead is not None and last.ahead.settled_by(last):
            join(launch.settled, last.ahead.ends)
        for storage in launch.storages:
            if (known := self._storages.get(storage.address)) is not None:
                storage.elem_size, storage.shadow = known.elem_size, known.shadow

    def _close(self, last: Launch) -> Clock:
        """Give all accesses of a launch its end as their time; return what waiting for it tells."""
        end = last.new_key()
        sets = last.memory.sets
        for record in (r for records in sets[self._read :] for r in records):
            if not record.ahead:
                record.key, record.epoch, record.ahead = end, 1, last.program.name
                if not record.write and not last.lets_dependents_start:
                    record.epoch = 0
        self._read = len(sets)
        for storage in last.storages:
            if storage.shadow is not None:
                storage.shadow.released = None
                self._storages[storage.address] = storage
        ends = {end: 1, -end: 1}
        if last.ahead is not None and last.ahead.waited:
            join(ends, last.ahead.ends)
        return ends


def launch_dependents(partition: Partition) -> None:
    """Play ``griddepcontrol.launch_dependents``."""
    launch = partition.cta.launch
    launch.lets_dependents_start = True
    ahead = launch.ahead
    if ahead is not None and any(key not in partition.clock for key in ahead.ends if key > 0):
        ahead.early = True


def wait(partition: Partition) -> None:
    """Play ``griddepcontrol.wait``: what was ahead has ended, and all it did is visible."""
    ahead = partition.cta.launch.ahead
    if ahead is None:
        return
    ahead.waited.add(partition.cta.program)
    for one in partition.team:
        one.learn(ahead.ends, ahead.ends)
