"""Loops that wait for others: what a turn of a loop did, and when the others get theirs.

A turn polls if it looked at memory that others change and did nothing else: read a place again, or
did a read-modify-write that left memory as it was, of whatever order. Such a loop sleeps until
memory changes. If its next turn begins as the last one did, it polls for ever unless others act: it
is still. Any other loop rests once it has run for long, so that whatever it waits for can happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tileloom.emulator.ir import Loc
from tileloom.emulator.machine import Partition, Wait


class Turns:
    """The turns of one loop, from one of its entries on.

    Attributes:
        count: How many have ended.
        still: Whether the last one only polled, and left what the loop carries as it was.
    """

    __slots__ = ("_deeds", "_looks", "_partition", "count", "still")

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._looks, self._deeds = partition.looks, _deeds(partition)
        self.count = 0
        self.still = False

    def end(self, loc: Loc, before: Sequence[Any], after: Sequence[Any]) -> Wait | None:
        """End a turn.

        Args:
            loc: The loop.
            before: What it carried into the turn.
            after: What it carries into the next one.

        Returns:
            A wait, if others shall act before the next turn.
        """
        partition = self._partition
        looks, self._looks = self._looks, partition.looks
        deeds, self._deeds = self._deeds, _deeds(partition)
        self.count += 1
        self.still = False
        if self._looks == looks or self._deeds != deeds:
            return rest(partition, loc)
        timed, partition.timed = partition.timed, False
        self.still = not timed and len(before) == len(after) and all(map(_same, before, after))
        launch = partition.cta.launch
        wait = Wait(
            lambda: True, lambda: "spins on global memory", loc, None, launch.version, timed,
            lambda: "nobody that is left writes what a loop reads again and again",
        )  # fmt: skip
        wait.ready = lambda: wait.poll != launch.version
        wait.loop = self
        return wait


def rest(partition: Partition, loc: Loc) -> Wait | None:
    """Return a wait for one round of the others, if a partition has run for long."""
    launch = partition.cta.launch
    if launch.explore or launch.steps < partition.rests_at:
        return None
    partition.rested = True
    begun = launch.now
    return Wait(lambda: launch.now != begun, lambda: "a turn of the others", loc)


def _deeds(partition: Partition) -> int:
    return partition.clock[partition.key] - partition.idle


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and bool(np.array_equal(old, new)))
