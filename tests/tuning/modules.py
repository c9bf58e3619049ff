"""The modules of `modules/` taken apart: their kernels, and what a decorator is given."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent / "modules"
_count = itertools.count()


def modules() -> list[Path]:
    return sorted(FOLDER.glob("*/*.txt"))


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


@contextlib.contextmanager
def recorded(place: Any, name: str) -> Iterator[list[list[Any]]]:
    """Let decorators record configs, as [kwargs, warps, stages], and make no autotuner."""
    made: list[list[Any]] = []

    def autotune(size_hints, configs, **given):
        plain = [[dict(c.kwargs), c.num_warps, c.num_stages] for c in configs]
        made.append([one for i, one in enumerate(plain) if one not in plain[:i]])
        return lambda fn: fn

    with mock.patch.object(place, name, autotune):
        yield made
