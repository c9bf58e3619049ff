"""Random layouts of TMA descriptors for the model and for the GPU: right but for at most one field.

A field that is chosen to be odd takes values around the edge of what is right, on both sides.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tileloom.cpasync.tensormap_layout import (
    CORNERS,
    ELEMENT_TYPES,
    FILLS,
    INTERLEAVES,
    L2_PROMOTIONS,
    SWIZZLES,
    Im2col,
    Tiled,
)

DTYPES = [torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64]
SIZES = [0, 1, 7, 255, 2**32, 2**32 + 1]
COMMON = ("dtype", "interleave", "swizzle", "shape", "pitch", "fill", "step", "inner", "address")


class Fields:
    """Draws fields, all as usual but for the one that is odd."""

    def __init__(self, draw, more):
        self.draw = draw
        self.odd = draw(st.sampled_from(["none"] * 6 + [*COMMON, *more]))

    def one(self, name, usual, odd):
        return self.draw(st.sampled_from(odd) if name == self.odd else usual)

    def several(self, name, count, usual, odd):
        """Of several numbers one is odd."""
        at = self.draw(st.integers(0, max(count - 1, 0)))
        return tuple(self.one(name if i == at else "", usual, odd) for i in range(count))


def _common(f: Fields, rank):
    dtype = f.one("dtype", st.sampled_from(DTYPES), list(ELEMENT_TYPES))
    size = dtype.itemsize
    interleaves = list(INTERLEAVES) if rank >= 3 else ["none"]
    interleave = f.one("interleave", st.sampled_from(interleaves), list(INTERLEAVES))
    swizzle = "32B" if interleave == "32B" else f.draw(st.sampled_from(list(SWIZZLES)))
    swizzle = f.one("swizzle", st.just(swizzle), list(SWIZZLES))
    unit = 32 // size if interleave == "32B" else 16 // size
    shape = f.several("shape", rank, st.integers(1, 300), SIZES)
    edge = [1, unit // 2, unit + 1, 3 * unit, 2**40 // size - unit, 2**40 // size]
    pitch = st.integers(0, 2**20).map(lambda n: n * unit)
    strides = (*f.several("pitch", rank - 1, pitch, edge), 1)
    fills = list(FILLS) if dtype.is_floating_point and size > 1 else ["zero"]
    fill = f.one("fill", st.sampled_from(fills), list(FILLS))
    steps = (*f.several("step", rank - 1, st.sampled_from([1, 1, 1, 2, 8]), [0, 1, 8, 9]), 1)
    span = 0 if swizzle == "none" or interleave != "none" else int(swizzle[:-1])
    most = (span or 256 * size) // size
    pieces = most * size // 16
    inner = f.one(
        "inner", st.integers(1, min(pieces, 64)).map(lambda n: n * 16 // size),
        [0, 1, 8 // size or 1, most, most + 16 // size],
    )  # fmt: skip
    address = f.one("address", st.integers(1, 2**36).map(lambda n: n * 32), [8, 16, 48, 2**40 + 4])
    promotion = f.draw(st.sampled_from(list(L2_PROMOTIONS)))
    tf32 = dtype == torch.float32 and f.draw(st.booleans())
    return (
        (dtype, shape, strides, steps, swizzle, interleave, fill, promotion, tf32),
        inner,
        address,
    )


@st.composite
def tiled(draw):
    """A layout of boxes and an address."""
    f = Fields(draw, ["rank", "box"])
    common, inner, address = _common(f, f.one("rank", st.integers(1, 5), [1, 2, 3, 5, 6]))
    outer = len(common[1]) - 1
    box = f.several("box", outer, st.integers(1, 256 if outer < 2 else 8), [0, 1, 256, 257])
    return Tiled(*common, box=(*box, inner)), address


@st.composite
def im2col(draw):
    """A layout of im2col mode and an address."""
    f = Fields(draw, ["rank", "lower", "upper", "pixels"])
    common, inner, address = _common(f, f.one("rank", st.integers(3, 5), [2, 3, 5, 6]))
    spatial = max(len(common[1]) - 2, 0)
    low, high = CORNERS.get(spatial, (-16, 15))
    edge = [low - 1, low, high, high + 1]
    lower, upper = (f.several(n, spatial, st.integers(-8, 8), edge) for n in ("lower", "upper"))
    pixels = f.one("pixels", st.integers(1, 256), [0, 1, 1024, 1025])
    return Im2col(*common, lower=lower, upper=upper, pixels=pixels, channels=inner), address
