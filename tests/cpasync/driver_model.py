"""The driver's encode calls by its documentation, in its own order: innermost dimension first.

It takes what `tileloom.launch.tensor_map` hands over, answers 0 or CUDA_ERROR_INVALID_VALUE as
"Tensor Map Object Management" says, and writes down what it was given.
"""

from __future__ import annotations

import ctypes
import math
import struct

SIZE = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]  # of a CUtensorMapDataType
FLOATS = {6, 7, 8, 9, 10, 11, 12}
MOST_BYTES = 228 * 1024  # of a box: not in the documentation, but what a driver for an H200 says
RANGES = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}


class Model:
    """In place of the library; `calls` has the arguments of each call as Python numbers."""

    def __init__(self):
        self.calls = []

    def cuGetErrorString(self, status, text):
        text._obj.value = b"invalid argument"
        return 0

    def _common(self, room, kind, rank, address, sizes, pitches, steps, modes, inner):
        interleave, swizzle, _, fill = modes
        wide = interleave == 2
        return (
            room.value % 64 == 0
            and 0 <= kind < len(SIZE)
            and (1 if interleave == 0 else 3) <= rank <= 5
            and address % (32 if wide else 16) == 0
            and all(0 < n <= 1 << 32 for n in sizes)
            and all(p % (32 if wide else 16) == 0 and p < 1 << 40 for p in pitches)
            and all(1 <= s <= 8 for s in (steps[1:] if interleave == 0 else steps))
            and inner * SIZE[kind] % 16 == 0
            and (interleave != 0 or swizzle == 0 or inner * SIZE[kind] <= 16 << swizzle)
            and (not wide or swizzle == 1)
            and all(0 <= n < m for n, m in zip(modes, (3, 4, 4, 2)))
            and (fill == 0 or kind in FLOATS)
        )

    def _answer(self, room, holds, **given):
        self.calls.append(given)
        if not holds:
            return 1
        text = repr(sorted(given.items())).encode()
        ctypes.memmove(room, struct.pack("<Q120s", given["address"] or 0, text), 128)
        return 0

    def cuTensorMapEncodeTiled(self, room, kind, rank, address, sizes, pitches, box, steps, *modes):
        address = address.value or 0
        sizes, box, steps = (list(array)[:rank] for array in (sizes, box, steps))
        pitches = list(pitches)[: rank - 1]
        holds = self._common(room, kind, rank, address, sizes, pitches, steps, modes, box[0])
        holds = holds and all(1 <= n <= 256 for n in box)
        copied = math.prod(-(-n // s) for n, s in zip(box, steps)) if holds else 0
        holds = holds and copied * SIZE[kind] <= MOST_BYTES
        return self._answer(
            room, holds, kind=kind, address=address, sizes=sizes, pitches=pitches, box=box,
            steps=steps, modes=modes,
        )  # fmt: skip

    def cuTensorMapEncodeIm2col(
        self, room, kind, rank, address, sizes, pitches, lower, upper, channels, pixels, steps,
        *modes,
    ):  # fmt: skip
        address = address.value or 0
        sizes, steps = list(sizes)[:rank], list(steps)[:rank]
        pitches = list(pitches)[: rank - 1]
        lower, upper = list(lower)[: rank - 2], list(upper)[: rank - 2]
        holds = self._common(room, kind, rank, address, sizes, pitches, steps, modes, channels)
        if holds and rank in RANGES:
            low, high = RANGES[rank]
            holds = all(low <= n <= high for n in (*lower, *upper))
            windowed = sizes[1:-1] if modes[0] == 0 else sizes[:-2]  # as drivers of 2026 do it
            holds = holds and all(a < n + b < 1 << 31 for n, a, b in zip(windowed, lower, upper))
            holds = holds and 1 <= channels <= 256 and 1 <= pixels <= 1024
            holds = holds and pixels * channels * SIZE[kind] <= MOST_BYTES
        else:
            holds = False
        return self._answer(
            room, holds, kind=kind, address=address, sizes=sizes, pitches=pitches, lower=lower,
            upper=upper, channels=channels, pixels=pixels, steps=steps, modes=modes,
        )  # fmt: skip
