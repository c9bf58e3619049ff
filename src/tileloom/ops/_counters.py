"""Counters that are zero when a kernel begins, without a launch that zeroes each.

A kernel that draws its tiles adds to a counter and leaves it so. Zeroing one by `torch.zeros` is a
launch of its own, about as dear on the host as the kernel's. Here 1,024 are zeroed at a time, and
each is given away once. While a CUDA graph is captured each is zeroed by itself: the graph must do
it again whenever it is replayed.
"""

from __future__ import annotations

import torch

_AT_ONCE = 1024
_STEP = 4  # int32 from one counter to the next: 16 bytes, as the kernel was compiled for


class Counter:
    """An int32 on the GPU that is 0; a launch takes it like a tensor.

    Attributes:
        dtype: `torch.int32`.
        is_cuda: True.
    """

    __slots__ = ("_address", "_pool")
    dtype = torch.int32
    is_cuda = True

    def __init__(self, pool: torch.Tensor, index: int) -> None:
        self._address = pool.data_ptr() + index * _STEP * pool.element_size()
        self._pool = pool

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


_free: dict[tuple[int, int], list[Counter]] = {}


def zero_counter(like: torch.Tensor) -> torch.Tensor | Counter:
    """Return a counter for one launch, on a tensor's device and the current stream.

    Args:
        like: Any tensor. Its device is the current one if it is a GPU.

    Returns:
        An int32 that is 0 for whatever the stream runs next, and that nobody else gets.
    """
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return like.new_zeros(1, dtype=torch.int32)
    device = like.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    try:
        return _free[key].pop()
    except (KeyError, IndexError):
        pool = like.new_zeros(_AT_ONCE * _STEP, dtype=torch.int32)
        if len(_free) >= 256:  # streams
            _free.clear()
        fresh = _free[key] = [Counter(pool, i) for i in range(_AT_ONCE)]
        return fresh.pop()


_shared: dict[tuple[int, int], torch.Tensor] = {}


def split_counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` counters that are 0 and that the kernel leaves at 0 again.

    Launches on one stream follow each other, so they share the counters.

    Args:
        like: Any tensor. Its device is the current one if it is a GPU.
        count: How many.

    Returns:
        int32, at least `count` elements.
    """
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return like.new_zeros(count, dtype=torch.int32)
    device = like.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _shared.get(key)
    if found is None or found.numel() < count:
        if len(_shared) >= 256:  # streams
            _shared.clear()
        found = _shared[key] = like.new_zeros(max(count, 4096), dtype=torch.int32)
    return found
