"""tileloom in the place of PyTorch's memory-efficient attention.

    from tileloom.integrations import torch_sdpa
    with torch_sdpa.register(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)

`register` replaces the CUDA kernels of `aten::_efficient_attention_forward` and of its backward,
which `_scaled_dot_product_efficient_attention`, the causal biases of `torch.nn.attention.bias` and
nested tensors call. Schemas, layouts, random numbers and autograd's formulas stay PyTorch's. A
problem that tileloom does not take goes to PyTorch's own kernel; `calls` counts which.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tileloom import knobs, log
from tileloom.errors import OptionError, UnsupportedError, known_keywords, shown_value
from tileloom.integrations.sdpa_checks import Refused
from tileloom.integrations.torch_sdpa_kernels import KERNELS

_log = log.get_logger("torch_sdpa")


@dataclass(frozen=True)
class Calls:
    """How many calls came to the replaced operators since the process began.

    Attributes:
        forward: Forwards that tileloom computed.
        backward: Backwards that tileloom computed.
        refused: For each operator and reason, the calls that PyTorch's own kernel got for it.
    """

    forward: int
    backward: int
    refused: Mapping[str, int]


_lock = threading.Lock()
_taken: Counter[str] = Counter()
_refused: Counter[str] = Counter()


def calls() -> Calls:
    """Return how many calls tileloom computed, and why PyTorch's own kernels got others.

    Subtract an earlier answer to count a part of a program. Calls are counted while a registration
    is held; those inside a captured graph once, when it is captured.
    """
    with _lock:
        forward, backward = (_taken[name] for name in KERNELS)
        return Calls(forward, backward, MappingProxyType(dict(_refused)))


_FLOAT32 = (
    "float32, which PyTorch's own kernel computes faster; register(float32=True) has tileloom's"
)


def _replacement(name: str, original: Any, float32: bool) -> Callable[..., Any]:
    kernel, place = KERNELS[name]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if args[place].dtype == torch.float32 and not float32:
                raise Refused(_FLOAT32)
            results = kernel(*args, **kwargs)
        except Refused as refused:
            reason = str(refused)
            with _lock:
                _refused[f"{name}: {reason}"] += 1
            _log.info("aten::%s: PyTorch's own kernel runs, because %s", name, reason)
            return original.call_boxed(keys, *args, **kwargs)
        with _lock:
            _taken[name] += 1
        return results

    return run


class _Override:
    """Our kernels over PyTorch's, under one dispatch key, until `remove`."""

    def __init__(self, dispatch_key: str, float32: bool) -> None:
        log.configure(knobs.get("log.levels"))
        self.holders = 0
        self.float32 = float32
        originals = {name: _original(name, dispatch_key) for name in KERNELS}
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # PyTorch warns of the first override in a process; this one was asked for.
            warnings.simplefilter("ignore")
            for name, original in originals.items():
                self._library.impl(
                    name, _replacement(name, original, float32), dispatch_key,
                    with_keyset=True, allow_override=True,
                )  # fmt: skip
        _log.info("registered for %s, over %s", dispatch_key, originals)

    def remove(self) -> None:
        """Give PyTorch its kernels back."""
        self._library._destroy()
        _log.info("removed")


def _original(name: str, dispatch_key: str) -> Any:
    try:
        return torch.library.get_kernel(f"aten::{name}", dispatch_key)
    except RuntimeError as error:
        raise UnsupportedError(
            f"register: this PyTorch ({torch.__version__}) has no {dispatch_key} kernel of "
            f"aten::{name} to replace ({error}). Try: a PyTorch that is built with CUDA, or call "
            "tileloom.attention, which needs no registration."
        ) from error


_registering = threading.Lock()
_overrides: dict[str, _Override] = {}


class Registration:
    """A hold on the replacement; with the last one removed, PyTorch has its own kernels again."""

    def __init__(self, dispatch_key: str, override: _Override) -> None:
        self._key = dispatch_key
        self._override = override
        self._held = True

    def remove(self) -> None:
        """Give the hold back. Calling it again, or after `unregister`, does nothing."""
        with _registering:
            if not self._held:
                return
            self._held = False
            self._override.holders -= 1
            if not self._override.holders and _overrides.get(self._key) is self._override:
                _overrides.pop(self._key).remove()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        """Name and state."""
        held = self._held and _overrides.get(self._key) is self._override
        return f"Registration({'held' if held else 'removed'})"


@known_keywords
def register(*, float32: bool = False) -> Registration:
    """Put tileloom's attention in the place of PyTorch's memory-efficient attention.

    It counts for the whole process, all threads and all GPUs, from now on: a graph that was
    captured before keeps PyTorch's kernels, a function that was compiled before gets tileloom's.
    Registering again is harmless: each call returns its own hold.

    Args:
        float32: Whether tileloom's kernels take float32 as well. They are exact, without tensor
            cores, and slower than PyTorch's, which get it otherwise.

    Returns:
        A `Registration`: call its `remove`, or use it in a `with` statement.

    Raises:
        UnsupportedError: If this PyTorch has no CUDA kernels to replace.
        OptionError: If it is registered with another `float32`, or that is no bool.
    """
    return _hold("CUDA", float32=float32)


def unregister() -> None:
    """Give PyTorch its own kernels back, whoever holds a `Registration`; harmless without one."""
    with _registering:
        for key in list(_overrides):
            _overrides.pop(key).remove()


def _hold(dispatch_key: str, *, float32: bool) -> Registration:
    if not isinstance(float32, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"register: float32 is {shown_value(float32)}; it must be True or False.")
    with _registering:
        override = _overrides.get(dispatch_key)
        if override is None:
            override = _overrides[dispatch_key] = _Override(dispatch_key, float32)
        elif override.float32 != float32:
            raise OptionError(
                f"register: float32 is {float32}, and it is registered with {override.float32}. "
                "Try: remove that registration first, or give the same."
            )
        override.holders += 1
        return Registration(dispatch_key, override)
