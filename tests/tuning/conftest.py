"""Autotuners over a fake libcuda, with a store and a cache of Triton's of their own."""

import gc

import pytest
from tests.launch import fake_cuda

from tileloom import knobs
from tileloom.tuning.config import Config


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory):
    """One cache for all tests: each config is compiled once."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake
        gc.collect()  # kernels unload themselves on Triton 3.9, which takes the driver


@pytest.fixture
def store(request, cuda, triton_cache, tmp_path, monkeypatch):
    import torch
    from triton import knobs as of_triton

    from tileloom.tuning.store import Store

    def allocate(size, alignment, stream):
        return fake_cuda.DeviceTensor(torch.uint8)

    monkeypatch.setattr("tileloom.tuning.loaded.of_torch", lambda device: allocate)
    if "workers" not in request.fixturenames:  # compiling in this process takes less time
        monkeypatch.setattr("tileloom.tuning.loaded.precompile", lambda *arguments: {})
    with of_triton.cache.scope(), knobs.scope({"cache.dir": tmp_path}):
        of_triton.cache.dir = str(triton_cache)
        yield Store()


@pytest.fixture
def workers():
    """For a test whose kernels are compiled by workers first."""


@pytest.fixture
def tuned(store):
    """A class of autotuners of this test, with times of its own."""
    from tests.tuning.replayed import Replayed, by_block

    class Mine(Replayed):
        times = staticmethod(by_block(b64=0.3, b128=0.26, b256=0.28))
        asked: list[Config] = []  # noqa: RUF012

    return Mine
