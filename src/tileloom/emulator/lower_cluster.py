"""Lowering of the inline assembly of `tileloom.device.cluster`: sums over a cluster's warps.

PTX that each CTA of a cluster would run on its own is not played in general; these texts are known
as a whole, by their first lines, and what they give is computed in the same order of additions.
What is judged is that a box is used once, by as many numbers as it was made for. What their PTX
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
_FIRST_LINE = re.compile(r"\{ // cluster_(begin|sums|moments|softmax) (\d+) (\d+) (\d+)\n")


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
    """Add up `[turns, 32]`."""
    total = np.zeros(32, np.float32)
    for row in numbers:
        total = total + row
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
