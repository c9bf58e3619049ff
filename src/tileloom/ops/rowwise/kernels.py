"""Every shipped config of the row-wise kernels: what the `kernels.py` of each folder lists."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from tileloom.launch.aot import KernelSpec


def shipped() -> tuple[KernelSpec, ...]:
    """Return the specs of every folder here that has kernels."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    specs: list[KernelSpec] = []
    for found in pkgutil.iter_modules(folder, f"{package}."):
        name = f"{found.name}.kernels"
        if found.ispkg and importlib.util.find_spec(name) is not None:
            specs += importlib.import_module(name).shipped()
    return tuple(specs)
