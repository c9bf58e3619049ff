"""From an address to the tensor that it lies in.

Pointers that the launch passes are virtual addresses. Those that a kernel reads from memory, as a
grouped GEMM does from a table of `data_ptr()`, are real ones: of an argument's tensor, or of any
other CPU tensor that is alive.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch

from tileloom.emulator import dtypes
from tileloom.emulator.ir import Loc
from tileloom.emulator.memory import FIRST, SPACING, Storage, storage_bytes
from tileloom.emulator.report import LaunchError, quote

if TYPE_CHECKING:
    from tileloom.emulator.machine import Launch, Partition


def place(launch: Launch, address: int) -> tuple[Storage, int] | None:
    """Find the storage that an address means.

    Args:
        launch: The launch; a tensor that no argument named becomes one of its storages.
        address: A virtual or a real address.

    Returns:
        The storage, and its first byte's address in the same terms; it may end before `address` if
        that is virtual. None if there is none.
    """
    storages = launch.storages
    index = (address - FIRST) >> SPACING
    if index >= 0:
        return (storages[index], storages[index].base) if index < len(storages) else None
    for storage in storages:
        if 0 <= address - storage.address < storage.nbytes:
            return storage, storage.address
    found = _alive(launch, address)
    if found is None:
        return None
    name = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)} behind a pointer"
    storage = Storage(len(storages), name, storage_bytes(found), found.element_size())
    storage.address = found.untyped_storage().data_ptr()
    storages.append(storage)
    return storage, storage.address


def base_of(partition: Partition, address: int, loc: Loc) -> tuple[Storage, int]:
    """Do what `place` does for the base of a tensor descriptor made on the device.

    Raises:
        LaunchError: If no tensor is there.
    """
    found = place(partition.cta.launch, address)
    if found is None or address > found[1] + found[0].nbytes:
        raise LaunchError(
            f"emulator: a tensor descriptor is made at {address:#x}, where no live CPU tensor is. "
            f"Try: pass the tensor to the kernel.\n    at   {quote(loc)}"
        )
    return found


def split_by_tensor(
    launch: Launch, addresses: np.ndarray, mask: np.ndarray | None, size: int
) -> list[np.ndarray]:
    """Return for each tensor that some lanes lie in a mask of them; none if one lane is outside.

    Args:
        launch: The launch.
        addresses: An address a lane.
        mask: The lanes that take part; None for all.
        size: Bytes that each lane accesses.
    """
    left = np.ones(addresses.shape, np.bool_) if mask is None else mask
    parts: list[np.ndarray] = []
    while left.any():
        found = place(launch, int(addresses[left].min()))
        if found is None:
            return []
        storage, base = found
        part = left & (addresses >= base) & (addresses + size <= base + storage.nbytes)
        if not part.any():
            return []
        parts.append(part)
        left = left & ~part
    return parts


def _alive(launch: Launch, address: int) -> torch.Tensor | None:
    tensors: list[torch.Tensor] | None = launch.scratch.get("tensors")
    if tensors is None:
        objects = gc.get_objects()
        tensors = [one for one in objects if issubclass(type(one), torch.Tensor) and _plain(one)]
        tensors.sort(key=torch.Tensor.element_size, reverse=True)  # bytes may be a view of ours
        launch.scratch["tensors"] = tensors
    for one in tensors:
        memory = one.untyped_storage()
        if 0 <= address - memory.data_ptr() < memory.nbytes():
            return one
    return None


def _plain(one: torch.Tensor) -> bool:
    known = one.dtype in dtypes.TORCH and one.device.type == "cpu"
    return known and one.layout == torch.strided
