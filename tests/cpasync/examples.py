"""The kernels of examples/cpasync, as modules: run as scripts they import each other by name."""

from __future__ import annotations

import functools
import importlib
import sys

from tests.house import ROOT

FOLDER = ROOT / "examples" / "cpasync"
NAMES = ("axpby", "tma_copy", "gemm", "split_k_gemm")


def load(name):
    """One of the examples; their folder is on the path only while they are imported."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


@functools.lru_cache
def ptx_of(name, *arguments, arch="sm_90a"):
    """The PTX of one of them, compiled once."""
    return load(name).build(*arguments, arch=arch)[1]
