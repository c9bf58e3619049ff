"""Counters that are zero when a kernel begins, and workspaces: neither is made anew in each call.

A kernel that draws its tiles adds to a counter and leaves it so. Zeroing one by `torch.zeros` is a
launch of its own, about as dear on the host as the kernel's. Here 1,024 are zeroed at a time, and
each is given away once. While a CUDA graph is captured each is zeroed by itself: the graph must do
it again whenever it is replayed.

Counters that a kernel leaves at zero, and a workspace that nobody reads after it, are kept, one for
each device and stream: launches on one stream follow each other. While a CUDA graph is captured
both come from its own pool, which lives as long as the graph.

What is kept never comes from a pool that the caller's allocations go to at the moment
(`torch.cuda.use_mem_pool`; the warm-up runs of `torch.compile(mode="reduce-overhead")`, whose pool
is set back to an earlier state with what was kept in it): such a pool is a thread's, and what is
kept is allocated in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

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


def _outside_pools(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Allocate on the current device and stream, from no pool of this thread's."""
    found: list[torch.Tensor | BaseException] = []
    stream = torch.cuda.current_stream()

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                found.append(make())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, name="tileloom-kept-memory")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


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
        pool = _outside_pools(lambda: like.new_zeros(_AT_ONCE * _STEP, dtype=torch.int32))
        if len(_free) >= 256:  # streams
            _free.clear()
        fresh = _free[key] = [Counter(pool, i) for i in range(_AT_ONCE)]
        return fresh.pop()


_Key = tuple[int, int]
_MOST_STREAMS = 256
_zeros: dict[_Key, torch.Tensor] = {}
_rooms: dict[_Key, torch.Tensor] = {}


def _keep(kept: dict[_Key, torch.Tensor], key: _Key, tensor: torch.Tensor) -> torch.Tensor:
    if len(kept) >= _MOST_STREAMS:
        kept.clear()
    kept[key] = tensor
    return tensor


def split_counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` counters that are 0 and that the kernel leaves at 0 again.

    Args:
        like: Any tensor. Its device is the current one if it is a GPU.
        count: How many.

    Returns:
        int32, at least `count` elements, for what the current stream runs next.
    """
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return like.new_zeros(count, dtype=torch.int32)
    device = like.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _zeros.get(key)
    if found is None or found.numel() < count:
        fresh = _outside_pools(lambda: like.new_zeros(max(count, 4096), dtype=torch.int32))
        found = _keep(_zeros, key, fresh)
    return found


MOST_KEPT_BYTES = 64 * 2**20
"""A workspace of more bytes is allocated for one call and given back after it."""


def workspace(like: torch.Tensor, elements: int) -> torch.Tensor:
    """Return memory that holds anything, for one launch and until it has ended.

    Memory: each device and stream keeps the largest that was asked for, of `MOST_KEPT_BYTES` at
    most, until the process ends.

    Args:
        like: Any tensor. Its device is the current one if it is a GPU.
        elements: How many.

    Returns:
        float32, at least so many elements, for what the current stream runs next.
    """
    if (
        not like.is_cuda
        or 4 * elements > MOST_KEPT_BYTES
        or torch.cuda.is_current_stream_capturing()
    ):
        return like.new_empty(elements, dtype=torch.float32)
    device = like.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    found = _rooms.get(key)
    if found is None or found.numel() < elements:
        fresh = _outside_pools(lambda: like.new_empty(elements, dtype=torch.float32))
        found = _keep(_rooms, key, fresh)
    return found
