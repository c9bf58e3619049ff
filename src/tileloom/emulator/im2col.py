"""TMA loads in im2col mode: a box of pixels that walks over the images of a convolution.

A box `[pixels, channels]` begins at a pixel and follows the innermost spatial dimension by that
dimension's step; past the upper end of the window it returns to the lower end and goes on in the
next dimension, and after the last one in the next image. The window is the images' spatial extent,
moved at its two corners; the offsets of a load shift what is read, not the walk. Pixels and
channels outside of the tensor are zero (or NaN). PTX ISA, "im2col mode".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tileloom.emulator import dtypes
from tileloom.emulator.memory import Desc


@dataclass
class Im2colDesc(Desc):
    """A descriptor of images `[N, ..., C]`; `at` is N, the spatial coordinates, C, the offsets.

    Attributes:
        lower: Where the window begins in each spatial dimension.
        upper: Where it ends, counted from the last pixel.
        steps: Distance of neighbouring pixels of a box.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def outside(self, at: list[int]) -> list[int]:
        """Return nothing: boxes in the padding are what this mode is for."""
        return []

    def _pixels(self, at: list[int]) -> np.ndarray:
        """Return image and spatial coordinates of each pixel of a box, `[pixels, 1 + spatial]`."""
        rank = len(self.shape)
        here, offsets = list(at[: rank - 1]), [0, *at[rank:]]
        last = [n - 1 + end for n, end in zip(self.shape[1:-1], self.upper)]
        found = np.empty((self.block[0], rank - 1), np.int64)
        for pixel in found:
            pixel[:] = here
            for i in reversed(range(1, rank - 1)):
                here[i] += self.steps[i - 1]
                if here[i] <= last[i - 1]:
                    break
                here[i] = self.lower[i - 1]
            else:
                here[0] += 1
        return found + np.asarray(offsets)

    def _inside(self, at: list[int]) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Return the pixels, which of them exist, and the range of channels that exists."""
        pixels = self._pixels(at)
        exists = (pixels >= 0) & (pixels < np.asarray(self.shape[:-1]))
        first = at[len(self.shape) - 1]
        low = min(max(first, 0), self.shape[-1])
        return (
            pixels,
            np.all(exists, axis=1),
            low,
            max(min(first + self.block[1], self.shape[-1]), low),
        )

    def window(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...], bool]:
        """Return slices of the tensor around all that a box reads; for the book of accesses."""
        pixels, shown, low, high = self._inside(at)
        inside = [slice(0, 0)] * len(self.shape)
        if shown.any():
            read = pixels[shown]
            inside = [slice(int(a), int(b) + 1) for a, b in zip(read.min(0), read.max(0))]
            inside.append(slice(low, high))
        return tuple(inside), (), False

    def part(self, at: list[int], part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the same for a part of a box: no less than what it reads."""
        return self.window(at)[0]

    def read(self, at: list[int]) -> np.ndarray:
        """Read a box `[pixels, channels]`."""
        pixels, shown, low, high = self._inside(at)
        values = dtypes.from_bits(self.view()[(*pixels[shown].T, slice(low, high))], self.elem)
        box = np.full(self.block, np.nan if self.nan_fill else 0, values.dtype)
        first = at[len(self.shape) - 1]
        box[shown, low - first : high - first] = values
        return box
