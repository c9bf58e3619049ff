"""What kernels that gave up waiting have said: three words in pinned host memory for each device.

One program of a kernel claims the right to speak (`claim`, on the device), writes the awaited epoch
and the flag's value, then releases the chunk's number + 1. The host looks before every later call
of an operator (`_op.watches`), or in `check_signals`.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from tileloom.errors import SignalTimeoutError
from tileloom.ops import _op


class Status(NamedTuple):
    """The words of one device.

    Attributes:
        words: int32 `[3]` on the host: chunk + 1, awaited epoch, flag.
        seen: The same memory as a kernel is given it.
        claim: int32 `[1]` on the device: 1 once a program has spoken.
    """

    words: torch.Tensor
    seen: torch.Tensor
    claim: torch.Tensor


_statuses: dict[torch.device, Status] = {}
_lock = threading.Lock()


def late(device: torch.device, chunk: int, got: int, wanted: int) -> SignalTimeoutError:
    """Make the error that says which chunk did not come."""
    return SignalTimeoutError(
        f"async_input_matmul: on {device} chunk {chunk} did not arrive in time: its flag is {got}, "
        f"and {wanted} was awaited. The output of that call is not valid. Try: a longer timeout_s, "
        "or see who writes the flag."
    )


class _DeviceView:
    """Pinned host memory as an array of the GPU, which reads and writes it at the same address."""

    def __init__(self, words: torch.Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (words.data_ptr(), False),
            "shape": tuple(words.shape),
            "typestr": "<i4",
            "version": 2,
        }


def status_of(like: torch.Tensor) -> Status:
    """Return the words of a tensor's device."""
    found = _statuses.get(like.device)
    if found is None:
        with _lock:
            found = _statuses.get(like.device) or _make(like.device)
    return found


def _make(device: torch.device) -> Status:
    words = torch.zeros(3, dtype=torch.int32)
    seen = words
    if device.type != "cpu":
        words = words.pin_memory()
        seen = torch.as_tensor(_DeviceView(words), device=device)
    _statuses[device] = Status(words, seen, torch.zeros(1, dtype=torch.int32, device=device))
    if _raise_if_late not in _op.watches:
        _op.watches.append(_raise_if_late)
    return _statuses[device]


def _raise_if_late() -> None:
    for device, status in _statuses.items():
        chunk, wanted, got = status.words.tolist()
        if chunk:
            status.words.zero_()
            status.claim.zero_()
            raise late(device, chunk - 1, got % 2**32, wanted % 2**32)


def check_signals() -> None:
    """Raise if a kernel has given up waiting for a chunk since the last look; it never waits.

    A kernel that still runs has said nothing yet: synchronise first to be sure. Every call of an
    operator of tileloom looks as well. The CUDA context lives on, and later launches work.

    Raises:
        SignalTimeoutError: With the chunk, the awaited epoch and the flag's value; said once.
    """
    _raise_if_late()
