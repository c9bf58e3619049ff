"""The CuTe DSL for these tests: `make` puts it into `.cute-dsl`, beside the environment."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

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


@pytest.fixture(scope="session")
def device():
    """The GPU that the binaries are for."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels are compiled for sm_90a")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def binaries(device):
    """Binaries by name (`tests.cpasync.gpu_cubins`): from the folder, else compiled."""
    gpu_cubins = importlib.import_module("tests.cpasync.gpu_cubins")
    made = {}

    def binary(name):
        if name not in made:
            made[name] = gpu_cubins.find(name)
        if made[name] is None:
            pytest.skip("neither .cute-cubins nor the CuTe DSL is here: see test_gpu.py")
        return made[name]

    return binary
