"""Whole swapped modules: imported, compiled by PyTorch's async compile, and called.

Over the fake libcuda, with tensors that have an address and no memory: what runs is the wrapper,
PyTorch's async compile, the autotuner and Triton's launchers; only the driver is made up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json

import pytest
import torch
from tests.launch.fake_cuda import DeviceTensor
from tests.tuning.make_modules import FOLDER
from tests.tuning.modules import kernels_of, modules
from tests.tuning.replayed import STREAM

from tileloom.tuning import CachingAutotuner, generated
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.swap import swapped

# Those of this torch, where it wrote some; the latest otherwise.
MODULES = {path.stem: path for path in modules()}
MODULES |= {path.stem: path for path in FOLDER.glob("*.txt")}


@pytest.fixture
def gpu(tuned, cuda, monkeypatch, tmp_path):
    """What a generated module asks of PyTorch's CUDA side; kernels are compiled in this process."""
    from torch._inductor import codecache
    from torch._inductor import config as settings
    from torch._inductor.runtime import triton_helpers

    tuned.times = staticmethod(lambda config: 0.1)  # all are equal: the first wins
    autotune = functools.partial(cached_autotune, caching_autotuner_cls=tuned)
    monkeypatch.setattr(generated, "cached_autotune", autotune)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "_DeviceGuard", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    with settings.patch(compile_threads=1):
        yield cuda
    codecache.PyCodeCache.cache_clear()


def imported(name, folder):
    path = folder / f"{name}.py"
    path.write_text(swapped(MODULES[name].read_text()))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.empty_strided_cuda = lambda size, stride, dtype: DeviceTensor(dtype)
    module.assert_size_stride = lambda *given: None
    return module


def call_twice(name, count, folder, gpu):
    """Import a module and call it twice, the first time with what tunes its kernels."""
    expected = json.loads(MODULES[name].with_suffix(".configs.json").read_text())
    module = imported(name, folder)
    names = [own for own, _ in kernels_of(MODULES[name].read_text())]
    kernels = [getattr(module, own) for own in names]
    for kernel in kernels:
        assert isinstance(kernel, CachingAutotuner)
        assert [launcher.config for launcher in kernel.launchers] == kernel.configs
        for launch in kernel._loaded.launches.values():
            gpu.define(launch.variant.compiled)
    module.call([DeviceTensor() for _ in range(count)])
    given = [DeviceTensor() for _ in range(count)]
    before = gpu.count()
    assert module.call(list(given))
    assert gpu.count() == before + len(kernels)
    for back, own in enumerate(reversed(names), start=1):
        seen = gpu.last(back)
        _, warps, _, grid = expected[own][0]
        assert (list(seen.grid), seen.block, seen.stream) == (grid, (32 * warps, 1, 1), STREAM)
    first = gpu.last(len(kernels)).values
    assert any(tensor.data_ptr().to_bytes(8, "little") in first for tensor in given)


@pytest.mark.parametrize(("name", "count"), [("layer_norm", 2), ("combo_blocks", 3)])
def test_a_module_runs(name, count, gpu, tmp_path):
    call_twice(name, count, tmp_path, gpu)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "count"),
    [("scan_rows", 1), ("softmax", 1), ("transposed", 2), ("embedding", 3), ("outer", 1),
     ("combo", 3), ("adam", 12), ("long_row", 1)],
)  # fmt: skip
def test_modules_run(name, count, gpu, tmp_path):
    call_twice(name, count, tmp_path, gpu)
