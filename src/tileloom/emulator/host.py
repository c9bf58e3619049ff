"""What the host does while a kernel runs, as events of the emulated run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tileloom.emulator import global_access
from tileloom.emulator.machine import Cta, HostEvent, Launch, Partition
from tileloom.emulator.memory import storage_bytes
from tileloom.emulator.report import LaunchError

if TYPE_CHECKING:
    from tileloom.emulator.memory import Storage


class _HostProgram(Cta):
    """Stands for the host where a program is expected; it runs nothing."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.program = (-1, -1, -1)
        self.clustered = False
        self.partitions = []
        self.inflight = []
        self.phase_keys = []


def _host(launch: Launch) -> Partition:
    found = launch.scratch.get("host")
    if found is None:
        found = launch.scratch["host"] = Partition(_HostProgram(launch), "host", 1)
    return found


def write_event(tensor: torch.Tensor, value: Any) -> HostEvent:
    """Make the event that writes `value` to `tensor`.

    Args:
        tensor: A contiguous CPU tensor.
        value: A tensor or number that broadcasts to it.

    Returns:
        The event.

    Raises:
        LaunchError: If the tensor is not contiguous or not on the CPU.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise LaunchError(
            "emulator: host_write takes a contiguous CPU tensor. Try: write a slice that is."
        )
    new = (
        torch.as_tensor(value, dtype=tensor.dtype)
        .expand(tensor.shape)
        .clone(memory_format=torch.contiguous_format)
    )
    data = storage_bytes(new)[: new.numel() * new.element_size()].copy()

    def action(launch: Launch) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        storage: Storage | None = next((s for s in launch.storages if s.address == pointer), None)
        start = int(tensor.storage_offset()) * tensor.element_size()
        if storage is None:
            storage_bytes(tensor)[start : start + data.size] = data
            return
        global_access.host_write(launch, _host(launch), storage, start, data)

    return HostEvent(action, "host_write")
