"""The driver's two encode calls for TMA descriptors, reached by ctypes like the rest of it.

Encoding is work of the host alone: no GPU memory is touched, and it is legal while a CUDA graph is
captured. Sizes are given in torch's order, the contiguous dimension last; the driver's is the
reverse. What the driver refuses it refuses without a reason; `tileloom.cpasync` checks before.
Source: CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from tileloom.launch import driver

BYTES = 128
"""The size of a CUtensorMap."""

ALIGNMENT = 64
"""A CUtensorMap lies at a multiple of this, wherever a kernel or the driver reads it."""

_PROMOTE_128 = 2


def _reversed(kind: Any, numbers: Sequence[int]) -> Any:
    return (kind * 5)(*reversed(numbers))


def _encode(call: Callable[[Any], int], what: str) -> bytes:
    """Let `call` write a CUtensorMap into aligned memory, and return its bytes."""
    room = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    start = -ctypes.addressof(room) % ALIGNMENT
    driver.check(call(ctypes.c_void_p(ctypes.addressof(room) + start)), what)
    return room.raw[start : start + BYTES]


def encode_tiled(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    element_bytes: int,
    element_type: int,
    swizzle: int,
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    l2_promotion: int = _PROMOTE_128,
    fill: int = 0,
) -> bytes:
    """Encode a TMA descriptor for tiles: the driver's cuTensorMapEncodeTiled.

    Args:
        address: Of the first element, a multiple of 16.
        shape: Sizes, the last dimension is the one that lies contiguous; at most 5.
        strides: In elements; the last one, which must be 1, is not read.
        box: Sizes of a tile.
        element_bytes: Of one element.
        element_type: A CUtensorMapDataType.
        swizzle: A CUtensorMapSwizzle.
        element_strides: Steps within a box; all 1 by default.
        interleave: A CUtensorMapInterleave.
        l2_promotion: A CUtensorMapL2promotion; 128 bytes by default.
        fill: 1 to read NaN outside the tensor, 0 to read 0.

    Returns:
        The CUtensorMap, 128 bytes.

    Raises:
        LaunchError: If the driver refuses; the text has all arguments.
    """
    rank = len(shape)
    sizes, tile = _reversed(ctypes.c_uint64, shape), _reversed(ctypes.c_uint32, box)
    pitches = _reversed(ctypes.c_uint64, [element_bytes * s for s in strides[:-1]])
    steps = _reversed(ctypes.c_uint32, element_strides or [1] * rank)
    return _encode(
        lambda room: driver.library().cuTensorMapEncodeTiled(
            room, element_type, rank, ctypes.c_void_p(address), sizes, pitches, tile, steps,
            interleave, swizzle, l2_promotion, fill,
        ),
        f"encoding a TMA descriptor for shape {tuple(shape)}, strides {tuple(strides)}, box "
        f"{tuple(box)}, {element_bytes} bytes an element, swizzle {swizzle}, address {address:#x}",
    )  # fmt: skip


def encode_im2col(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    *,
    pixels: int,
    channels: int,
    element_bytes: int,
    element_type: int,
    swizzle: int,
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    l2_promotion: int = _PROMOTE_128,
    fill: int = 0,
) -> bytes:
    """Encode a TMA descriptor for loads in im2col mode: the driver's cuTensorMapEncodeIm2col.

    Args:
        address: As for `encode_tiled`, and so all that is not named here.
        shape: ``[N, spatial..., C]``, 3 to 5 sizes.
        strides: In elements, the last one 1.
        lower: For each spatial dimension, where the window of pixels begins, counted from 0.
        upper: Where it ends, counted from the last pixel.
        pixels: Of a load.
        channels: Of a pixel.
        element_bytes: Of one element.
        element_type: A CUtensorMapDataType.
        swizzle: A CUtensorMapSwizzle.
        element_strides: Distance of neighbouring pixels, one for each dimension of the shape.
        interleave: A CUtensorMapInterleave.
        l2_promotion: A CUtensorMapL2promotion.
        fill: 1 to read NaN outside the tensor, 0 to read 0.

    Returns:
        The CUtensorMap, 128 bytes.

    Raises:
        LaunchError: If the driver refuses; the text has all arguments.
    """
    rank = len(shape)
    sizes = _reversed(ctypes.c_uint64, shape)
    pitches = _reversed(ctypes.c_uint64, [element_bytes * s for s in strides[:-1]])
    corners = [_reversed(ctypes.c_int, corner) for corner in (lower, upper)]
    steps = _reversed(ctypes.c_uint32, element_strides or [1] * rank)
    return _encode(
        lambda room: driver.library().cuTensorMapEncodeIm2col(
            room, element_type, rank, ctypes.c_void_p(address), sizes, pitches, *corners, channels,
            pixels, steps, interleave, swizzle, l2_promotion, fill,
        ),
        f"encoding a TMA descriptor of im2col mode for shape {tuple(shape)}, strides "
        f"{tuple(strides)}, corners {tuple(lower)} and {tuple(upper)}, {pixels} pixels of "
        f"{channels} channels, {element_bytes} bytes an element, swizzle {swizzle}, address "
        f"{address:#x}",
    )  # fmt: skip
