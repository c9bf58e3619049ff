"""What a launch needs of a jitted function that another process has loaded.

A compile worker says it with the compiled kernel. To load the function again here would read its
file and take it apart, some 3 ms for each kernel, for facts that are known.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tileloom.errors import OptionError
from tileloom.launch import compat


class Declared:
    """Stands for a jitted function; whatever it does not know itself, it loads the function for.

    Attributes:
        full_name: ``"module:name"`` of the function.
        source: Hash of its source; see `compat.source_hash`.
        arg_names: Its parameters.
        params: The same with whether each ``is_constexpr``.
        pre_run_hooks: Those of the function, once it is loaded.
        debug: Whether it is debugged, by Triton's decorator.
        reload: Makes the autotuner of the function, which has it; None if nobody said how.
    """

    def __init__(self, fn: Any) -> None:
        """Say it of a function that is loaded in this process."""
        self.__name__ = fn.__name__
        self.full_name = full_name(fn)
        self.source = source_hash(fn)
        self.arg_names = list(fn.arg_names)
        constant = [bool(p.is_constexpr) for p in fn.params]
        self.params = [
            SimpleNamespace(name=n, is_constexpr=c) for n, c in zip(self.arg_names, constant)
        ]
        self.pre_run_hooks: list[Any] = []
        self.debug = getattr(fn, "debug", None)
        self._is_gluon = bool(fn.is_gluon())
        self._loaded: Any = None
        self.reload: Callable[[], Any] | None = None

    def is_gluon(self) -> bool:
        """Whether it is a Gluon kernel."""
        return self._is_gluon

    def load(self) -> Any:
        """Return the function itself, loaded the first time."""
        if self._loaded is None:
            if self.reload is None:
                raise not_here(self.__name__)
            found = self.reload().fn
            self.pre_run_hooks += found.pre_run_hooks
            found.pre_run_hooks = self.pre_run_hooks  # launches test this very list
            self._loaded = found
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pre_run_hooks": [], "_loaded": None, "reload": None}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loaded" not in self.__dict__:  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(self.load(), name)


def not_here(name: str) -> OptionError:
    """The error of a function that nobody said how to load."""
    return OptionError(
        f"tuning: '{name}' came out of a pickle, without its function. Try: "
        "precompile(reload_kernel=...), with what makes it anew."
    )


def of(fn: Any) -> Declared:
    """Say it of a function, or what was said already."""
    return fn if isinstance(fn, Declared) else Declared(fn)


def full_name(fn: Any) -> str:
    """Return ``"module:name"`` of a jitted function."""
    if isinstance(fn, Declared):
        return fn.full_name
    return f"{fn.fn.__module__}:{fn.fn.__qualname__}"


def source_hash(fn: Any) -> str:
    """Return the hash of a jitted function's source; see `compat.source_hash`."""
    return fn.source if isinstance(fn, Declared) else compat.source_hash(fn)


def loaded(fn: Any) -> Any:
    """Return a jitted function itself."""
    return fn.load() if isinstance(fn, Declared) else fn
