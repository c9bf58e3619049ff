"""How a tensor lies in memory, as plain data, and what the TMA unit asks of it.

Source: CUDA driver API, `cuTensorMapEncodeTiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in memory: strides in elements, and a 16-byte aligned base or not."""

    strides: tuple[int, ...]
    is_aligned: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Read the layout of a real tensor."""
        return Layout(tensor.stride(), tensor.data_ptr() % 16 == 0)


def tma_faults(name: str, layout: Layout, sizes: Sequence[int], itemsize: int = 2) -> list[str]:
    """Say why the TMA unit cannot read a tensor whose last dimension should be contiguous.

    Args:
        name: What the caller calls the tensor.
        layout: How it lies.
        sizes: Its sizes; the stride of a dimension of size 1 does not matter.
        itemsize: Bytes of an element.
    """
    why: list[str] = []
    if not layout.is_aligned:
        why.append(f"{name} does not start at a multiple of 16 bytes")
    if layout.strides[-1] != 1 and sizes[-1] > 1:
        why.append(f"{name}'s last dimension has stride {layout.strides[-1]}, not 1")
    outer = list(zip(layout.strides[:-1], sizes))
    bad = [s for s, n in outer if n > 1 and s * itemsize % 16]
    if bad:
        why.append(f"{name} has a stride of {bad[0]} elements, not a multiple of 16 bytes")
    if any(s * itemsize >= 2**40 for s in layout.strides):
        why.append(f"{name} has a stride of 2^40 bytes or more")
    return why


def elements_share_memory(tensor: torch.Tensor) -> bool:
    """Whether elements lie at one address, as after `expand` and `unfold`."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]
    for i, (stride, _) in enumerate(dims):
        inner = [d for j, d in enumerate(dims) if d[0] < stride or (d[0] == stride and j < i)]
        if stride <= sum(step * (size - 1) for step, size in inner):
            return True
    return False
