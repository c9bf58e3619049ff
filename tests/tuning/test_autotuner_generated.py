"""Kernels that Inductor wrote, swapped, through PyTorch's own compile worker to a launch."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
from tests.launch.fake_cuda import DeviceTensor

from tileloom.tuning.autotuner import CachingAutotuner
from tileloom.tuning.swap import swapped

pytest.importorskip("triton")
from tests.tuning.modules import kernels_of, modules
from tests.tuning.replayed import PLATFORM, STREAM, Recorded

SOURCES = {path.stem: path for path in modules()}


class Clock:
    """Of several configs the last one of the list is the fastest."""

    asked: list = []  # noqa: RUF012
    order: list = []  # noqa: RUF012

    @classmethod
    def times(cls, config):
        return 0.1 if config == cls.order[-1] else 0.2


@pytest.fixture
def clock(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Clock, "asked", [])
    monkeypatch.setattr(CachingAutotuner, "make_timer", lambda self, back: Recorded(Clock, back))
    monkeypatch.setattr(CachingAutotuner, "platform", lambda self: PLATFORM)
    return Clock


def launch_arguments(tuner):
    kernel = tuner._loaded.kernel
    sizes = {f"{dim}numel": size for dim, size in (tuner.size_hints or {}).items()}
    return [
        DeviceTensor() if kernel.types.get(name, "").startswith("*") else sizes.get(name, 16)
        for name in kernel.parameters(tuner.inductor_meta)
    ]


def through(name, source):
    """What PyTorch's pool and its parent process do with a kernel's source."""
    from torch._inductor import async_compile, codecache
    from torch._inductor.runtime import compile_tasks, triton_helpers

    def load_kernel():
        codecache.PyCodeCache.cache_clear()  # the worker is another process
        with mock.patch.object(triton_helpers, "set_driver_to_gpu"):  # there is none
            return async_compile._load_triton_kernel_from_source(name, source)

    made, _ = compile_tasks._worker_compile_triton(load_kernel, {}, {})
    copy = pickle.loads(pickle.dumps(made))
    copy.set_compile_info(None, False)
    copy.restore_after_unpickle(None)
    copy.precompile(
        warm_cache_only=False, reload_kernel=load_kernel, static_triton_bundle_key="a key"
    )
    return copy


def check(name, clock, cuda):
    for kernel, source in kernels_of(swapped(SOURCES[name].read_text())):
        tuner = through(kernel, source)
        assert isinstance(tuner, CachingAutotuner)
        clock.order = tuner.configs
        given = launch_arguments(tuner)
        compiled = tuner.run(*given, stream=STREAM)
        cuda.define(compiled)
        before = cuda.count()
        tuner.run(*given, stream=STREAM)
        assert cuda.count() == before + 1
        seen = cuda.last()
        assert seen.stream == STREAM
        assert seen.block == (32 * tuner.winner.num_warps, 1, 1)
        assert seen.values[:8] == given[0].data_ptr().to_bytes(8, "little")
        grid = tuner._loaded.launches[tuner.winner]._grid(*given)
        assert seen.grid == tuple(grid)
        if tuner._stages.names == "list":
            assert tuner.winner == tuner.configs[-1]
        tuner.run(*given, stream=STREAM)  # PyTorch's wrapper launches again and again
        clock.asked.clear()
        again = through(kernel, source)
        assert len(again.launchers) == 1
        again.run(*given, stream=STREAM)
        assert clock.asked == []


@pytest.mark.parametrize("name", ["mlp", "layer_norm"])
def test_kernels_of_a_module(name, clock, cuda):
    check(name, clock, cuda)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"mlp", "layer_norm"}))
def test_kernels_of_every_module(name, clock, cuda):
    check(name, clock, cuda)
