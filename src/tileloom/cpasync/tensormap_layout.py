"""What a TMA descriptor says beside its address, and what the driver and the hardware demand of it.

The driver answers every mistake with CUDA_ERROR_INVALID_VALUE. Here each demand is a sentence.
Sizes are in torch's order: the dimension that lies contiguous is the last one.
Source: CUDA driver API, cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tileloom.errors import DtypeError, OptionError, ShapeError, TileloomError, shown_value
from tileloom.launch import tensor_map

# CUtensorMapDataType. What only moves may be named by its size.
ELEMENT_TYPES = {
    torch.bool: 0, torch.uint8: 0, torch.int8: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0,
    torch.float8_e4m3fnuz: 0, torch.float8_e5m2fnuz: 0, torch.float8_e8m0fnu: 0,
    torch.uint16: 1, torch.int16: 1, torch.uint32: 2, torch.int32: 3, torch.uint64: 4,
    torch.int64: 5, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_TF32 = 11
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
FILLS = {"zero": 0, "nan": 1}
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
_CHOICES = {
    "swizzle": SWIZZLES, "interleave": INTERLEAVES, "fill": FILLS, "l2_promotion": L2_PROMOTIONS
}  # fmt: skip

MOST_BOX, MOST_STEP, MOST_CHANNELS, MOST_PIXELS = 256, 8, 256, 1024
MOST_SIZE, MOST_PITCH = 2**32, 2**40
MOST_END = 2**31 - 1
"""Of a window of pixels in im2col mode. Not documented; the driver counts it in 32 bits."""
MOST_BYTES = 228 * 1024
"""Of a load: shared memory of a multiprocessor. Not documented; the driver refuses more."""
# The range of a corner of the window of pixels, by the number of spatial dimensions.
CORNERS = {1: (-(2**15), 2**15 - 1), 2: (-(2**7), 2**7 - 1), 3: (-(2**4), 2**4 - 1)}

Demand = tuple[bool, type[TileloomError], str, str]
"""Whether it holds; if not, the error, what is wrong, and a remedy."""


def _nearest(value: object, known: Sequence[str]) -> str:
    """The choice that is most like what was given, in any case of letters; else the first."""
    given = shown_value(value).strip("'\"").lower()
    near = difflib.get_close_matches(given, [name.lower() for name in known], n=1)
    return next((name for name in known if [name.lower()] == near), known[0])


@dataclass(frozen=True)
class Layout:
    """All of a TMA descriptor but the address; hashable, and it holds no tensor.

    Attributes:
        dtype: Of an element.
        shape: Sizes, 1 to 5 of them.
        strides: In elements. Of a dimension of size 1 it is of no account.
        element_strides: Step within a box along each dimension.
        swizzle: How 16-byte pieces are permuted in shared memory: ``"none"``, ``"32B"``, ``"64B"``,
            ``"128B"``.
        interleave: Of channels in slices of 16 or 32 bytes: ``"none"``, ``"16B"``, ``"32B"``.
        fill: What is read outside the tensor: ``"zero"`` or ``"nan"``.
        l2_promotion: Bytes that L2 fetches at once: ``"none"``, ``"64B"``, ``"128B"``, ``"256B"``.
        tf32: Whether float32 is rounded to TF32 as it is loaded.
    """

    op: ClassVar[str]

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: str = "none"
    fill: str = "zero"
    l2_promotion: str = "128B"
    tf32: bool = False

    def check(self, address: int) -> None:
        """Check every demand.

        Args:
            address: Where the tensor begins.

        Raises:
            DtypeError: For a type that TMA does not move.
            ShapeError: For sizes, strides or an address that it does not take.
            OptionError: For every other argument.
        """
        for holds, error, said, remedy in self._demands(address):
            if not holds:
                raise error(f"{self.op}: {said}. Try: {remedy}.")

    def encode(self, address: int) -> bytes:
        """Let the driver encode the descriptor of an address; 128 bytes. It is not checked."""
        raise NotImplementedError

    @property
    def pitches(self) -> tuple[int, ...]:
        """Strides in bytes of all dimensions but the last; a size of 1 has a harmless one."""
        pairs = zip(self.shape[:-1], self.strides[:-1])
        return tuple(32 if n == 1 else stride * self.dtype.itemsize for n, stride in pairs)

    @property
    def inner(self) -> int:
        """Elements of a box along the contiguous dimension."""
        raise NotImplementedError

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Elements that a load copies along each dimension."""
        raise NotImplementedError

    @property
    def box_bytes(self) -> int:
        """Bytes of a load: what a barrier expects, also of a box at the edge."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a load touches: rows lie a swizzle's span apart, or close."""
        span = 0 if self.swizzle == "none" or self.interleave != "none" else int(self.swizzle[:-1])
        row = self.inner * self.dtype.itemsize
        return self.box_bytes // row * max(row, span)

    def _demands(self, address: int) -> Iterator[Demand]:
        yield from self._types()
        yield from self._sizes()
        yield from self._memory(address)
        yield from self._box()
        yield from self._steps()
        yield from self._swizzling()

    def _types(self) -> Iterator[Demand]:
        yield (
            self.dtype in ELEMENT_TYPES, DtypeError,
            f"tensor has dtype {self.dtype}, which TMA does not move",
            "tensor.view(torch.uint8), or torch.view_as_real of a complex one",
        )  # fmt: skip
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            yield (
                value in tuple(known), OptionError,
                f"{name} is {shown_value(value)}; known: {', '.join(known)}",
                f"{name}={_nearest(value, list(known))!r}",
            )  # fmt: skip
        yield (
            self.fill == "zero" or self.dtype in _FLOATS, OptionError,
            f"fill='nan' for dtype {self.dtype}; NaN is filled in for float16, bfloat16, float32 "
            "and float64", "fill='zero'",
        )  # fmt: skip
        yield (
            not self.tf32 or self.dtype == torch.float32, OptionError,
            f"tf32=True for dtype {self.dtype}; only float32 is rounded to TF32", "tf32=False",
        )  # fmt: skip

    def _sizes(self) -> Iterator[Demand]:
        rank = len(self.shape)
        least = 3 if self.interleave != "none" else 1
        yield (
            least <= rank <= 5, ShapeError,
            f"tensor has {rank} dimensions; TMA takes {least} to 5"
            + (f" with interleave={self.interleave!r}" if least == 3 else ""),
            "tensor[None] or tensor.unflatten(...)" if rank < least else "tensor.flatten(0, 1)",
        )  # fmt: skip
        yield (
            all(1 <= n <= MOST_SIZE for n in self.shape), ShapeError,
            f"tensor has shape {self.shape}; each size must be 1 to 2^32",
            "returning before the launch where there is nothing to do"
            if 0 in self.shape else "a descriptor of a part",
        )  # fmt: skip

    def _memory(self, address: int) -> Iterator[Demand]:
        unit = 32 if self.interleave == "32B" else 16
        why = "; interleave='32B' needs" if unit == 32 else "; TMA needs"
        yield (
            address % unit == 0, ShapeError,
            f"tensor begins at the address {address:#x}{why} a multiple of {unit} bytes",
            "a slice that begins at such an element, or tensor.clone()",
        )  # fmt: skip
        yield (
            self.shape[-1] == 1 or self.strides[-1] == 1, ShapeError,
            f"tensor has strides {self.strides}; TMA needs the last dimension contiguous",
            "tensor.contiguous(), or the transposed tensor with a transposed box",
        )  # fmt: skip
        for axis, pitch in enumerate(self.pitches):
            yield (
                pitch % unit == 0 and 0 <= pitch < MOST_PITCH, ShapeError,
                f"tensor's stride along dimension {axis} is {self.strides[axis]} elements = "
                f"{pitch} bytes{why} a multiple of {unit} bytes below 2^40",
                "rows padded to such a size: torch.nn.functional.pad",
            )  # fmt: skip

    def _box(self) -> Iterator[Demand]:
        raise NotImplementedError

    def _steps(self) -> Iterator[Demand]:
        steps = self.element_strides
        yield (
            len(steps) == len(self.shape) and all(1 <= n <= MOST_STEP for n in steps), OptionError,
            f"element_strides is {steps}; it takes {len(self.shape)} numbers of 1 to {MOST_STEP}",
            "leaving element_strides out, which steps by 1",
        )  # fmt: skip
        yield (
            self.interleave != "none" or steps[-1] == 1, OptionError,
            f"element_strides is {steps}; without interleave TMA ignores a step along the last "
            "dimension", "a view of the tensor with one dimension more",
        )  # fmt: skip

    def _swizzling(self) -> Iterator[Demand]:
        size = self.inner * self.dtype.itemsize
        yield (
            size % 16 == 0, ShapeError,
            f"a box has {self.inner} elements = {size} bytes along the last dimension; TMA needs a "
            "multiple of 16 bytes", f"{-(-size // 16) * 16 // self.dtype.itemsize} elements",
        )  # fmt: skip
        yield (
            self.box_bytes <= MOST_BYTES, OptionError,
            f"a box of {' x '.join(map(str, self.box_shape))} elements has {self.box_bytes} bytes; "
            f"TMA takes {MOST_BYTES} at most, which is all of shared memory", "a smaller box",
        )  # fmt: skip
        span = 0 if self.swizzle == "none" else int(self.swizzle[:-1])
        yield (
            self.interleave != "none" or not span or size <= span, OptionError,
            f"a box has {self.inner} elements = {size} bytes along the last dimension, and "
            f"swizzle={self.swizzle!r} permutes within {span} bytes",
            f"a box of {span // self.dtype.itemsize} elements and more loads, or swizzle='none'",
        )  # fmt: skip
        yield (
            self.interleave != "32B" or self.swizzle == "32B", OptionError,
            f"interleave='32B' with swizzle={self.swizzle!r}; it needs swizzle='32B'",
            "swizzle='32B'",
        )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        return {
            "element_bytes": self.dtype.itemsize,
            "element_type": _TF32 if self.tf32 else ELEMENT_TYPES[self.dtype],
            "swizzle": SWIZZLES[self.swizzle],
            "interleave": INTERLEAVES[self.interleave],
            "l2_promotion": L2_PROMOTIONS[self.l2_promotion],
            "fill": FILLS[self.fill],
            "element_strides": self.element_strides,
        }

    @property
    def _encoded_strides(self) -> tuple[int, ...]:
        return (*(pitch // self.dtype.itemsize for pitch in self.pitches), 1)


@dataclass(frozen=True)
class Tiled(Layout):
    """A descriptor for boxes, loads and stores alike.

    Attributes:
        box: Elements that a box spans along each dimension; of them every `element_strides`-th is
            copied.
    """

    op = "TensorMap.tiled"
    box: tuple[int, ...] = ()

    @property
    def inner(self) -> int:
        """Elements of a box along the contiguous dimension."""
        return self.box[-1]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Elements that are copied along each dimension."""
        return tuple(-(-n // step) for n, step in zip(self.box, self.element_strides))

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory: what a barrier expects, also of a box at the edge."""
        return math.prod(self.box_shape) * self.dtype.itemsize

    def _box(self) -> Iterator[Demand]:
        box: object = self.box
        yield (
            isinstance(box, (tuple, list)) and all(type(n) is int for n in box), OptionError,
            f"box is {box!r}; it must be a tuple of integers",
            f"box={tuple(min(n, 64) for n in self.shape)}",
        )  # fmt: skip
        yield (
            len(self.box) == len(self.shape), ShapeError,
            f"box has {len(self.box)} sizes and tensor {len(self.shape)} dimensions",
            "a size of 1 for each dimension that the box does not extend along",
        )  # fmt: skip
        for axis, n in enumerate(self.box):
            yield (
                1 <= n <= MOST_BOX, OptionError,
                f"box is {self.box}, {n} along dimension {axis}; TMA takes 1 to {MOST_BOX}",
                f"{MOST_BOX} and more loads" if n > MOST_BOX else "1",
            )  # fmt: skip

    def encode(self, address: int) -> bytes:
        """Let the driver encode the descriptor of an address; 128 bytes. It is not checked."""
        return tensor_map.encode_tiled(
            address, self.shape, self._encoded_strides, self.box, **self._options()
        )


@dataclass(frozen=True)
class Im2col(Layout):
    """A descriptor for loads of the pixels under a convolution's window, ``[N, spatial..., C]``.

    Attributes:
        lower: Where the window of first pixels begins along each spatial dimension, counted from 0.
        upper: Where it ends, counted from the last pixel.
        pixels: Of a load, 1 to 1024.
        channels: Of each pixel, 1 to 256.
    """

    op = "TensorMap.im2col"
    lower: Sequence[int] = ()
    upper: Sequence[int] = ()
    pixels: int = 1
    channels: int = 1

    @property
    def inner(self) -> int:
        """Channels of a load."""
        return self.channels

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Pixels and channels of a load."""
        return (self.pixels, self.channels)

    @property
    def box_bytes(self) -> int:
        """Bytes of a load in shared memory: what a barrier expects."""
        return self.pixels * self.channels * self.dtype.itemsize

    def _sizes(self) -> Iterator[Demand]:
        rank = len(self.shape)
        yield (
            3 <= rank <= 5, ShapeError,
            f"tensor has {rank} dimensions; im2col takes [N, W, C], [N, H, W, C] and "
            "[N, D, H, W, C]", "tensor.unsqueeze(1)" if rank < 3 else "tensor.flatten(0, 1)",
        )  # fmt: skip
        yield from super()._sizes()

    def _box(self) -> Iterator[Demand]:
        spatial = len(self.shape) - 2
        low, high = CORNERS[spatial]
        for name in ("lower", "upper"):
            corner = getattr(self, name)
            yield (
                len(corner) == spatial and all(low <= n <= high for n in corner), OptionError,
                f"{name} is {corner}; a tensor of {len(self.shape)} dimensions takes {spatial} "
                f"numbers of {low} to {high}", f"{name}={(0,) * spatial}",
            )  # fmt: skip
        # Interleaved, the driver holds the corners against the channels as if pixels began there.
        sizes = self.shape[1:-1] if self.interleave == "none" else self.shape[2:]
        ends = [n + b for n, b in zip(sizes, self.upper)]
        window = [end - a for end, a in zip(ends, self.lower)]
        yield (
            all(n >= 1 and end <= MOST_END for n, end in zip(window, ends)), OptionError,
            f"the window from {tuple(self.lower)} to {tuple(self.upper)} has {tuple(window)} "
            f"pixels in a tensor of shape {self.shape} and ends at {tuple(ends)}; each must have 1 "
            "at least and end at 2^31 - 1 at most",
            "upper = padding - dilation * (kernel - 1)",
        )  # fmt: skip
        for name, most in (("pixels", MOST_PIXELS), ("channels", MOST_CHANNELS)):
            n = getattr(self, name)
            yield (
                1 <= n <= most, OptionError, f"{name} is {n}; TMA takes 1 to {most}",
                f"{name}={most} and more loads" if n > most else f"{name}=1",
            )  # fmt: skip

    def encode(self, address: int) -> bytes:
        """Let the driver encode the descriptor of an address; 128 bytes. It is not checked."""
        return tensor_map.encode_im2col(
            address, self.shape, self._encoded_strides, self.lower, self.upper,
            pixels=self.pixels, channels=self.channels, **self._options(),
        )  # fmt: skip
