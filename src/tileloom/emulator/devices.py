"""Lets a script written for a GPU run without one: CUDA devices become the CPU inside a block.

Factories and moves with ``device="cuda"`` give CPU tensors, ``torch.cuda`` answers for an
emulated card, streams and events do nothing, and `triton.testing.do_bench` runs what it is to
time once. It is meant for `tileloom check`: tests and scripts
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
from torch.utils._device import DeviceContext

from tileloom.emulator.capture import played_once
from tileloom.errors import UnsupportedError
from tileloom.target import Target


def _mapped(value: Any) -> Any:
    """Return the CPU for a CUDA device in any spelling but a number; other values unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


def _mapped_device(value: Any) -> Any:
    """Do the same where only a device can stand: a number is a CUDA device there."""
    return "cpu" if isinstance(value, int) else _mapped(value)


class _OnCpu(TorchFunctionMode):
    """Rewrites the device arguments of every torch function."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", args[0])
        if function is torch.Tensor.cuda:
            return args[0]
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if name == "record_stream":
            return None
        if "device" in kwargs:
            kwargs["device"] = _mapped_device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name in ("to", "new_empty", "new_zeros", "new_full", "new_ones"):
            args = tuple(_mapped(a) for a in args)
        at = _DEVICE_AT.get(name)
        if at is not None and len(args) > at:
            args = (*args[:at], _mapped_device(args[at]), *args[at + 1 :])
        return function(*args, **kwargs)


# Where these take a device without its name; a tensor or a dtype there stays what it is.
_DEVICE_AT = {"to": 1, "_parse_to": 0}


class _Generators(type):
    """What `torch.Generator` is inside: a call gives a generator of the CPU."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _GENERATOR(_mapped_device(device))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class _Generator(metaclass=_Generators):
    """Stands for `torch.Generator`."""


_GENERATOR = torch.Generator


@contextlib.contextmanager
def _default_device() -> Generator[None]:
    """Map the device of `torch.set_default_device` and of ``with torch.device(...)``."""
    make, before = DeviceContext.__init__, torch.get_default_device()

    def make_mapped(self: DeviceContext, device: Any) -> None:
        make(self, _mapped(torch.device(device)))

    with mock.patch.object(DeviceContext, "__init__", make_mapped):
        try:
            yield
        finally:
            torch.set_default_device(None if before.type == "cpu" else before)


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

    def is_capturing(self) -> bool:
        """Return that no graph is being recorded."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or _Event()


class _Graph:
    """Stands for what makes CUDA graphs, and refuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "emulator: CUDA graphs (torch.cuda.CUDAGraph, graph, make_graphed_callables) are not "
            "emulated: each launch is played when it is made. Try: call what the graph would "
            "capture."
        )


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
    seed = torch.default_generator.manual_seed  # random numbers of the card come from there
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: target.capability,
        "get_device_name": lambda device=None: target.name, "init": lambda: None,
        "set_device": lambda device: None, "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(), "Event": _Event, "Stream": _Stream,
        "device": lambda device: contextlib.nullcontext(),
        "manual_seed": seed, "manual_seed_all": seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_stream": lambda device=None: stream, "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "CUDAGraph": _Graph, "graph": _Graph, "make_graphed_callables": _Graph,
    }  # fmt: skip
    accelerator: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_idx": lambda: 0, "set_device_idx": lambda device: None,
        "current_device_index": lambda: 0, "set_device_index": lambda device: None,
        "set_stream": lambda stream: None,
        **{name: answers[name]
           for name in ("is_available", "device_count", "synchronize", "current_stream")},
    }  # fmt: skip
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch("triton.testing.do_bench", played_once),
        _default_device(),
        _OnCpu(),
    ):
        yield
