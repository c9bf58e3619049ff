"""Loading compiled kernels over the fake libcuda: from Triton's cache by name, and without C."""

from __future__ import annotations

import gc

import pytest
from tests.launch import fake_cuda
from tests.tuning.replayed import arguments, config
from tests.tuning.tuned_kernels import FACTS, meta, scale

from tileloom.launch import loading
from tileloom.tuning.precompile import Kernel


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake
        gc.collect()


@pytest.fixture
def kernel(cuda, tmp_path):
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield Kernel.of(scale, meta(), FACTS, None)


def test_a_kernel_is_found_by_its_name_in_the_cache(kernel):
    made = kernel.compile(config(64), 90)
    found = kernel.cached(config(64), 90, made.hash)
    assert (found.hash, found.kernel) == (made.hash, made.kernel)
    assert kernel.cached(config(64), 90, "0" * 64) is None
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        assert kernel.cached(config(64), 90, made.hash) is None


def test_a_loaded_kernel_is_launched_by_tritons_own_launcher_too(kernel, cuda):
    compiled = kernel.compile(config(64), 90)
    loading.load(compiled)
    assert compiled.module is not None
    assert compiled.n_regs is not None
    module = compiled.module
    loading.load(compiled)
    assert compiled.module is module, "once"
    cuda.define(compiled)
    x, y, n = arguments()
    compiled.run(
        2, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None, x, y, n, 64
    )
    assert cuda.last().grid == (2, 1, 1)


def test_what_needs_too_much_is_refused_as_by_triton(kernel):
    from triton.runtime.errors import OutOfResources

    compiled = kernel.compile(config(64), 90)
    compiled.metadata = compiled.metadata._replace(shared=10**9)
    with pytest.raises(OutOfResources, match="shared memory"):
        loading.load(compiled)


def test_hooks_of_triton_see_the_loading(kernel):
    from triton import knobs

    compiled = kernel.compile(config(64), 90)
    seen = []
    hook = knobs.runtime.kernel_load_end_hook
    note = lambda *given: seen.append(given[2])  # noqa: E731
    hook.add(note)
    try:
        loading.load(compiled)
    finally:
        hook.remove(note)
    assert seen == ["scale"]
