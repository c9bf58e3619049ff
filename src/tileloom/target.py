"""What hardware a tensor's kernels would run on: `target_of(tensor) -> Target`.

Dispatch asks this module and nothing else: never the environment, never the current device. The
emulator, the ahead-of-time compiler and tests push a target of their own with `override`.
A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Target:
    """The hardware that a kernel is chosen and compiled for.

    Attributes:
        kind: ``"cuda"`` for a real GPU, ``"emulated"`` for a GPU that the emulator plays on CPU
            tensors, ``"cpu"`` where no kernel runs and the reference is used.
        capability: Compute capability, for example ``(9, 0)``; ``(0, 0)`` for ``"cpu"``.
        sms: Number of streaming multiprocessors.
        smem: Shared memory that one block may use, in bytes.
        name: The device's name, as tables of tuned configs know it.
    """

    kind: Literal["cuda", "emulated", "cpu"]
    capability: tuple[int, int]
    sms: int
    smem: int
    name: str

    @property
    def arch(self) -> str:
        """The architecture's name, for example ``"sm_90"``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


CPU = Target("cpu", (0, 0), 0, 0, "cpu")

# Shared memory a block may use, in bytes, by compute capability (CUDA programming guide, table of
# technical specifications): what the driver reports as MAX_SHARED_MEMORY_PER_BLOCK_OPTIN.
SMEM_BYTES = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}

H100 = Target("emulated", (9, 0), 132, SMEM_BYTES[9, 0], "NVIDIA H100 80GB HBM3")

_override: contextvars.ContextVar[tuple[Target, ...]] = contextvars.ContextVar(
    "tileloom_target_override", default=()
)


@contextlib.contextmanager
def override(target: Target) -> Generator[Target]:
    """Make `target_of` answer `target` for CPU tensors inside a `with` block.

    Args:
        target: The target to answer with. Blocks nest; the innermost one wins. Only this context
            (thread or task) sees it.

    Yields:
        The target itself.
    """
    token = _override.set((*_override.get(), target))
    try:
        yield target
    finally:
        _override.reset(token)


@functools.lru_cache(maxsize=64)
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    smem = getattr(properties, "shared_memory_per_block_optin", 0) or SMEM_BYTES.get(capability, 0)
    return Target("cuda", capability, properties.multi_processor_count, smem, properties.name)


def target_of_device(device: torch.device) -> Target:
    """Return the target of a device; see `target_of`."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _cuda_target(index)
    stack = _override.get()
    return stack[-1] if stack and device.type == "cpu" else CPU


def target_of(tensor: torch.Tensor) -> Target:
    """Return the hardware that kernels on this tensor would run on.

    Args:
        tensor: Any tensor.

    Returns:
        The properties of the tensor's GPU; for a CPU tensor the innermost `override`, else `CPU`.
    """
    return target_of_device(tensor.device)
