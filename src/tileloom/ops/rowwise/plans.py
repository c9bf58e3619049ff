"""What a call decided is kept, so that the same call again allocates and launches, nothing more.

A plan is made from arguments that passed every check; its key is all that the checks, the choice of
a backend and the kernels' arguments depend on. Data pointers are not among it: the launcher looks
at their alignment itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

P = TypeVar("P")

MOST_PLANS = 4096


def layout_key(tensor: torch.Tensor | None) -> Hashable:
    """What a plan depends on in one tensor: shape, strides, dtype, device."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Plans(Generic[P]):
    """A bounded table of plans; when it is full it starts anew. Safe from several threads."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._found: dict[Hashable, P] = {}
        self._most = most
        self.get: Callable[[Hashable], P | None] = self._found.get

    def __len__(self) -> int:
        return len(self._found)

    def put(self, key: Hashable, plan: P) -> P:
        """Keep a plan, and return it."""
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[key] = plan
        return plan


def is_current_device(tensor: torch.Tensor) -> bool:
    """Whether a CUDA tensor lies on the current device, so that no device guard is needed."""
    return torch._C._cuda_getDevice() == tensor.get_device()


def launcher(kernel: Any, num_warps: int) -> Any:
    """Return the one `tileloom.launch` launcher of a kernel with so many warps."""
    from tileloom.launch.launcher import prepare

    found = _launchers.get((kernel, num_warps))
    if found is None:
        found = _launchers[kernel, num_warps] = prepare(kernel, num_warps=num_warps)
    return found


_launchers: dict[tuple[Any, int], Any] = {}
