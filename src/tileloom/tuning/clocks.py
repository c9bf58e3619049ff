"""The clock that a GPU runs at while it is measured, by NVIDIA's management library."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any

import torch

_SM = 1  # NVML_CLOCK_SM


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@dataclass
class Clock:
    """Readings of the SM clock of one GPU, in MHz.

    Attributes:
        readings: What was read so far.
    """

    device: torch.device
    readings: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._handle = ctypes.c_void_p()
        library = _library()
        self._is_there = library is not None and library.nvmlDeviceGetHandleByUUID(
            self._uuid(), ctypes.byref(self._handle)
        ) == 0  # fmt: skip

    def _uuid(self) -> bytes:
        properties: Any = torch.cuda.get_device_properties(self.device)
        uuid = str(getattr(properties, "uuid", ""))
        return (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()

    def read(self) -> None:
        """Take a reading; where the library is missing or does not answer, there is none."""
        library = _library()
        if library is None or not self._is_there:
            return
        value = ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(self._handle, _SM, ctypes.byref(value)) == 0:
            self.readings.append(value.value)

    def summary(self) -> dict[str, int] | None:
        """Return the lowest, the middle and the highest reading; None if there is none."""
        if not self.readings:
            return None
        ordered = sorted(self.readings)
        middle = ordered[len(ordered) // 2]
        return {"low_mhz": ordered[0], "mhz": middle, "high_mhz": ordered[-1]}
