"""Global and shared memory as the emulator holds it.

Global tensors live in a virtual 64-bit space above all real addresses, one tensor storage every
2^40 bytes, so that a pointer is a plain integer and an address that left its tensor still names it.
Shared buffers are
logical arrays with a mask of what was written; physical offsets matter only at level ``machine``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tileloom.emulator import dtypes
from tileloom.emulator.ir import Loc

if TYPE_CHECKING:
    from tileloom.emulator.barriers import Barrier
    from tileloom.emulator.happens_before import GlobalShadow, Record

FIRST = 1 << 48
SPACING = 40


class Storage:
    """The memory behind one tensor, as raw words.

    Attributes:
        name: The kernel argument that named it.
        base: Its first virtual address.
        address: Its first real address; 0 if it has no memory.
        nbytes: Its size.
        elem_size: Size of the elements of the tensor that named it: the grain of race detection.
    """

    def __init__(self, index: int, name: str, data: np.ndarray, elem_size: int) -> None:
        self.index = index
        self.name = name
        self.base = FIRST + (index << SPACING)
        self.nbytes = data.size
        self.elem_size = elem_size
        self.address = 0
        self.shadow: GlobalShadow | None = None
        self._words: dict[int, np.ndarray] = {1: data}

    def words(self, size: int) -> np.ndarray:
        """Return the memory as unsigned words of `size` bytes; a rest at the end is left out."""
        found = self._words.get(size)
        if found is None:
            whole = self._words[1]
            found = whole[: whole.size // size * size].view(dtypes.RAW[size])
            self._words[size] = found
        return found


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory behind a CPU tensor as bytes that share it."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(storage, 0, (storage.nbytes(),), (1,))
    return flat.numpy()


@dataclass
class Desc:
    """A tensor descriptor: a window description over a storage, for TMA."""

    storage: Storage
    offset: int
    shape: list[int]
    strides: list[int]
    block: tuple[int, ...]
    elem: str
    nan_fill: bool = False
    name: str = ""
    _view: np.ndarray | None = None
    _index: np.ndarray | None = None

    def view(self) -> np.ndarray:
        """Return the described tensor as raw words."""
        if self._view is None:
            size = dtypes.size_of(self.elem)
            words = self.storage.words(size)[self.offset :]
            self._view = np.lib.stride_tricks.as_strided(
                words, tuple(self.shape), tuple(s * size for s in self.strides)
            )
        return self._view

    def shadow_of(self, shadow: np.ndarray, inside: tuple[slice, ...]) -> Any:
        """Return the part of a shadow array under some slices: a view, or an array and indices.

        There is a word of it for each element of the tensor that named the storage, whose size may
        be another one.
        """
        grain, size = self.storage.elem_size, dtypes.size_of(self.elem)
        if size == grain:
            return np.lib.stride_tricks.as_strided(
                shadow[self.offset :], tuple(self.shape), tuple(s * 4 for s in self.strides)
            )[inside]
        index: Any = self.offset
        for axis, (piece, step) in enumerate(zip(inside, self.strides)):
            along = np.arange(piece.start, piece.stop) * step
            index = index + along.reshape((-1,) + (1,) * (len(inside) - 1 - axis))
        first = index * size // grain
        if size > grain:
            first = first[..., None] + np.arange(size // grain)
        return shadow, first

    def part(self, at: list[int], part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the slices of the tensor that a part of a box at some coordinates covers."""
        inside = []
        for start, piece, size, limit in zip(at, part, self.block, self.shape):
            first, last, _ = piece.indices(size)
            low = min(max(start + first, 0), limit)
            inside.append(slice(low, max(min(start + last, limit), low)))
        return tuple(inside)

    def outside(self, at: list[int]) -> list[int]:
        """Return the dimensions in which a box at some coordinates lies wholly outside."""
        sizes = zip(at, self.block, self.shape)
        return [i for i, (c, size, n) in enumerate(sizes) if c >= n or c + size <= 0]

    def window(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...], bool]:
        """Clip a box at some coordinates: slices of the tensor, of the box, and if it is whole."""
        inside, part = [], []
        whole = True
        for start, size, limit in zip(at, self.block, self.shape):
            low = min(max(start, 0), limit)
            high = max(min(start + size, limit), low)
            inside.append(slice(low, high))
            part.append(slice(low - start, high - start) if high > low else slice(0, 0))
            whole = whole and high - low == size
        return tuple(inside), tuple(part), whole

    def read(self, at: list[int]) -> np.ndarray:
        """Read a box; what lies outside the tensor is zero (or NaN)."""
        inside, part, whole = self.window(at)
        values = dtypes.from_bits(np.ascontiguousarray(self.view()[inside]), self.elem)
        if whole:
            return values
        box = np.zeros(self.block, values.dtype)
        if self.nan_fill:
            box.fill(np.nan)
        box[part] = values
        return box

    def write(self, at: list[int], values: np.ndarray) -> None:
        """Write a box; what lies outside the tensor is dropped."""
        inside, part, _ = self.window(at)
        box = np.reshape(values, self.block)[part]
        self.view()[inside] = dtypes.to_bits(box, self.elem)


class Geometry:
    """How the views of one shared allocation overlap; kept with the operation for all programs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.size = int(np.prod(shape))
        self.ids: dict[Any, int] = {}
        self.masks: list[np.ndarray] = []
        self.over: list[list[int]] = []
        self.covers: list[list[int]] = []
        self.span: list[tuple[int, int]] = []

    def region(self, view: View) -> int:
        """Return the number of a view's region, making it if it is new."""
        found = self.ids.get(view.key)
        if found is not None:
            return found
        mask = np.zeros(self.size, np.bool_)
        offset, pairs = view.key
        shape = tuple(n for _, n in pairs)
        strides = tuple(s for s, _ in pairs)
        np.lib.stride_tricks.as_strided(mask[offset:], shape, strides)[...] = True
        number = len(self.masks)
        over, covers = [], []
        for other, known in enumerate(self.masks):
            if (known & mask).any():
                over.append(other)
                self.over[other].append(number)
                if not (known & ~mask).any():
                    covers.append(other)
                if not (mask & ~known).any():
                    self.covers[other].append(number)
        where = np.flatnonzero(mask)
        self.masks.append(mask)
        self.over.append(over)
        self.covers.append(covers)
        self.span.append((int(where[0]), int(where[-1]) + 1) if where.size else (0, 0))
        self.ids[view.key] = number
        return number


class Book:
    """The accesses to one CTA's copy or part of a shared allocation, by region."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[int, Record] = {}
        self.reads: dict[int, list[Record]] = {}


class SharedBuffer:
    """One shared allocation of one program; in a cluster, of all its CTAs.

    Attributes:
        books: The accesses, for each CTA.
        bars: The mbarriers in it, by offset and CTA.
        pieces: How many CTAs' parts the logical shape is made of.
    """

    def __init__(
        self, name: str, elem: str, geometry: Geometry, loc: Loc, ctas: int = 1, pieces: int = 1
    ) -> None:
        self.name = name
        self.elem = elem
        self.geometry = geometry
        self.loc = loc
        self.data = np.zeros(geometry.shape, dtypes.numpy_type(elem))
        self.init = np.zeros(geometry.shape, np.bool_)
        self.books = [Book() for _ in range(ctas)]
        self.bars: dict[tuple[int, int], Barrier] = {}
        self.start = -1
        self.pieces = pieces
        self.nbytes = geometry.size * dtypes.size_of(elem) // pieces
        self.aliases: list[SharedBuffer] = []
        self.offsets: np.ndarray | None = None
        self.family: Family | None = None
        self.origin = self.init.__array_interface__["data"][0]
        self.poison()

    def poison(self) -> None:
        """Make the contents recognisably undefined."""
        if dtypes.is_float(self.elem):
            self.data.fill(np.nan)
        self.init.fill(False)

    def byte_span(self, region: int) -> tuple[int, int]:
        """Return the physical bytes that a region may touch, rounded out to whole slots."""
        size = dtypes.size_of(self.elem)
        if self.offsets is not None:
            touched = self.offsets.reshape(-1)[self.geometry.masks[region]]
            return self.start + int(touched.min()) * size, self.start + int(
                touched.max() + 1
            ) * size
        shape = self.geometry.shape
        slot = self.geometry.size // shape[0] if len(shape) > 2 else self.geometry.size
        low, high = self.geometry.span[region]
        return (
            self.start + low // slot * slot * size // self.pieces,
            self.start + -(-high // slot) * slot * size // self.pieces,
        )


class Family:
    """Buffers that are the same bytes seen as different types.

    One of them, the current one, is up to date; the image holds what the others wrote before.
    """

    def __init__(self, first: SharedBuffer) -> None:
        self.members = [first]
        self.current = first
        self.image = np.zeros(first.nbytes, np.uint8)
        self.written = np.zeros(first.nbytes, np.bool_)
        first.family = self

    def add(self, buffer: SharedBuffer, start: int) -> None:
        """Add a buffer that begins at some byte of the first one."""
        buffer.family = self
        buffer.start = self.members[0].start + start
        for other in {*self.members, *self.members[0].aliases}:
            other.aliases.append(buffer)
            buffer.aliases.append(other)
        self.members.append(buffer)

    def claim(self, buffer: SharedBuffer) -> None:
        """Bring a buffer up to date, as its elements are about to be read or written."""
        old, self.current = self.current, buffer
        if old is buffer:
            return
        words, known, order = self._place(old)
        words[order] = dtypes.to_bits(old.data, old.elem).reshape(-1)
        known[order] = old.init.reshape(-1)[:, None]
        words, known, order = self._place(buffer)
        values = dtypes.from_bits(words[order], buffer.elem).reshape(buffer.data.shape)
        buffer.init[...] = known[order].all(1).reshape(buffer.init.shape)
        buffer.data[...] = values
        if dtypes.is_float(buffer.elem):
            buffer.data[~buffer.init] = np.nan

    def _place(self, buffer: SharedBuffer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a buffer's part of the image as words, and the order of its elements there."""
        assert buffer.offsets is not None, "a member of a family knows its layout"
        size = dtypes.size_of(buffer.elem)
        begin = buffer.start - self.members[0].start
        place = slice(begin, begin + buffer.nbytes)
        words = self.image[place].view(dtypes.RAW[size])
        return words, self.written[place].reshape(-1, size), buffer.offsets.reshape(-1)


class View:
    """A memory descriptor: a part of a shared buffer under some shape."""

    __slots__ = ("_region", "_sub", "buffer", "data", "init", "key", "label")

    def __init__(
        self, buffer: SharedBuffer, data: np.ndarray, init: np.ndarray, label: str
    ) -> None:
        self.buffer = buffer
        self.data = data
        self.init = init
        self.label = label
        self._sub: dict[int, View] = {}
        self._region = -1
        offset = init.__array_interface__["data"][0] - buffer.origin
        self.key = (offset, tuple(sorted(zip(init.strides, init.shape))))

    @property
    def name(self) -> str:
        """The name as the user would write it, for example ``a_bufs[0]``."""
        return self.buffer.name + self.label

    @property
    def region(self) -> int:
        """The number of its region in the buffer's geometry."""
        if self._region < 0:
            self._region = self.buffer.geometry.region(self)
        return self._region

    def current(self) -> np.ndarray:
        """Return the data, brought up to date where other types see the same bytes."""
        if self.buffer.family is not None:
            self.buffer.family.claim(self.buffer)
        return self.data

    def index(self, i: int) -> View:
        """Return the i-th slice along the first dimension."""
        found = self._sub.get(i)
        if found is None:
            found = View(self.buffer, self.data[i], self.init[i], f"{self.label}[{i}]")
            self._sub[i] = found
        return found

    def write(self, values: Any) -> None:
        """Set the values and mark them written."""
        self.data[...] = values
        self.init[...] = True


@dataclass
class Scratch:
    """A piece of global scratch memory that holds a descriptor made on the device."""

    desc: Desc | None = None
    loc: Loc = field(default_factory=Loc)
