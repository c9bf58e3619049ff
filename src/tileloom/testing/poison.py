"""Memory that tells on a kernel: NaN where it was never written, canaries where it must not write.

>>> from tileloom import testing
>>> with testing.poisoned_memory() as guard:
...     out = torch.empty(3)
>>> bool(out.isnan().all()), guard.allocations
(True, 1)
"""

from __future__ import annotations

import contextlib
import math
import unittest.mock
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

# The zone on either side: a multiple of every alignment that a kernel may ask for, and longer than
# the widest store of a tile's tail.
ZONE_BYTES = 4096
_CANARY = 0xA5


class CanaryError(AssertionError):
    """A kernel wrote where nothing of its own lies."""


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that no right result survives.

    Args:
        tensor: Any tensor; it is overwritten.

    Returns:
        The tensor: all NaN for floating and complex dtypes, the dtype's largest value for integers,
        True for bool.
    """
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(math.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


class Guarded:
    """A poisoned tensor between canary zones, with canaries in the gaps of its strides as well.

    Attributes:
        tensor: The tensor to give to a kernel, `[*shape]` with the strides asked for.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strides: Sequence[int] | None = None,
    ) -> None:
        """Make the tensor.

        Args:
            shape: Sizes of the tensor.
            dtype: Its dtype.
            device: Where it lies.
            strides: Strides in elements, all >= 0; default contiguous.
        """
        size = dtype.itemsize
        if strides is None:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        last = sum((n - 1) * s for n, s in zip(shape, strides)) if math.prod(shape) else -1
        span = (last + 1) * size
        padded = -(-span // ZONE_BYTES) * ZONE_BYTES
        self._bytes = torch.full(
            (padded + 2 * ZONE_BYTES,), _CANARY, dtype=torch.uint8, device=device
        )
        self._offset = ZONE_BYTES // size
        elements = self._bytes.view(dtype)
        self.tensor = elements.as_strided(tuple(shape), tuple(strides), self._offset)
        poison_(self.tensor)
        outside = torch.ones(elements.numel(), dtype=torch.bool, device=device)
        outside.as_strided(tuple(shape), tuple(strides), self._offset).fill_(False)
        self._outside = outside
        self._size = size

    def check(self, name: str = "out") -> None:
        """See that every canary is as it was.

        Args:
            name: What to call the tensor in the error.

        Raises:
            CanaryError: If a byte outside the tensor's own elements changed; the text says at which
                offset, in elements from the tensor's first.
        """
        touched = (self._bytes != _CANARY).reshape(-1, self._size).any(-1) & self._outside
        if not bool(touched.any()):
            return
        at = touched.nonzero().flatten() - self._offset
        low, high = int(at.min()), int(at.max())
        raise CanaryError(
            f"{name}: {at.numel()} elements outside the tensor were written, at element offsets "
            f"{low}..{high} from its first (shape {tuple(self.tensor.shape)}, strides "
            f"{self.tensor.stride()}). Try: look at the masks of the last tile."
        )


class MemoryGuard:
    """The guarded tensors that were made inside a `poisoned_memory` block."""

    def __init__(self) -> None:
        self._guarded: list[Guarded] = []

    @property
    def allocations(self) -> int:
        """How many tensors were made."""
        return len(self._guarded)

    def add(self, guarded: Guarded) -> torch.Tensor:
        """Keep a guarded tensor for `check`.

        Args:
            guarded: What was just made.

        Returns:
            Its tensor.
        """
        self._guarded.append(guarded)
        return guarded.tensor

    def check(self) -> None:
        """See that nothing was written outside any of them.

        Raises:
            CanaryError: If something was.
        """
        for index, guarded in enumerate(self._guarded):
            guarded.check(f"allocation {index}")


@contextlib.contextmanager
def poisoned_memory() -> Generator[MemoryGuard]:
    """Poison what Python code allocates uninitialised, and surround it with canaries.

    Inside the block `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return
    tensors full of NaN between canary zones (plain strided ones; others are left alone). They are
    replaced for the whole process while the block lasts. The zones are checked when the block ends
    without an exception.

    Yields:
        The guard; its `check` may be called earlier too, after synchronising the device.

    Raises:
        CanaryError: At the end of the block, if a kernel wrote outside what was allocated.
    """
    guard = MemoryGuard()

    def guarding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            plain = made.layout == torch.strided and made.device.type != "meta"
            if not plain or type(made) is not torch.Tensor or kwargs.get("out") is not None:
                return made
            fresh = guard.add(
                Guarded(made.shape, dtype=made.dtype, device=made.device, strides=made.stride())
            )
            return fresh.requires_grad_(made.requires_grad)

        return allocate

    with contextlib.ExitStack() as stack:
        owners = (torch, torch, torch, torch.Tensor)
        names = ("empty", "empty_like", "empty_strided", "new_empty")
        originals = [getattr(owner, name) for owner, name in zip(owners, names)]
        for owner, name, original in zip(owners, names, originals):
            stack.enter_context(unittest.mock.patch.object(owner, name, guarding(original)))
        yield guard
    guard.check()
