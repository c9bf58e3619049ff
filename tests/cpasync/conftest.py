"""The CuTe DSL for these tests: `make` puts it into `.cute-dsl`, beside the environment."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from tests.house import ROOT

FOLDER = ROOT / ".cute-dsl"


def find_cute() -> bool:
    """Whether the DSL can be imported, from the environment or else from `.cute-dsl`."""
    packages = FOLDER / "nvidia_cutlass_dsl" / "dsl_packages"
    if importlib.util.find_spec("cutlass") is None and packages.is_dir():
        sys.path += [str(FOLDER), str(packages)]
        importlib.invalidate_caches()
    return importlib.util.find_spec("cutlass") is not None


@pytest.fixture(scope="session")
def kernels():
    """`tests.cpasync.kernels`: compiles bodies of kernels, with no GPU."""
    if not find_cute():
        pytest.skip("the CuTe DSL is not installed; make test puts it into .cute-dsl")
    return importlib.import_module("tests.cpasync.kernels")
