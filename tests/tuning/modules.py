"""The modules of `modules/` taken apart: their kernels, and what a decorator is given."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent / "modules"
_count = itertools.count()


def modules() -> list[Path]:
    return sorted(FOLDER.glob("*/*.txt"))


def warm_worker(seconds: float = 1.0) -> float:
    """In a compile worker: import what swapped modules need, and compile a kernel.

    The first one of a process also lets Triton hash itself and load its compiler.

    Returns:
        Seconds of the import. The worker is busy for `seconds` longer, so that each gets its turn.
    """
    began = time.perf_counter()
    importlib.import_module("tileloom.tuning.cached")
    importlib.import_module("tileloom.tuning.inductor")
    taken = time.perf_counter() - began
    from triton import knobs

    from tileloom.tuning.config import Config
    from tileloom.tuning.precompile import Kernel

    kernels = importlib.import_module("tests.tuning.tuned_kernels")
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        Kernel.of(kernels.scale, kernels.meta(), {}, None).compile(Config({"XBLOCK": 64}), 90)
    time.sleep(seconds)
    return taken


def kernels_of(text: str) -> Iterator[tuple[str, str]]:
    """Name and source of each kernel that a module gives to async compile."""
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "triton":
            name, source = (ast.literal_eval(argument) for argument in node.args[:2])
            yield name, source


def load(source: str, folder: Path) -> Any:
    """Import a kernel's source, as async compile does; Triton reads it from the file."""
    from torch._inductor.runtime import triton_helpers

    path = folder / f"kernel_{next(_count)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(triton_helpers, "set_driver_to_gpu"):  # there may be none
        spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Asked:
    """What one decorator gave to `cached_autotune`."""

    configs: list[Any]
    meta: dict[str, Any]

    @property
    def plain(self) -> list[list[Any]]:
        """Each distinct config as [kwargs, warps, stages]."""
        found = [[dict(c.kwargs), c.num_warps, c.num_stages] for c in self.configs]
        return [one for i, one in enumerate(found) if one not in found[:i]]


@contextlib.contextmanager
def recorded(place: Any) -> Iterator[list[Asked]]:
    """Let decorators record what they ask for, and make no autotuner."""
    made: list[Asked] = []

    def autotune(size_hints, configs, triton_meta, inductor_meta, **given):
        made.append(Asked(list(configs), inductor_meta))
        return lambda fn: fn

    with mock.patch.object(place, "cached_autotune", autotune):
        yield made


UNKNOWN = 1000
"""What sizes are that a module does not state."""


def launches_of(text: str) -> dict[str, list[int | None]]:
    """By kernel, the arguments of its first launch: numbers, and None for a tensor."""
    found: dict[str, list[int | None]] = {}
    kernels: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ".triton(" in (made := ast.unparse(node.value)):
            kernels[ast.unparse(node.targets[0])] = made.split("'")[1]
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "run":
            name = kernels[ast.unparse(called.value)]
            found.setdefault(name, [_number(argument) for argument in node.args])
    return found


def _number(argument: ast.expr) -> int | None:
    if isinstance(argument, ast.Constant):
        return argument.value
    return UNKNOWN if re.fullmatch(r"s\d+", ast.unparse(argument)) else None


def arguments_of(fn: Any, meta: dict[str, Any]) -> list[str]:
    """Names of what a launch gives: all but constants, then extra arguments of the grid."""
    given = [name for name, p in zip(fn.arg_names, fn.params) if not p.is_constexpr]
    return [*given, *meta.get("extra_launcher_args", ())]
