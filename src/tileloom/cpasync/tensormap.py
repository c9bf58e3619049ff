"""TMA descriptors on the host: a torch tensor, a box, and how a tile lies in shared memory.

>>> import torch
>>> from tileloom.cpasync.tensormap import TensorMap, TensorMapTable
>>> a = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
>>> tiles = TensorMap.tiled(a, (128, 64), swizzle="128B")  # doctest: +SKIP
>>> launch(stream, tiles.encoded, ...)  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tileloom.cpasync.tensormap_layout import Im2col, Tiled
from tileloom.errors import DeviceError, DtypeError, OptionError, UnsupportedError, known_keywords
from tileloom.launch.tensor_map import ALIGNMENT, BYTES
from tileloom.target import target_of_device

BYTES_PER_TENSORMAP = BYTES
"""The size of one descriptor."""

KEPT = 1024
"""How many encoded descriptors are kept, those used last."""


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor, encoded; made by `tiled` or `im2col`.

    It holds numbers and no tensor: keep the tensor alive until the kernels that read the descriptor
    have run. Making one that was made before, of the same address and layout, is a look-up among
    the 1024 used last. Encoding is work of the host, legal while a CUDA graph is captured.

    Attributes:
        layout: What it says beside the address.
        address: Where the tensor begins.
        encoded: The CUtensorMap, 128 bytes: the value of a kernel parameter.
    """

    layout: Tiled | Im2col
    address: int
    encoded: bytes

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Elements that a load copies along each dimension (im2col: pixels and channels)."""
        return self.layout.box_shape

    @property
    def box_bytes(self) -> int:
        """Bytes that a load writes to shared memory: what its mbarrier expects.

        It is the same for a box that reaches outside the tensor, which is filled.

        Raises:
            OptionError: If the descriptor is interleaved: see `tiled`.
        """
        self._check_known("box_bytes")
        return self.layout.box_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a load may touch: more than `box_bytes` in some cases.

        Where the box is narrower than the swizzle's span, its rows are that span apart.

        Raises:
            OptionError: If the descriptor is interleaved: see `tiled`.
        """
        self._check_known("shared_bytes")
        return self.layout.shared_bytes

    def _check_known(self, name: str) -> None:
        if self.layout.interleave != "none":
            raise OptionError(
                f"{self.layout.op}: {name} of interleave={self.layout.interleave!r} is not known: "
                "TMA then moves slices of 16 or 32 bytes and more than the box's elements. Try: "
                "interleave='none', or a count of your own."
            )

    @classmethod
    @known_keywords
    def tiled(
        cls,
        tensor: torch.Tensor,
        box: Sequence[int],
        *,
        swizzle: str = "none",
        interleave: str = "none",
        fill: str = "zero",
        element_strides: Sequence[int] | None = None,
        l2_promotion: str = "128B",
        tf32: bool = False,
    ) -> TensorMap:
        """Describe boxes of a tensor, for TMA loads, stores and reductions.

        Args:
            tensor: On a GPU of compute capability 9.0 or later; 1 to 5 dimensions, each 1 to 2^32,
                the last one contiguous. It begins at a multiple of 16 bytes, and the other strides
                are multiples of 16 bytes below 2^40, except where the size is 1; a stride of 0 is
                one. Every dtype of 1 to 8 bytes but complex ones.
            box: Size of a box along each dimension, in elements, 1 to 256; the last one spans a
                multiple of 16 bytes, and what is copied has 228 KiB at most.
            swizzle: ``"none"``, ``"32B"``, ``"64B"`` or ``"128B"``: 16-byte pieces are permuted in
                shared memory within that span, which the last size of the box may not exceed. Rows
                of a narrower box lie that span apart: see `shared_bytes`.
            interleave: ``"16B"`` or ``"32B"`` for channels that lie in slices of such a size (3
                dimensions or more); ``"32B"`` needs ``swizzle="32B"``, address and strides in
                multiples of 32 bytes. The descriptor is encoded as it is given; what a load then
                moves has not been established (on an H200 coordinates along the last dimension
                count slices), so that `box_bytes` and `shared_bytes` are refused.
            fill: What is read outside the tensor: ``"zero"``, or ``"nan"`` for floating dtypes.
            element_strides: Step within a box along each dimension, 1 to 8: of `box` elements every
                so many-th is copied. Not along the last one, unless interleaved.
            l2_promotion: Bytes that L2 fetches at once: ``"none"``, ``"64B"``, ``"128B"``,
                ``"256B"``.
            tf32: Whether float32 is rounded to TF32 as it is loaded.

        Returns:
            The descriptor. Coordinates in the kernel are those of the box's first element, the
            last dimension first, as PTX has them.

        Raises:
            DeviceError: If the tensor is on no GPU.
            UnsupportedError: If its GPU has no TMA.
            DtypeError: If TMA does not move its dtype.
            ShapeError: If its sizes, strides or address do not fit.
            OptionError: If another argument does not.
            LaunchError: If the driver refuses all the same.

        Source: CUDA driver API, cuTensorMapEncodeTiled.
        """
        _check_tensor(Tiled.op, tensor)
        return _of(
            Tiled, tensor, _numbers(Tiled.op, "element_strides", element_strides, tensor.dim()),
            swizzle, interleave, fill, l2_promotion, tf32, _numbers(Tiled.op, "box", box, 0),
        )  # fmt: skip

    @classmethod
    @known_keywords
    def im2col(
        cls,
        tensor: torch.Tensor,
        *,
        lower: Sequence[int],
        upper: Sequence[int],
        pixels: int,
        channels: int,
        swizzle: str = "none",
        interleave: str = "none",
        fill: str = "zero",
        element_strides: Sequence[int] | None = None,
        l2_promotion: str = "128B",
        tf32: bool = False,
    ) -> TensorMap:
        """Describe loads in im2col mode: pixels under the window of a convolution.

        A load begins at a pixel and walks through the window's first pixels, row after row and
        image after image; the offsets that it is given say which pixel of the window is read.

        Args:
            tensor: Images ``[N, W, C]``, ``[N, H, W, C]`` or ``[N, D, H, W, C]``, else as for
                `tiled`.
            lower: For each spatial dimension, where windows begin: ``-padding``.
            upper: Where they end, counted from the last pixel:
                ``padding - dilation * (kernel - 1)``. Both are -32768 to 32767 in one spatial
                dimension, -128 to 127 in two, -16 to 15 in three.
            pixels: Of a load, 1 to 1024; with their channels 228 KiB at most.
            channels: Of each pixel, 1 to 256, a multiple of 16 bytes, within the swizzle's span.
            swizzle: As for `tiled`, and so the rest.
            interleave: As for `tiled`.
            fill: As for `tiled`; it is what padding reads.
            element_strides: The convolution's stride along each spatial dimension, 1 for N and C.
            l2_promotion: As for `tiled`.
            tf32: As for `tiled`.

        Returns:
            The descriptor. A store or reduction (``im2col=True``) walks through the same pixels,
            and takes no offsets.

        Raises:
            DeviceError: As for `tiled`, and so UnsupportedError, DtypeError, ShapeError,
                OptionError and LaunchError.

        Source: CUDA driver API, cuTensorMapEncodeIm2col.
        """
        _check_tensor(Im2col.op, tensor)
        return _of(
            Im2col, tensor, _numbers(Im2col.op, "element_strides", element_strides, tensor.dim()),
            swizzle, interleave, fill, l2_promotion, tf32,
            _numbers(Im2col.op, "lower", lower, 0), _numbers(Im2col.op, "upper", upper, 0),
            *_numbers(Im2col.op, "pixels and channels", (pixels, channels), 0),
        )  # fmt: skip


@functools.lru_cache(maxsize=KEPT)
def _made(kind: type[Tiled | Im2col], address: int, *fields: Any) -> TensorMap:
    """Check and encode once for each address and layout. The key holds numbers, no tensor."""
    layout = kind(*fields)
    layout.check(address)
    return TensorMap(layout, address, layout.encode(address))


cache_info = _made.cache_info
cache_clear = _made.cache_clear


def _of(kind: type[Tiled | Im2col], tensor: torch.Tensor, *options: Any) -> TensorMap:
    fields = (tensor.dtype, tuple(tensor.shape), tensor.stride(), *options)
    if (target := target_of_device(tensor.device)).kind != "cuda":
        kind(*fields).check(0)  # what is wrong besides: the tensor may come to a GPU later
        raise DeviceError(
            f"{kind.op}: tensor is on the device {tensor.device}; TMA reads a GPU's memory. "
            "Try: tensor.cuda()."
        )
    if target.capability < (9, 0):
        raise UnsupportedError(
            f"{kind.op}: tensor is on a GPU of compute capability {target.capability[0]}."
            f"{target.capability[1]} ({target.name}), which has no TMA; 9.0 and later have it. "
            "Try: cp_async_gs, which copies 4 to 16 bytes a thread and needs no descriptor."
        )
    try:
        return _made(kind, tensor.data_ptr(), *fields)
    except DtypeError:
        raise
    except TypeError:  # an option that cannot be a key; a sentence says which
        kind(*fields).check(tensor.data_ptr())
        raise


def _numbers(op: str, name: str, given: Any, ones: int) -> tuple[int, ...]:
    """Read integers, or so many ones if there are none."""
    try:
        return (1,) * ones if given is None else tuple(map(operator.index, given))
    except TypeError:
        raise OptionError(
            f"{op}: {name} is {given!r}; it takes integers. Try: a tuple, one number for each "
            "dimension."
        ) from None


def _check_tensor(op: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(
            f"{op}: tensor is a {type(tensor).__name__}; it must be a torch.Tensor. "
            "Try: torch.as_tensor(...)."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise DtypeError(
            f"{op}: tensor is {'nested' if tensor.is_nested else tensor.layout}; TMA needs a "
            "dense strided one. Try: tensor.to_dense()."
        )


class TensorMapTable:
    """Descriptors one after another, at addresses that 64 divides: an array of CUtensorMap.

    A kernel that takes many descriptors, or chooses one by number, gets the address of a table and
    adds 128 for each; `prefetch_tma_descriptor` and a fence of the tensormap proxy are its own.

    Args:
        maps: The descriptors; at least one.

    Raises:
        OptionError: If there is none, or one is no `TensorMap`.
    """

    def __init__(self, maps: Sequence[TensorMap]) -> None:
        if not maps or not all(isinstance(one, TensorMap) for one in maps):
            raise OptionError(
                f"TensorMapTable: maps is {maps!r}; it takes at least one TensorMap, and nothing "
                "else. Try: TensorMapTable([TensorMap.tiled(tensor, box)])."
            )
        self.maps = tuple(maps)
        room = torch.empty(BYTES * len(maps) + ALIGNMENT, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNMENT
        self.host = room[start : start + BYTES * len(maps)].view(len(maps), BYTES)
        self.host.copy_(
            torch.frombuffer(bytearray(b"".join(m.encoded for m in maps)), dtype=torch.uint8)
            .view(len(maps), BYTES)
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.maps)

    def address_of(self, number: int) -> int:
        """Return the host address of a descriptor in the table, a multiple of 64."""
        return int(self.host[number].data_ptr())

    def to(self, device: torch.device | str | int) -> torch.Tensor:
        """Copy the table to a GPU.

        Args:
            device: The GPU whose kernels will read it.

        Returns:
            ``[len, 128]`` uint8, at an address that 64 divides: torch's allocators see to it. The
            copy is ordered with the current stream; a table that is written while kernels run that
            read it needs a fence of the tensormap proxy before its first use.
        """
        return self.host.to(device, copy=True)
