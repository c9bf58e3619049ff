"""Happens-before edges through global memory: what releases leave at a place and acquires take up.

For each element of a storage a number says which release stands there, so that an atomic on a large
tensor costs as many joins as there are different releases under it, not as many as elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tileloom.emulator.happens_before import Clock, assign, join, shadow_of, values
from tileloom.emulator.machine import Partition
from tileloom.emulator.memory import Storage

_ACQUIRES = ("acquire", "acq_rel", "seq_cst")
RELEASES = ("release", "acq_rel", "seq_cst")
# How many relaxed reads of released places a later fence may still make edges of.
_OBSERVED = 32


def _numbers(selection: Any) -> list[int]:
    return [n for n in np.unique(values(selection)).tolist() if n]


def acquire(partition: Partition, storage: Storage, select: Any, order: str, scope: str) -> None:
    """Take over what the releases at some elements knew, if the order acquires.

    Args:
        partition: Who reads.
        storage: Where.
        select: Picks the elements' part of a shadow array.
        order: Memory order. A relaxed read counts only once a fence follows it.
        scope: Memory scope; ``cta`` makes no edge to other programs.
    """
    shadow = shadow_of(storage)
    if shadow.released is None:
        return
    releases = partition.cta.launch.releases
    for number in _numbers(select(shadow.released)):
        clock, fence = releases[number]
        if order in _ACQUIRES and scope != "cta":
            partition.learn(clock, fence)
        else:
            partition.observed.append((clock, fence))
            del partition.observed[:-_OBSERVED]


def store_key(partition: Partition, lanes: np.ndarray | None) -> tuple[int, int]:
    """Return the clock key and the time of a store, for releases that do not speak for it.

    Args:
        partition: Who stores.
        lanes: Which lanes do, one a thread or more; None for the first thread alone.
    """
    key = partition.one if is_first_alone(lanes) else partition.many
    time = partition.clock[key] = partition.clock.get(key, 0) + 1
    return key, time


def meet(partition: Partition) -> None:
    """Note that a partition's threads have met: each speaks for what any of them did."""
    for one in partition.team:
        one.met = {key: one.clock.get(key, 0) for key in one.met}


def is_first_alone(lanes: np.ndarray | None) -> bool:
    """Whether no lane but the first takes part: thread 0, which also does what is scalar."""
    return lanes is None or not lanes.reshape(-1)[1:].any()


_KEYS_NOT_SPOKEN_FOR: dict[str, Callable[[Partition], tuple[int, ...]]] = {
    "all": lambda p: (), "first": lambda p: (p.many,),
    "any": lambda p: (p.many, p.one, p.stored_key),
}  # fmt: skip


def release(
    partition: Partition, storage: Storage, select: Any, order: str, scope: str, *, modify: bool,
    who: str = "all",
) -> None:  # fmt: skip
    """Leave at some elements what the partition knows, if the order releases.

    Args:
        partition: Who writes.
        storage: Where.
        select: Picks the elements' part of a shadow array.
        order: Memory order. A relaxed write releases what an earlier fence knew.
        scope: Memory scope; ``cta`` makes no edge to other programs.
        modify: Whether this is a read-modify-write, which continues earlier releases.
        who: Which threads do it. ``all``: each speaks for itself. ``first``: thread 0, which does
            not speak for what others have stored since they last met at a barrier. ``any``: one
            of them, nobody knows which, and it speaks only for what was stored before they met.
            TMA stores are thread 0's: it issues them, and waits for them.
    """
    shadow = shadow_of(storage)
    releases = partition.cta.launch.releases
    said = partition.release_fence
    if order in RELEASES and scope != "cta":
        said = _knowledge(partition)
    if said is None:
        if not modify:
            forget(storage, select)
        return
    mine, met = (dict(said[0]), said[1]), said[2]
    if partition.warps > 1:
        for key in _KEYS_NOT_SPOKEN_FOR[who](partition):
            if mine[0].get(key, 0) > met[key]:
                mine[0][key] = met[key]
                partition.spoke_alone.add((key, met[key]))
    if shadow.released is None:
        shadow.released = np.zeros_like(shadow.write)
    selection = select(shadow.released)
    before = _numbers(selection) if modify else []
    standing = values(selection).copy() if before else None
    assign(selection, len(releases))
    releases.append(mine)
    for number in before:
        clock, fence = dict(releases[number][0]), dict(releases[number][1])
        join(clock, mine[0])
        join(fence, mine[1])
        now = values(selection).copy()
        now[standing == number] = len(releases)
        assign(selection, now)
        releases.append((clock, fence))


def forget(storage: Storage, select: Any) -> None:
    """Let a plain or relaxed write end the release that stood at some elements."""
    shadow = shadow_of(storage)
    if shadow.released is not None:
        assign(select(shadow.released), 0)


def fence(partition: Partition) -> None:
    """Play ``fence.acq_rel``: relaxed accesses around it make edges."""
    for clock, proxy in partition.observed:
        partition.learn(clock, proxy)
    partition.observed.clear()
    partition.release_fence = _knowledge(partition)
    partition.idle += 1


def _knowledge(partition: Partition) -> tuple[Clock, Clock, dict[int, int]]:
    """Return what a partition knows now, and what its threads had stored when they last met."""
    partition.clock[partition.key] += 1
    return dict(partition.clock), dict(partition.fence), partition.met
