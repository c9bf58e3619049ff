"""Lets a script written for a GPU run without one: CUDA devices become the CPU inside a block.

Factories and moves with ``device="cuda"`` give CPU tensors, ``torch.cuda`` answers for an
emulated card, streams and events do nothing. It is meant for `tileloom check`: tests and scripts
as they are.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Generator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tileloom.target import Target


def _mapped(value: Any) -> Any:
    """Return the CPU for a CUDA device in any spelling; other values unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class _OnCpu(TorchFunctionMode):
    """Rewrites the device arguments of every torch function."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.cuda:
            return args[0]
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if name == "pin_memory" and not isinstance(args[0], bool):
            return args[0]
        if name == "record_stream":
            return None
        if "device" in kwargs:
            kwargs["device"] = _mapped(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name in ("to", "new_empty", "new_zeros", "new_full", "new_ones"):
            args = tuple(_mapped(a) for a in args)
        return function(*args, **kwargs)


class _Event:
    """A CUDA event of which nobody is told the time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return a time that is no measurement: one millisecond."""
        return 1.0


class _Stream(_Event):
    """A CUDA stream: launches run when they are made."""

    cuda_stream = 0

    def wait_stream(self, other: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or _Event()


@contextlib.contextmanager
def cuda_on_cpu(target: Target) -> Generator[None]:
    """Make CUDA devices mean the CPU inside a block.

    Args:
        target: The card that `torch.cuda` describes.
    """
    properties = types.SimpleNamespace(
        name=target.name, major=target.capability[0], minor=target.capability[1],
        multi_processor_count=target.sms, total_memory=80 * 2**30, warp_size=32,
        shared_memory_per_block_optin=target.smem, shared_memory_per_block=48 * 1024,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        L2_cache_size=50 * 2**20,
    )  # fmt: skip
    stream = _Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: target.capability,
        "get_device_name": lambda device=None: target.name, "init": lambda: None,
        "set_device": lambda device: None, "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(), "Event": _Event, "Stream": _Stream,
        "device": lambda device: contextlib.nullcontext(), "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None, "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
    }  # fmt: skip
    with mock.patch.multiple(torch.cuda, **answers), _OnCpu():
        yield
