"""What kernels that gave up waiting have said: two words in pinned host memory for each device.

A kernel writes `wanted | block << 32`, then `got | (chunk + 1) << 32`. The host looks before every
later call on the device (`_op.watches`), or in `check_signals`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tileloom.errors import SignalTimeoutError
from tileloom.ops import _op

_words: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
_lock = threading.Lock()
_LOW = 2**32 - 1


class _DeviceView:
    """Pinned host memory as an array of the GPU, which reads and writes it at the same address."""

    def __init__(self, words: torch.Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (words.data_ptr(), False),
            "shape": tuple(words.shape),
            "typestr": "<i8",
            "version": 2,
        }


def status_of(like: torch.Tensor) -> torch.Tensor:
    """Return the status words of a tensor's device, int64 `[2]`, for a kernel to write."""
    found = _words.get(like.device)
    if found is None:
        with _lock:
            found = _words.get(like.device) or _make(like.device)
    return found[1]


def _make(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros(2, dtype=torch.int64)
    seen = words
    if device.type != "cpu":
        words = words.pin_memory()
        seen = torch.as_tensor(_DeviceView(words), device=device)
    _words[device] = (words, seen)
    _op.watches.append(_raise_if_late)
    return words, seen


def _raise_if_late() -> None:
    for device, (words, _) in _words.items():
        said, details = words.tolist()
        if not said:
            continue
        words.zero_()
        chunk, got = (said >> 32) - 1, said & _LOW
        wanted, block = details & _LOW, details >> 32
        raise SignalTimeoutError(
            f"async_input_matmul: on {device} chunk {chunk} did not arrive in time: its flag is "
            f"{got}, and {wanted} was awaited (block {block}). The output of that call is not "
            "valid. Try: a longer timeout_s, or see who writes the flag."
        )


def check_signals() -> None:
    """Raise if a kernel has given up waiting for a chunk since the last look; it never waits.

    A kernel that still runs has said nothing yet: synchronise first to be sure. Every call of an
    operator of tileloom looks as well. The CUDA context lives on, and later launches work.

    Raises:
        SignalTimeoutError: With the chunk, the awaited epoch and the flag's value; said once.
    """
    _raise_if_late()
