"""Reads, writes and atomics on global memory: bounds, races, values."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.cluster import Spread
from tileloom.emulator.global_edges import (
    RELEASES,
    acquire,
    forget,
    is_first_alone,
    release,
    store_key,
)
from tileloom.emulator.ir import Loc
from tileloom.emulator.machine import Launch, Partition
from tileloom.emulator.memory import FIRST, Storage
from tileloom.emulator.pointers import place, split_by_tensor
from tileloom.emulator.report import UnsupportedKernelError


def locate(
    partition: Partition,
    addresses: np.ndarray,
    mask: np.ndarray | None,
    size: int,
    what: str,
    loc: Loc,
) -> tuple[Storage | None, Any]:
    """Find the storage and the element numbers that some addresses mean.

    Args:
        partition: Who accesses, for the report.
        addresses: Virtual addresses.
        mask: Lanes that take part; None for all.
        size: Element size in bytes.
        what: The access, for the report.
        loc: The statement.

    Returns:
        The storage and element numbers (of all lanes); ``(None, None)`` if no lane takes part or
        the addresses were reported as out of bounds.
    """
    used = addresses if mask is None else addresses[mask]
    if used.size == 0:
        return None, None
    launch = partition.cta.launch
    low, high = int(used.min()), int(used.max()) + size
    found = place(launch, low)
    if found is not None:
        storage, base = found
        if high <= base + storage.nbytes:
            if (low - base) % size:
                partition.report(
                    "out-of-bounds", f"{what} at an address of '{storage.name}' that is not a "
                    f"multiple of {size} bytes", loc, what,
                )  # fmt: skip
            return storage, (addresses - base) // size
    parts = split_by_tensor(launch, addresses, mask, size)
    if len(parts) > 1:
        raise SeveralTensorsError(parts, what, loc)
    _report_outside(partition, used, size, what, loc, found)
    return None, None


_DANGLING = "keep the tensors whose data_ptr() stands in a table alive until the launch"


class SeveralTensorsError(UnsupportedKernelError):
    """The lanes of one access lie in several tensors; `parts` are masks of each one's."""

    def __init__(self, parts: list[np.ndarray], what: str, loc: Loc) -> None:
        super().__init__(
            f"the lanes of one {what} lie in several tensors, which is played for plain loads and "
            "stores. Try: one access for each tensor",
            loc,
        )
        self.parts = parts


def _report_outside(
    partition: Partition, used: np.ndarray, size: int, what: str, loc: Loc,
    found: tuple[Storage, int] | None,
) -> None:  # fmt: skip
    storages = partition.cta.launch.storages
    flat = used.reshape(-1)
    low, high = int(flat.min()), int(flat.max()) + size
    if low < FIRST and found is None:
        there, hint = f"{low:#x}, where no live CPU tensor is", _DANGLING
        if low == 0:
            there, hint = "a null pointer", "pass a tensor, or mask the access"
        partition.report("out-of-bounds", f"{what} at {there}", loc, what, hint=hint)
        return
    if not storages:
        partition.report("out-of-bounds", f"{what}: the kernel has no tensor argument", loc, what)
        return

    def distance(s: Storage) -> int:
        return min(abs(low - s.base), abs(high - s.base - s.nbytes), abs(low - s.base - s.nbytes))

    near, base = found or (None, 0)
    if near is None or base == near.base:
        near = min(storages, key=distance)
        base = near.base
    bad = (flat < base) | (flat + size > base + near.nbytes)
    first = (int(flat[int(np.argmax(bad))]) - base) // size
    total = near.nbytes // size
    partition.report(
        "out-of-bounds",
        f"{what} outside of '{near.name}' ({total} elements): {int(bad.sum())} of {flat.size} "
        f"lanes, "
        f"the first touches element {first}",
        loc, what, hint="mask the lanes that lie past the end",
    )  # fmt: skip


def selector(storage: Storage, index: np.ndarray, size: int) -> Any:
    """Return a function that picks the elements' part of a shadow array."""
    grain = storage.elem_size
    if size == grain:
        picked = index
    elif size < grain:
        picked = index * size // grain
    else:
        ratio = size // grain
        picked = (index[..., None] * ratio + np.arange(ratio)).reshape(-1)
    return lambda shadow: (shadow, picked)


def read(
    partition: Partition, addresses: Any, mask: np.ndarray | None, other: Any, elem: str, loc: Loc,
    what: str = "load", atomic: bool = False, spread: Spread | None = None,
) -> np.ndarray:  # fmt: skip
    """Read values; lanes that take no part get `other` (or zero).

    `spread` says which lanes each CTA of a cluster reads.
    """
    where = np.asarray(addresses)
    size = dtypes.size_of(elem)
    number = dtypes.numpy_type(elem)
    try:
        storage, index = locate(partition, where, mask, size, what, loc)
    except SeveralTensorsError as split:
        out = np.broadcast_to(np.asarray(0 if other is None else other, number), where.shape)
        for part in split.parts:
            out = read(partition, where, part, out, elem, loc, what, atomic, spread)
        return out
    if storage is None:
        return np.broadcast_to(np.asarray(0 if other is None else other, number), where.shape)
    words = storage.words(size)
    launch = partition.cta.launch
    alone = mask is not None and mask.ndim > 0 and is_first_alone(mask)
    for one in partition.team:
        used = _lanes_of(one, index, mask, spread)
        launch.memory.access(
            storage, selector(storage, used, size), one, what, loc, write=False, atomic=atomic,
            alone=alone,
        )  # fmt: skip
    partition.look(loc, where)
    if mask is None:
        return dtypes.from_bits(words[index], elem)
    values = dtypes.from_bits(words[np.where(mask, index, 0)], elem)
    return np.where(mask, values, number(0) if other is None else other).astype(number, copy=False)


def write(
    partition: Partition, addresses: Any, values: Any, mask: np.ndarray | None, elem: str, loc: Loc,
    what: str = "store", atomic: bool = False, spread: Spread | None = None,
    releases: bool = False,
) -> None:  # fmt: skip
    """Write values of the lanes that take part.

    `spread` says which lanes each CTA of a cluster writes; where several hold copies, the first.
    `releases` says that the write is a release, which a reader sees from whichever thread.
    """
    where = np.asarray(addresses)
    size = dtypes.size_of(elem)
    try:
        storage, index = locate(partition, where, mask, size, what, loc)
    except SeveralTensorsError as split:
        for part in split.parts:
            write(partition, where, values, part, elem, loc, what, atomic, spread, releases)
        return
    if storage is None:
        return
    bits = dtypes.to_bits(np.broadcast_to(np.asarray(values), where.shape), elem).reshape(
        where.shape
    )
    launch = partition.cta.launch
    shown = lanes_of(where, mask)
    for one in partition.team:
        if spread is None or spread.leads[one.rank] == one.rank:
            select = selector(storage, _lanes_of(one, index, mask, spread), size)
            key, time = (None, 0) if releases else store_key(one, shown)
            launch.memory.access(
                storage, select, one, what, loc, write=True, atomic=atomic, key=key, epoch=time,
                alone=is_first_alone(shown),
            )  # fmt: skip
    if mask is not None:
        index, bits = index[mask], bits[mask]
    words = storage.words(size)
    words[index] = bits
    launch.changed()
    if where.ndim and not np.array_equal(words[index], bits):
        clash = int(np.argmax((words[index] != bits).reshape(-1)))
        partition.report(
            "race",
            f"lanes of one {what} write different values to the same element "
            f"{int(index.reshape(-1)[clash])} of '{storage.name}'",
            loc, what, hint="the value that stays is arbitrary: give each element one writer",
        )  # fmt: skip
    if not atomic:
        forget(storage, selector(storage, index, size))


def _lanes_of(
    one: Partition, index: np.ndarray, mask: np.ndarray | None, spread: Spread | None
) -> np.ndarray:
    """Return the elements that a member of a team accesses."""
    if one.cta.clustered and spread is not None and index.ndim:
        part = spread.parts[one.rank]
        index, mask = index[part], None if mask is None else mask[part]
    return index if mask is None else index[mask]


def lanes_of(where: np.ndarray, mask: np.ndarray | None) -> np.ndarray | None:
    """Return which lanes take part; None for a scalar, which one thread does."""
    if where.ndim == 0:
        return None
    return np.ones(where.shape, np.bool_) if mask is None else mask


def atomic_load(
    partition: Partition, order: str, scope: str, addresses: Any, mask: np.ndarray | None,
    elem: str, loc: Loc, what: str = "atomic load",
) -> np.ndarray:  # fmt: skip
    """Read values atomically, and take over what the releases there knew if the order acquires."""
    value = read(partition, addresses, mask, None, elem, loc, what, atomic=True)
    place = locate(partition, np.asarray(addresses), mask, dtypes.size_of(elem), what, loc)
    if place[0] is not None:
        select = selector(place[0], _chosen(place[1], mask), dtypes.size_of(elem))
        for one in partition.team:
            acquire(one, place[0], select, order, scope)
    return value


def atomic_store(
    partition: Partition, order: str, scope: str, addresses: Any, values: Any,
    mask: np.ndarray | None, elem: str, loc: Loc, what: str = "atomic store", who: str = "all",
) -> None:  # fmt: skip
    """Write values atomically, and leave what the partition knows there if the order releases.

    `who` says which threads release, as `global_edges.release` has it.
    """
    for one in partition.team[1:]:  # the first CTA does it for all
        partition.learn(one.clock, one.fence)
    write(
        partition, addresses, values, mask, elem, loc, what, atomic=True, releases=order in RELEASES
    )
    place = locate(partition, np.asarray(addresses), mask, dtypes.size_of(elem), what, loc)
    if place[0] is not None:
        select = selector(place[0], _chosen(place[1], mask), dtypes.size_of(elem))
        release(partition, place[0], select, order, scope, modify=False, who=who)


def peek(partition: Partition, address: np.ndarray, elem: str, loc: Loc) -> Any:
    """Return the value at one address, as a waiting loop sees it."""
    storage, index = locate(partition, address, None, dtypes.size_of(elem), "atomic poll", loc)
    if storage is None:
        return None
    return dtypes.from_bits(storage.words(dtypes.size_of(elem))[index], elem)


def _chosen(index: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return index if mask is None else index[mask]


_UPDATE: dict[str, Any] = {
    "add": np.add, "fadd": np.add, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum, "min": np.minimum, "umax": np.maximum, "umin": np.minimum,
    "exch": lambda old, new: new, "inc": lambda old, top: np.where(old >= top, 0, old + 1),
}  # fmt: skip
RMW_OPS = frozenset(_UPDATE)


def atomic(
    partition: Partition, operation: str, order: str, scope: str, addresses: Any, values: Any,
    mask: np.ndarray | None, elem: str, loc: Loc, compare: Any = None, what: str = "atomic",
    who: str = "all",
) -> np.ndarray:  # fmt: skip
    """Do an atomic read-modify-write on each lane, one after another; return the old values.

    `who` says which threads release, as `global_edges.release` has it.
    """
    where = np.asarray(addresses)
    size = dtypes.size_of(elem)
    number = dtypes.numpy_type(elem)
    storage, index = locate(partition, where, mask, size, what, loc)
    old = np.zeros(where.shape, number)
    if storage is None:
        return old
    launch = partition.cta.launch
    begun = partition.clock[partition.key]
    lanes = np.ones(where.shape, np.bool_) if mask is None else mask
    flat = np.atleast_1d(index)[np.atleast_1d(lanes)]
    new = np.atleast_1d(np.broadcast_to(np.asarray(values), where.shape))[np.atleast_1d(lanes)]
    select = selector(storage, flat, size)
    shown = lanes_of(where, mask)
    key, time = (None, 0) if order in RELEASES else store_key(partition, shown)
    launch.memory.access(
        storage, select, partition, what, loc, write=True, atomic=True, key=key, epoch=time,
        alone=is_first_alone(shown),
    )  # fmt: skip
    for one in partition.team[1:]:  # the first CTA does it for all, and hands the result on
        partition.learn(one.clock, one.fence)
    acquire(partition, storage, select, order, scope)
    words = storage.words(size)
    before = words[flat].copy()
    out = apply_lanes(words, flat, new, operation, elem, compare, where, lanes)
    release(partition, storage, select, order, scope, modify=True, who=who)
    # The first thread hands the result of a scalar one on, and all threads meet for it.
    for one in partition.team if where.ndim == 0 else partition.team[1:]:
        one.learn(partition.clock, partition.fence)
    if np.array_equal(before, words[flat]):  # whatever its order: no more than a look
        partition.looks += 1
        partition.idle += partition.clock[partition.key] - begun
    else:
        launch.changed()
    np.atleast_1d(old)[np.atleast_1d(lanes)] = out
    if where.ndim == 0:
        return np.asarray(out, number).reshape(())
    return old


def apply_lanes(
    words: np.ndarray, flat: np.ndarray, new: np.ndarray, operation: str, elem: str, compare: Any,
    where: np.ndarray, lanes: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Update words by an operation, lane by lane; return the old values in lane order.

    Args:
        words: Raw words.
        flat: For each lane the word's number.
        new: For each lane the operand.
        operation: One of `RMW_OPS`.
        elem: The element type of the words.
        compare: What a compare-and-swap expects; None for others.
        where: An array of the shape that `compare` broadcasts to.
        lanes: Which lanes of that shape take part.
    """
    as_unsigned = operation in ("umax", "umin", "inc")

    def value_of(bits: np.ndarray) -> np.ndarray:
        values = dtypes.from_bits(bits, elem)
        return dtypes.unsigned(values, elem) if as_unsigned else values

    if as_unsigned:
        new = dtypes.unsigned(np.ascontiguousarray(new, dtypes.numpy_type(elem)), elem)
    expected = None
    if compare is not None:
        expected = np.atleast_1d(np.broadcast_to(np.asarray(compare), where.shape))
        expected = dtypes.to_bits(expected[np.atleast_1d(lanes)], elem)
    if np.unique(flat).size == flat.size:
        before = words[flat]
        if expected is not None:
            words[flat] = np.where(before == expected, dtypes.to_bits(new, elem), before)
        else:
            result = _UPDATE[operation](value_of(before), new)
            words[flat] = _bits(result, elem, as_unsigned)
        return dtypes.from_bits(before, elem)
    out = np.empty(flat.shape, dtypes.numpy_type(elem))
    for lane, at in enumerate(flat.tolist()):
        before = words[at : at + 1].copy()
        out[lane] = dtypes.from_bits(before, elem)[0]
        if expected is not None:
            if before[0] == expected[lane]:
                words[at] = dtypes.to_bits(new[lane : lane + 1], elem)[0]
        else:
            result = _UPDATE[operation](value_of(before), new[lane : lane + 1])
            words[at] = _bits(result, elem, as_unsigned)[0]
    return out


def _bits(values: Any, elem: str, as_unsigned: bool) -> np.ndarray:
    if as_unsigned:
        return np.asarray(values).astype(dtypes.UNSIGNED[elem])
    return dtypes.to_bits(np.atleast_1d(values), elem)


def host_write(
    launch: Launch, host: Partition, storage: Storage, start: int, data: np.ndarray
) -> None:
    """Let the host write bytes: a release that an acquiring reader may see.

    Args:
        launch: The launch that runs.
        host: The partition that stands for the host.
        storage: Where to.
        start: Byte offset in the storage.
        data: The bytes.
    """
    grain = storage.elem_size
    index = np.arange(start // grain, -(-(start + data.size) // grain))
    select = selector(storage, index, grain)
    launch.memory.access(storage, select, host, "host", Loc(), write=True, atomic=data.size <= 8)
    storage.words(1)[start : start + data.size] = data
    if data.size <= 8:
        release(host, storage, select, "release", "sys", modify=False)
    else:
        forget(storage, select)
