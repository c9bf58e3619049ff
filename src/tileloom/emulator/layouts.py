"""Where a layout puts the elements of a shared buffer, for bytes that are seen as two types."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from tileloom.emulator.cluster import layout_body, layout_field
from tileloom.emulator.ir import Module, Type
from tileloom.emulator.report import UnsupportedKernelError

# Chunks of this many bytes are what NVIDIA's swizzled layouts exchange.
_CHUNK = 16


def physical_offsets(ty: Type, module: Module) -> np.ndarray:
    """Return the offset of each element, in elements, in the logical order of the buffer.

    Args:
        ty: The buffer's type.
        module: The module, for its layouts' names.

    Returns:
        Offsets, int64, of the buffer's shape.

    Raises:
        UnsupportedKernelError: For a layout whose order is not known here.
    """
    return _offsets(layout_body(ty.layout, module.aliases), ty.shape)


@lru_cache(maxsize=256)
def _offsets(layout: str, shape: tuple[int, ...]) -> np.ndarray:
    if layout.startswith("#ttg.swizzled_shared"):
        order = [int(x) for x in re.findall(r"\d+", layout_field(layout, "order"))]
        rank, within = len(order), _swizzled(layout, order, shape[len(shape) - len(order) :])
    elif layout.startswith("#ttg.nvmma_shared"):
        rank = int(layout_field(layout, "rank") or min(len(shape), 2))
        within = _nvmma(layout, shape[len(shape) - rank :])
    else:
        name = layout.partition("<")[0]
        raise UnsupportedKernelError(f"a reinterpret of shared memory with the layout {name}")
    slots = np.arange(int(np.prod(shape[: len(shape) - rank]))) * within.size
    return (slots[:, None] + within.reshape(-1)).reshape(shape)


def _swizzled(layout: str, order: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """Rows in the given order; vectors of a row exchanged by the row's phase."""
    vec, per_phase, phases = (
        int(layout_field(layout, name)) for name in ("vec", "perPhase", "maxPhase")
    )
    at = np.indices(shape)
    column = at[order[0]]
    row = at[order[1]] if len(order) > 1 else np.zeros(shape, np.int64)
    column = ((column // vec) ^ (row // per_phase % phases)) * vec + column % vec
    out, step = column.astype(np.int64), shape[order[0]]
    for dim in order[1:]:
        out += at[dim] * step
        step *= shape[dim]
    return out


def _nvmma(layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Panels as wide as the swizzle, one after the other; chunks of a row exchanged by the row."""
    bits = int(layout_field(layout, "elementBitWidth"))
    width = int(layout_field(layout, "swizzlingByteWidth"))
    turned = layout_field(layout, "transposed") == "true"
    if turned:
        shape = (*shape[:-2], shape[-1], shape[-2])
    cols = shape[-1]
    rows = int(np.prod(shape[:-1]))
    panel = min(width * 8 // bits, cols) if width else cols
    chunk = max(_CHUNK * 8 // bits, 1)
    row, col = np.indices((rows, cols))
    inner = col % panel
    if width:
        phase = row // (128 // width) % (width // _CHUNK)
        inner = ((inner // chunk) ^ phase) * chunk + inner % chunk
    out = (col // panel * rows * panel + row * panel + inner).reshape(shape)
    return out.swapaxes(-1, -2) if turned else out
