"""Clusters: how tensors and shared buffers are spread over the CTAs of a program.

Gluon writes a cluster as one program whose tensors span all CTAs; a layout's CGA bases say which
part each CTA holds. The emulator runs that program once, for the values, and keeps books for each
CTA as for a thread of its own: what it has accessed, what it knows. A base of zeros means that the
CTAs whose numbers differ in that bit hold a copy each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tileloom.emulator import phases
from tileloom.emulator.ir import Module, Type, split_top
from tileloom.emulator.report import UnsupportedKernelError

if TYPE_CHECKING:
    from tileloom.emulator.machine import Partition

Bases = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Spread:
    """How a shape is spread over the CTAs of a cluster.

    Attributes:
        parts: For each CTA the slices that it holds.
        leads: For each CTA the first one that holds the same part.
        pieces: How many different parts there are.
    """

    parts: tuple[tuple[slice, ...], ...]
    leads: tuple[int, ...]
    pieces: int

    def group(self, rank: int) -> list[int]:
        """Return the CTAs that hold the same part as this one."""
        return [r for r, lead in enumerate(self.leads) if lead == self.leads[rank]]


def layout_body(layout: str, aliases: dict[str, str]) -> str:
    """Return a layout's own text for the name that a type gives."""
    while layout.startswith("#") and layout[1:] in aliases:
        layout = aliases[layout[1:]]
    return layout


def layout_field(text: str, name: str) -> str:
    """Return a parameter of a layout as text; empty if it is not there."""
    inner = text[text.index("<{") + 2 : text.rindex("}>")]
    for item in split_top(inner):
        key, _, value = item.partition(" = ")
        if key == name:
            return value
    return ""


def _bases(text: str) -> list[list[int]]:
    return [[int(x) for x in row.split(",")] for row in re.findall(r"\[([-\d, ]+)\]", text)]


def _bases_of(layout: str, aliases: dict[str, str], shape: tuple[int, ...]) -> list[list[int]]:
    """Return the CGA bases of a layout, one a bit of the CTA's number, in units of a CTA's part."""
    text = layout_body(layout, aliases)
    if text.startswith(("#ttg.slice", "#ttg.dot_op")):
        parent = layout_field(text, "parent")
        if text.startswith("#ttg.slice"):
            dim = int(layout_field(text, "dim"))
            outer = (*shape[:dim], 1, *shape[dim:])
            return [b[:dim] + b[dim + 1 :] for b in _bases_of(parent, aliases, outer)]
        across = len(shape) - 1 if layout_field(text, "opIdx") == "0" else len(shape) - 2
        found = _bases_of(parent, aliases, shape)
        return [[0 if i == across else x for i, x in enumerate(b)] for b in found]
    if text.startswith(("#ttg.linear", "#ttg.shared_linear")):
        found = _bases(layout_field(text, "block"))
        splits = [2 ** sum(bool(b[i]) for b in found) for i in range(len(shape))]
        return [[x * k // n for x, k, n in zip(b, splits, shape)] for b in found]
    return _bases(layout_field(text, "CGALayout")) if "CGALayout" in text else []


@lru_cache(maxsize=1024)
def _spread(bases: Bases, shape: tuple[int, ...], count: int) -> Spread:
    rank = len(bases[0]) if bases else len(shape)
    leading = len(shape) - rank
    splits = [2 ** sum(bool(b[i]) for b in bases) for i in range(rank)]
    sizes = [max(n // k, 1) for n, k in zip(shape[leading:], splits)]
    parts, leads = [], []
    for cta in range(count):
        at, lead = [0] * rank, 0
        for bit, base in enumerate(bases):
            if cta >> bit & 1:
                at = [x ^ y for x, y in zip(at, base)]
                lead |= (1 << bit) if any(base) else 0
        box = tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, sizes))
        parts.append((*[slice(None)] * leading, *box))
        leads.append(lead)
    return Spread(tuple(parts), tuple(leads), int(np.prod(splits)))


def spread_of(ty: Type, module: Module) -> Spread:
    """Return how a type is spread over the CTAs of a module's programs.

    Args:
        ty: Of a tensor, buffer or descriptor; one without a layout is held by every CTA.
        module: The module, for its layouts' names and its number of CTAs.

    Returns:
        The parts.

    Raises:
        UnsupportedKernelError: If the layout does not tell.
    """
    count = module.num_ctas
    bases = [] if count == 1 or not ty.layout else _bases_of(ty.layout, module.aliases, ty.shape)
    if not bases and count > 1:
        bases = [[0] * len(ty.shape)] * (count.bit_length() - 1)
    if count > 1 and 2 ** len(bases) != count:
        raise UnsupportedKernelError(f"a layout for another number of CTAs than {count}: {ty.text}")
    return _spread(tuple(tuple(b) for b in bases), ty.shape, count)


def owners(
    places: np.ndarray, shape: tuple[int, ...], axis: int, here: Spread, there: Spread
) -> list[list[int]]:
    """Return for each CTA those whose memory it touches at computed places along an axis.

    Args:
        places: The place of each lane.
        shape: Of the shared memory, all CTAs' parts together.
        axis: The axis.
        here: How the lanes are spread.
        there: How the memory is spread; of copies each CTA touches its own.

    Returns:
        A list of CTAs for each CTA.
    """
    count = len(here.parts)
    if there.pieces < max(count, 2):
        return [[rank] for rank in range(count)]
    owner = np.empty(shape, np.int64)
    for rank, part in enumerate(there.parts):
        owner[part] = rank
    found = np.take_along_axis(owner, places, axis)
    return [np.unique(found[part]).tolist() for part in here.parts]


def arrive_all(partition: Partition, *, relaxed: bool = False) -> None:
    """Let every CTA arrive at the cluster's barrier.

    Args:
        partition: The partition, of the first CTA.
        relaxed: Whether the barrier orders no memory; then only initialisations of mbarriers that a
            fence has released become known.
    """
    for buffer in partition.cta.buffers.values():
        for barrier in buffer.bars.values():
            barrier.in_cluster = barrier.in_cluster or barrier.fenced
    for one in partition.team:
        one.clock[one.key] += 1
        one.left = (phases.known(one), {}) if relaxed else (dict(one.clock), dict(one.fence))


def wait_all(partition: Partition) -> None:
    """Let every CTA know what the others knew when they arrived at the cluster's barrier."""
    for one in partition.team:
        for other in partition.team:
            one.learn(*other.left)
