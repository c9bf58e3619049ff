"""Scratch memory: what a kernel wants in global memory beside its arguments, anew in each launch.

Descriptors that a kernel makes by itself lie there. As in Triton's launcher, an allocator is asked
for the bytes of all blocks, and its buffer is let go as soon as the launch is queued: memory in the
order of the launch's stream (PyTorch's is; in a captured graph it is the graph's) goes to nobody
else before the kernel has ended.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tileloom.errors import LaunchError

POINTERS = ("*i8", "*i8")
"""The parameters that a kernel of Triton 3.6 to 3.9 ends in: scratch memory, the profiler's."""

ALIGNMENT = 128
"""Of a tensor map in memory, in bytes; what bundled kernels ask for."""

NONE_SET = "no allocator was set"
"""Of Triton's error where nobody gives the memory."""

Allocator = Callable[[int, int, int], Any]
"""From bytes, alignment and stream to a buffer, which has `data_ptr()`; as of Triton's."""


@dataclass(frozen=True)
class Scratch:
    """What one kernel wants.

    Attributes:
        name: The kernel's.
        size: Bytes of a block, or of a whole cluster.
        alignment: Bytes.
        allocate: Who gives it; None for whom `triton.set_allocator` was given.
    """

    name: str
    size: int
    alignment: int
    allocate: Allocator | None

    def given(
        self, launch: Callable[..., Any], grid: tuple[int, int, int] | None
    ) -> Callable[..., Any]:
        """Give each launch its memory.

        Args:
            launch: What `driver.packed_launch` made, whose last value is the memory's address.
            grid: Blocks, or clusters, along x, y and z; None if each launch says it.

        Returns:
            The same without that value.
        """
        name, alignment = self.name, self.alignment
        if grid is not None:
            size = math.prod(grid) * self.size

            def fixed(stream: int, *values: Any) -> Any:
                buffer = (self.allocate or set_allocator(name))(size, alignment, stream)
                return launch(stream, *values, _address(buffer, name))

            return fixed

        def varying(x: int, y: int, z: int, stream: int, *values: Any) -> Any:
            size = x * y * z * self.size
            buffer = (self.allocate or set_allocator(name))(size, alignment, stream)
            return launch(x, y, z, stream, *values, _address(buffer, name))

        return varying

    @contextlib.contextmanager
    def lent(self) -> Generator[None]:
        """Let Triton's own launcher ask the same allocator, inside a `with` block."""
        variable, _ = _of_triton()
        before = variable.set(self.allocate or set_allocator(self.name))
        try:
            yield
        finally:
            variable.reset(before)


def unused(types: int, scratch: Scratch | None) -> dict[int, int]:
    """Return the pointers that stay 0, by position among a kernel's parameters.

    Args:
        types: Number of parameters.
        scratch: What the kernel wants, None for nothing.
    """
    first = types - len(POINTERS) + (scratch is not None)
    return dict.fromkeys(range(first, types), 0)


def _address(buffer: Any, name: str) -> int:
    if isinstance(buffer, int):
        return buffer
    try:
        address: int = buffer.data_ptr()
        is_there = getattr(buffer, "is_cuda", True) or buffer.is_pinned()
    except AttributeError:
        address, is_there = 0, False
    if not is_there:
        where = f" on {buffer.device}" if hasattr(buffer, "device") else ""
        raise LaunchError(
            f"launch: '{name}' needs scratch memory on its GPU, and the allocator that "
            f"triton.set_allocator was given returns a {type(buffer).__name__}{where}. Try: one "
            "that returns a tensor on the GPU."
        )
    return address


@functools.cache
def _of_triton() -> tuple[Any, Any]:
    from triton.runtime import _allocation as module

    return module._allocator, module.NullAllocator


def set_allocator(name: str) -> Allocator:
    """Return the allocator that `triton.set_allocator` was given.

    Like every context variable it is one of each thread: what another thread set is not seen.

    Args:
        name: The kernel's, for the error.

    Raises:
        LaunchError: If there is none.
    """
    variable, none = _of_triton()
    allocator = variable.get()
    if isinstance(allocator, none):
        raise LaunchError(no_allocator(name))
    return allocator


def no_allocator(name: str) -> str:
    """Say that a kernel needs scratch memory and nobody gives it."""
    return (
        f"launch: '{name}' needs scratch memory, and no allocator is set in this thread. Try: "
        "triton.set_allocator(lambda size, alignment, stream: torch.empty(size, "
        "dtype=torch.int8, device=the GPU))."
    )


def of_torch(device: int) -> Allocator:
    """Return what allocates from PyTorch, in the order of the stream that it is given.

    Args:
        device: The device's number.
    """

    def allocate(size: int, alignment: int, stream: int) -> Any:
        import torch

        place = torch.device("cuda", device)
        if stream == torch._C._cuda_getCurrentRawStream(device):
            return torch.empty(size, dtype=torch.uint8, device=place)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=place)):
            return torch.empty(size, dtype=torch.uint8, device=place)

    return allocate
