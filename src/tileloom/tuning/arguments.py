"""Arguments that a kernel changes, kept so that each measured launch finds the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_SPARE_BYTES = 256 * 2**20


def has_room(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor fits into the free memory of its device, with some to spare."""
    if not tensor.is_cuda:
        return True
    free = torch.cuda.mem_get_info(tensor.device)[0]
    unused = torch.cuda.memory_reserved(tensor.device) - torch.cuda.memory_allocated(tensor.device)
    return free + unused >= tensor.numel() * tensor.element_size() + _SPARE_BYTES


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what lies between a tensor's first and last element, gaps included, as one row.

    Args:
        tensor: Any strided tensor; it is not copied.
    """
    tensor = tensor.detach()
    extent = 0
    if tensor.numel():
        sizes = zip(tensor.shape, tensor.stride())
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
    return tensor.as_strided((extent,), (1,), tensor.storage_offset())


class Snapshot:
    """Copies of the arguments that a kernel changes.

    A copy lies on the tensor's own device where it fits there, else in pinned memory of the host,
    from which it takes longer to restore. Two arguments that share memory are restored right.
    """

    def __init__(
        self,
        changed: Sequence[torch.Tensor],
        zeroed: Sequence[torch.Tensor] = (),
        *,
        fits: Callable[[torch.Tensor], bool] = has_room,
    ) -> None:
        """Copy what the kernel changes.

        Args:
            changed: Tensors that the kernel reads and writes.
            zeroed: Tensors that each launch is to find filled with zeros.
            fits: Whether a copy of a tensor may lie on its device.
        """
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zeroed = [memory_of(tensor) for tensor in zeroed]
        for tensor in changed:
            memory = memory_of(tensor)
            self._kept.append((memory, memory.clone() if fits(memory) else _on_host(memory)))

    @property
    def bytes(self) -> int:
        """Memory that the copies take, in bytes."""
        return sum(copy.numel() * copy.element_size() for _, copy in self._kept)

    def restore(self) -> None:
        """Give every argument what it had when the snapshot was made, or zeros."""
        for memory, copy in self._kept:
            memory.copy_(copy, non_blocking=True)
        for memory in self._zeroed:
            memory.zero_()


def _on_host(memory: torch.Tensor) -> torch.Tensor:
    pinned = memory.is_cuda
    kept = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=pinned)
    kept.copy_(memory)
    return kept


def tensors_named(names: Sequence[str], arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of these names; None and numbers are left out."""
    return [arguments[name] for name in names if isinstance(arguments.get(name), torch.Tensor)]
