"""Lowering of the inline assembly of `tileloom.device.cluster`: sums over a cluster's warps.

PTX that each CTA of a cluster would run on its own is not played in general; these texts are known
as a whole, by their first lines, and what they give is computed in the same order of additions.
What is judged is that a box is used once, by as many numbers as it was made for, and that in a ring
a turn is sent before it is taken, and taken before the second one after it is sent. What their PTX
does is judged on a GPU alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from tileloom.emulator import cluster

if TYPE_CHECKING:
    from tileloom.emulator.ir import Op
    from tileloom.emulator.lower import Run
    from tileloom.emulator.machine import Cta, Frame, Partition

# The shapes of the boxes that wait for their numbers, of each cluster.
_open: WeakKeyDictionary[Cta, list[tuple[int, ...]]] = WeakKeyDictionary()
# What the warps of a cluster have sent, by turn.
_sent: WeakKeyDictionary[Cta, dict[int, list[np.ndarray]]] = WeakKeyDictionary()
_FIRST_LINE = re.compile(
    r"\{ // cluster_(begin|sums|moments|softmax|ring|send|take) (\d+) (\d+) (\d+)(?: (\d+))?\n"
)


def is_known(text: str) -> bool:
    """Whether an inline assembly is one of the texts that are known as a whole."""
    return _FIRST_LINE.match(text) is not None


def lower(op: Op, text: str) -> Run | None:
    """Lower one of the texts; None if it is another one."""
    found = _FIRST_LINE.match(text)
    if found is None:
        return None
    shape = tuple(int(found[n]) for n in (2, 3, 4))
    if found[1] == "begin":
        return lambda f: _begin(f, op, shape)
    if found[1] == "ring":
        return lambda f: _begin_ring(f, op)
    if found[1] == "send":
        return lambda f: _send(f, op)
    if found[1] == "take":
        size = np.float32(int(found[5]))
        function = (lambda values: _moments(values, size)) if size else _sums
        return lambda f: _take(f, op, function)
    if found[1] == "sums":
        return lambda f: _join(f, op, shape, _sums)
    if found[1] == "softmax":
        return lambda f: _join(f, op, shape, _softmax)
    size = re.search(r"mul\.f32 y, u, (\d+)\.0;", text)
    assert size is not None
    elements = np.float32(size[1])
    return lambda f: _join(f, op, shape, lambda values: _moments(values, elements))


def _begin(f: Frame, op: Op, shape: tuple[int, ...]) -> None:
    partition: Partition = f[0]
    _open.setdefault(partition.cta, []).append(shape)
    cluster.arrive_all(partition, relaxed=True)
    f[op.results[0]] = len(_open[partition.cta])


def _begin_ring(f: Frame, op: Op) -> None:
    partition: Partition = f[0]
    _sent[partition.cta] = {}
    cluster.arrive_all(partition, relaxed=True)
    cluster.wait_all(partition)
    f[op.results[0]] = 1


def _turn_of(f: Frame, op: Op) -> int:
    return int(np.asarray(f[op.operands[1]]).flat[0])


def _send(f: Frame, op: Op) -> None:
    partition: Partition = f[0]
    turn, values = _turn_of(f, op), [np.array(f[slot], np.float32) for slot in op.operands[2:]]
    sent = _sent.setdefault(partition.cta, {})
    if len(sent) > 1:
        partition.report(
            "race", f"turn {turn} is sent while {sorted(sent)} were not taken", op.loc,
            "an exchange of the cluster", hint="take turn t before turn t + 2 is sent",
        )  # fmt: skip
    sent[turn] = values
    f[op.results[0]] = np.zeros_like(values[0], np.int32)


def _take(f: Frame, op: Op, function: Any) -> None:
    """Give each warp what a function makes of the numbers that all have sent in a turn."""
    partition: Partition = f[0]
    turn, like = _turn_of(f, op), np.asarray(f[op.operands[2]], np.float32)
    values = _sent.get(partition.cta, {}).pop(turn, None)
    if values is None:
        partition.report(
            "deadlock", f"nobody has sent numbers in turn {turn}", op.loc,
            "an exchange of the cluster", hint="send what is taken",
        )  # fmt: skip
        values = [np.zeros_like(like) for _ in op.results]
    with np.errstate(all="ignore"):
        results = function([v.reshape(-1, min(32, v.size)) for v in values])
    for slot, result in zip(op.results, results):
        f[slot] = np.full_like(like, result)


def _join(f: Frame, op: Op, shape: tuple[int, ...], function: Any) -> None:
    """Give each warp what a function makes of all warps' numbers."""
    partition: Partition = f[0]
    cluster.wait_all(partition)
    if shape not in _open.get(partition.cta, []):
        partition.report(
            "race", f"no box of {shape[0]} numbers of {shape[1]} x {shape[2]} warps waits for them",
            op.loc, "an exchange of the cluster",
            hint="one cluster_begin of these sizes before each exchange",
        )  # fmt: skip
    else:
        _open[partition.cta].remove(shape)
    cluster.arrive_all(partition)
    cluster.wait_all(partition)
    values = [np.asarray(f[slot], np.float32) for slot in op.operands[1:]]
    with np.errstate(all="ignore"):
        results = function([v.reshape(-1, 32) for v in values])
    for slot, result in zip(op.results, results):
        f[slot] = np.full_like(values[0], result)


def _lanes(numbers: np.ndarray, combine: Any) -> np.ndarray:
    """Combine what the lanes have, `[32]`, as shuffles do: all get the same."""
    for step in (16, 8, 4, 2, 1):
        numbers = combine(numbers, numbers[np.arange(32) ^ step])
    return numbers[0]


def _add(numbers: np.ndarray) -> np.ndarray:
    """Add up `[turns, 32]`, or what fewer lanes have, `[1, lanes]`."""
    total = np.zeros(32, np.float32)
    for row in numbers:
        total[: row.size] += row
    return _lanes(total, np.add)


def _sums(values: list[np.ndarray]) -> list[np.ndarray]:
    return [_add(v) for v in values]


def _moments(values: list[np.ndarray], elements: Any) -> list[Any]:
    found: list[Any] = []
    for mean, squares in zip(values[::2], values[1::2]):
        centre = np.float32(_add(mean) / np.float32(mean.size))
        away = mean - centre
        found += [centre, _add(elements * away * away + squares)]
    return found


def _softmax(values: list[np.ndarray]) -> list[Any]:
    peak, total = values
    top = _lanes(np.fmax.reduce(peak, 0), np.fmax)
    top = np.float32(0) if top == -np.inf else top
    return [top, _add(np.exp(peak - top) * total)]
