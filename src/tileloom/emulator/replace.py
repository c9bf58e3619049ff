"""Putting a changed copy of a loaded module in its place, for mutants of library kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from tileloom.emulator.report import LaunchError


def module_of(path: Path) -> ModuleType:
    """Return the loaded module that a file is the source of.

    Args:
        path: A Python file.

    Returns:
        The module.

    Raises:
        LaunchError: If no loaded module comes from that file.
    """
    wanted = path.resolve()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() == wanted:
            return module
    raise LaunchError(
        f"emulator: {path} is not a module that the checked file imports. "
        "Try: name the file that holds the kernels it launches."
    )


def _forget(function: Any) -> None:
    """Make a jitted function compile anew: what it calls has changed."""
    function.hash = None
    function.device_caches.clear()


@contextlib.contextmanager
def replaced(module: ModuleType, copy: Path) -> Generator[ModuleType]:
    """Run another file in place of a module inside a block.

    Every loaded module of the same package that holds a kernel of the original sees the copy's
    kernel of that name instead, and all its kernels are compiled anew.

    Args:
        module: A loaded module.
        copy: A file with the same names.

    Yields:
        The module made from the copy.
    """
    name = module.__name__
    spec = importlib.util.spec_from_file_location(name, copy)
    if spec is None or spec.loader is None:
        raise LaunchError(f"emulator: {copy} is not a Python file.")
    new = importlib.util.module_from_spec(spec)
    package = name.split(".")[0]
    family = [
        m for n, m in list(sys.modules.items()) if n.split(".")[0] == package and m is not module
    ]
    undo: list[tuple[ModuleType, str, Any]] = []
    sys.modules[name] = new
    try:
        spec.loader.exec_module(new)
        for other in family:
            for key, value in list(vars(other).items()):
                if value is module:
                    fresh: Any = new
                elif isinstance(value, JITFunction) and value is vars(module).get(key):
                    fresh = vars(new).get(key, value)
                else:
                    continue
                undo.append((other, key, value))
                setattr(other, key, fresh)
        _forget_all([*family, new])
        yield new
    finally:
        sys.modules[name] = module
        for other, key, value in undo:
            setattr(other, key, value)
        _forget_all([*family, module])


def _forget_all(modules: list[ModuleType]) -> None:
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, JITFunction):
                _forget(value)
