"""The kernels of examples/cpasync, as modules: run as scripts they import each other by name."""

from __future__ import annotations

import functools
import importlib
import sys

from tests.house import ROOT

FOLDER = ROOT / "examples" / "cpasync"
NAMES = ("axpby", "tma_copy", "gemm", "split_k_gemm")


def load(name):
    """One of the examples; their folder comes last on the path."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


@functools.lru_cache
def ptx_of(name, *arguments, arch="sm_90a"):
    """The PTX of one of them, compiled once."""
    return load(name).build(*arguments, arch=arch)[1]
