"""The launcher over Triton's real launchers and a fake libcuda: what reaches the driver, and when.

Every launch of ours must give the driver the same bytes as Triton's own: see `fake_cuda.py`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor
from tests.launch.versions import OTHERS, triton_folder

from tileloom import errors, knobs, launch
from tileloom import target as targets
from tileloom.launch import launcher as launcher_module
from tileloom.launch import tiers, watch

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")
PREPARED = ("packed", "direct", "seam")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """Triton's CUDA driver over the fake library, for this file."""
    with fake_cuda.installed(tmp_path_factory.mktemp("cuda")) as fake:
        yield fake


@pytest.fixture(params=PREPARED)
def tier(request, cuda):
    if request.param == "direct" and not hasattr(cuda.driver.utils, "launch"):
        pytest.skip("this Triton has no generic launcher")
    with knobs.scope({"launch.tier": request.param}):
        yield request.param


def tensors(count, dtype=torch.float32):
    return [DeviceTensor(dtype) for _ in range(count)]


class Both:
    """Launches a kernel by Triton and by us, and compares what the driver saw."""

    def __init__(self, cuda, kernel, **options):
        self.cuda, self.kernel, self.options = cuda, kernel, options
        self.launcher = launch.prepare(kernel, **options)
        self.defined = set()

    def __call__(self, grid, *args, **named):
        compiled = self.kernel[grid](*args, **named, **self.options)
        if compiled.function not in self.defined:
            self.cuda.define(compiled)
            self.defined.add(compiled.function)
            self.kernel[grid](*args, **named, **self.options)
        expected, before = self.cuda.last(), self.cuda.count()
        assert expected.values
        result = self.launcher[grid](*args, **named)
        assert self.cuda.count() == before + 1
        assert self.cuda.last() == expected
        assert result is compiled
        return expected


def test_every_tier_gives_the_driver_what_triton_gives(tier, cuda):
    both = Both(cuda, kernels.add, num_warps=8)
    for n in (1000, 1000, 1000, 1024, 1024, 1024, 1, 1, 1, 1000):
        both((8,), *tensors(3), n, BLOCK=128)
    assert len(both.launcher._table) == 3


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    small=st.sampled_from([1, 2, 16]),
    large=st.sampled_from([16, 2**40, 17]),
    number=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e300])),
    truth=st.booleans(),
    nothing=st.sampled_from([None, 3]),
    wide=st.sampled_from([5, 2**33, -(2**60) + 1]),
    shifts=st.tuples(*[st.sampled_from([0, 4, 16])] * 2),
)
def test_random_arguments_reach_the_driver_unchanged(
    cuda, small, large, number, truth, nothing, wide, shifts
):
    both = cuda.__dict__.setdefault("mixed", Both(cuda, kernels.mixed))
    given_ = [DeviceTensor(address=0x7F0000000000 + shift) for shift in shifts]
    for _ in range(3):
        both((2, 3), *given_, small, large, number, truth, nothing, wide)
    assert len(both.launcher._table) <= launcher_module.LIMIT


def test_descriptors(tier, cuda):
    both = Both(cuda, kernels.copy_tile)
    device = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(4)]
    for step in range(8):
        source, target = device[step % 2], device[2 + step // 2 % 2]
        both((8,), kernels.triton_descriptor(source, [32, 64]),
             kernels.triton_descriptor(target, [32, 64]), 3, BLOCK=32)  # fmt: skip
    assert len(both.launcher._table) == 1


def test_descriptors_of_gluon(tier, cuda):
    both = Both(cuda, kernels.gluon_copy_tile)
    for _ in range(4):
        make = kernels.gluon_descriptor
        source, target = (fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2))
        both((8,), make(source, [32, 64]), make(target, [32, 64]), 3, BLOCK=32)
    assert both.launcher._table


def test_a_repeated_descriptor_is_encoded_once(cuda):
    launcher = launch.prepare(kernels.copy_tile)
    source, target = (
        kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
        for _ in range(2)
    )
    for _ in range(4):
        launcher[(8,)](source, target, 3, BLOCK=32)
    before = cuda.count("encodes")
    for _ in range(50):
        launcher[(8,)](source, target, 3, BLOCK=32)
    assert cuda.count("encodes") == before


def test_a_descriptor_changed_in_place_is_seen(cuda):
    both = Both(cuda, kernels.copy_tile)
    source, target = (
        kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
        for _ in range(2)
    )
    for change in (
        lambda: None,
        lambda: source.shape.__setitem__(0, 128),
        lambda: source.strides.__setitem__(0, 128),
        lambda: setattr(source, "padding", "nan"),
        lambda: setattr(source, "base", fake_cuda.Strided(torch.bfloat16, (256, 64))),
    ):
        change()
        for _ in range(4):
            both((8,), source, target, 3, BLOCK=32)


def test_the_table_of_descriptors_is_bounded(cuda):
    from tileloom.launch import descriptors

    launcher = launch.prepare(kernels.copy_tile)
    for _ in range(3 * descriptors.LIMIT):
        pair = [
            kernels.triton_descriptor(fake_cuda.Strided(torch.float16, (256, 64)), [32, 64])
            for _ in range(2)
        ]
        launcher[(8,)](*pair, 3, BLOCK=32)
    assert all(len(table) <= descriptors.LIMIT for table in descriptors._tables.values())


def test_gluon_kernels(tier, cuda):
    both = Both(cuda, kernels.gluon_add, num_warps=1)
    for _ in range(4):
        both((3,), *tensors(2), 100, BLOCK=32)


def test_constants_and_keywords_in_any_order(cuda):
    both = Both(cuda, kernels.add)
    x, y, out = tensors(3)
    for _ in range(3):
        both((8,), x, y, out, 1000, BLOCK=128)
        both((8,), x, BLOCK=128, n=1000, out=out, y=y)
        both((8,), n=1000, out=out, y=y, x=x, BLOCK=128)
    assert len(both.launcher._table) == 1


def test_a_callable_taken_before_the_first_launch(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    taken = launcher[(8,)]
    for _ in range(4):
        taken(*args, BLOCK=128)
    assert launcher._table
    assert launcher._call in launcher._guards.values(), "it does not undo what was prepared"


def test_compile_options_at_the_launch(cuda):
    launcher = launch.prepare(kernels.add, num_warps=2)
    args = (*tensors(3), 1000)
    for _ in range(3):
        launcher[(8,)](*args, BLOCK=128, num_warps=8)
        assert cuda.last().block == (256, 1, 1)
        launcher[(8,)](*args, BLOCK=128)
        assert cuda.last().block == (64, 1, 1)


@pytest.mark.parametrize("options", [
    {"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True},
    {"num_ctas": 4, "launch_pdl": True},
])  # fmt: skip
def test_launch_attributes(options, tier, cuda):
    both = Both(cuda, kernels.add, **options)
    for _ in range(4):
        seen = both((8, 2), *tensors(3), 1000, BLOCK=128)
    assert seen.attributes
    assert both.launcher._table


def test_grids_that_are_called(cuda):
    both = Both(cuda, kernels.add)
    calls = []

    def counted(meta):
        calls.append(meta["n"])
        return (meta["n"] // meta["BLOCK"] + 1,)

    blocks = lambda meta: (meta["n"] // meta["BLOCK"] + 1, 2)  # noqa: E731
    for _ in range(4):
        for n in (1000, 5000):
            assert both(blocks, *tensors(3), n, BLOCK=128).grid == (n // 128 + 1, 2, 1)
            assert both([n // 128 + 1], *tensors(3), n, BLOCK=128).grid == (n // 128 + 1, 1, 1)
            both(counted, *tensors(3), n, BLOCK=128)
    assert len(calls) == 2 * 8, "what closes over something is called at every launch"


def test_a_grid_that_reads_what_no_guard_tests_is_called_every_time(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    sizes = lambda meta: (meta["x"].blocks,)  # noqa: E731
    unpacks = lambda meta: (dict(**meta)["x"].blocks,)  # noqa: E731
    for blocks in (3, 3, 3, 5):
        x.blocks = blocks
        for grid in (sizes, unpacks):
            launcher[grid](x, y, out, 1000, BLOCK=128)
            assert cuda.last().grid == (blocks, 1, 1)


def test_an_empty_grid_launches_nothing(cuda):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000)
    compiled = launcher[(8,)](*args, BLOCK=128)
    before = cuda.count()
    for _ in range(4):
        assert launcher[(0,)](*args, BLOCK=128) is compiled
        assert launcher[(4, 0)](*args, BLOCK=128) is compiled
    assert cuda.count() == before


def test_launches_of_other_kinds_do_not_mix(cuda):
    both = Both(cuda, kernels.mixed)
    x, y = tensors(2)
    for _ in range(4):
        both((1,), x, y, 3, 4, 1.5, True, None, 7)
        both((1,), x, y, 3, 4, 2, True, None, 7)
        both((1,), x, y, 3, 4, 1.5, 1, None, 7)
        both((1,), x, y, 3, 4, 1.5, True, y, 7) if hasattr(y, "blocks") else None
        both((1,), x, y, 3, 4, 1.5, True, 5, 7)
        both((1,), DeviceTensor(torch.float64), y, 3, 4, 1.5, True, None, 7)
        both((1,), DeviceTensor(address=x.address + 4), y, 3, 4, 1.5, True, None, 7)


def test_a_bound_launch(tier, cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    bound = launcher.bind((8,), x, y, out, 1000, BLOCK=128)
    for _ in range(5):
        compiled = bound.launch(x, y, out)
        cuda.define(compiled)
        x, y, out = tensors(3)
        bound.launch(x, y, out)
        ours = cuda.last()
        kernels.add[(8,)](x, y, out, 1000, BLOCK=128)
        assert cuda.last() == ours
    assert bound.launch.__name__ == "launch", "it is prepared"


def test_a_bound_launch_with_descriptors(cuda):
    launcher = launch.prepare(kernels.gluon_copy_tile)
    make = kernels.gluon_descriptor
    pair = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2)]
    bound = launcher.bind((8,), *[make(t, [32, 64]) for t in pair], 3, BLOCK=32)
    for _ in range(5):
        pair = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2)]
        cuda.define(bound.launch(*pair))
        bound.launch(*pair)
        ours = cuda.last()
        kernels.gluon_copy_tile[(8,)](*[make(t, [32, 64]) for t in pair], 3, BLOCK=32)
        assert cuda.last() == ours


# Everything rare


def _warm(launcher, args, **named):
    for _ in range(4):
        launcher[(8,)](*args, **named)
    assert launcher._table


def test_hooks_see_launches(cuda):
    from triton import knobs as triton_knobs

    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    _warm(launcher, args, BLOCK=128)
    for _ in range(3):
        bound.launch(*args[:3])
    seen = []

    def enter(metadata):
        seen.append(("enter", metadata.get()["name"]))

    def leave(metadata):
        seen.append(("exit", metadata.get()["name"]))

    runtime = triton_knobs.runtime
    runtime.launch_enter_hook.add(enter)
    runtime.launch_exit_hook.add(leave)
    try:
        launcher[(8,)](*args, BLOCK=128)
        bound.launch(*args[:3])
    finally:
        runtime.launch_enter_hook.remove(enter)
        runtime.launch_exit_hook.remove(leave)
    assert seen == [("enter", "add"), ("exit", "add")] * 2
    launcher[(8,)](*args, BLOCK=128)
    assert len(seen) == 4


def test_a_hook_that_is_assigned_is_seen(cuda, monkeypatch):
    from triton import knobs as triton_knobs

    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    seen = []
    monkeypatch.setattr(triton_knobs.runtime, "launch_enter_hook", seen.append)
    launcher[(8,)](*args, BLOCK=128)
    assert len(seen) == 1


def test_hooks_before_the_launch(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    seen = []
    kernels.add.add_pre_run_hook(lambda *a, **k: seen.append(a))
    try:
        launcher[(8,)](*args, BLOCK=128)
    finally:
        kernels.add.pre_run_hooks.clear()
    assert len(seen) == 1


def test_debug_is_seen(cuda, monkeypatch):
    from triton import knobs as triton_knobs

    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    plain = []
    monkeypatch.setattr(launcher, "_plain", lambda *a, **k: plain.append(a))
    launcher[(8,)](*args, BLOCK=128)
    assert not plain
    monkeypatch.setattr(triton_knobs.runtime, "debug", True)
    launcher[(8,)](*args, BLOCK=128)
    assert len(plain) == 1


def test_another_driver_takes_the_plain_tier(cuda):
    """The emulator puts its own driver in Triton's place; CPU tensors then go to it."""
    from triton.runtime.driver import driver

    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    seen = []

    class Emulated:
        def get_current_device(self):
            seen.append("asked")
            raise InterruptedError

    before = driver.active
    driver.set_active(Emulated())
    try:
        on_host = [DeviceTensor(is_cuda=False) for _ in range(3)]
        with targets.override(targets.H100), pytest.raises(InterruptedError):
            launcher[(8,)](*on_host, 1000, BLOCK=128)
    finally:
        driver.set_active(before)
    assert seen == ["asked"]


def test_refresh_forgets(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    for _ in range(3):
        bound.launch(*args[:3])
    _warm(launcher, args, BLOCK=128)
    watch.refresh()
    assert not launcher._table
    assert not launcher._variants
    assert bound.launch == bound._first
    _warm(launcher, args, BLOCK=128)


def test_a_forked_child_prepares_anew(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    held, free = threading.Event(), threading.Event()

    def hold():
        with launcher._lock:
            held.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            empty = not launcher._table
            launcher[(8,)](*args, BLOCK=128)
            os.write(writer, b"anew" if empty else b"kept")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    free.set()
    thread.join()
    os.waitpid(child, 0)
    assert answer == "anew"
    assert launcher._table


def test_a_global_that_changed_is_said(cuda, monkeypatch):
    launcher, args = launch.prepare(kernels.with_global), tensors(1)
    for _ in range(2):
        launcher[(1,)](*args, 5)
    monkeypatch.setattr(kernels, "SCALE", kernels.tl.constexpr(3))
    with pytest.raises(RuntimeError, match="Global variable SCALE has changed"):
        launcher[(1,)](*args, 7)


# Memory and threads


def test_eight_threads_launch_their_own_arguments(cuda):
    launcher = launch.prepare(kernels.add)
    cuda.define(launcher[(8,)](*tensors(3), 1000, BLOCK=128))
    start, wrong, before = threading.Barrier(8), [], cuda.count()
    sent = [[] for _ in range(8)]

    def work(number):
        start.wait()
        for step in range(200):
            x = DeviceTensor(address=(number + 1) << 40 | step << 8)
            try:
                launcher[(number + 1,)](x, x, x, 1000, BLOCK=128)
            except Exception as error:
                wrong.append(error)
            sent[number].append((number + 1, x.address))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    count = cuda.count() - before
    assert count == 1600
    seen = []
    for back in range(1, count + 1):
        record = cuda.last(back)
        addresses = [int.from_bytes(record.values[i : i + 8], "little") for i in (0, 8, 16)]
        assert addresses[0] == addresses[1] == addresses[2]
        seen.append((record.grid[0], addresses[0]))
    assert sorted(seen) == sorted(pair for pairs in sent for pair in pairs)


def test_a_thread_without_a_context_binds_one(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    before, binds, failed = cuda.count(), cuda.count("binds"), []

    def work():
        try:
            launcher[(8,)](*args, BLOCK=128)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert cuda.count() == before + 1
    assert cuda.count("binds") == binds + 1


def test_the_module_lives_as_long_as_the_launcher(cuda):
    """From 3.8 on Triton unloads a module when its CompiledKernel goes."""
    launcher, args = launch.prepare(kernels.gluon_add), (*tensors(2), 100)
    compiled = weakref.ref(launcher[(8,)](*args, BLOCK=32))
    _warm(launcher, args, BLOCK=32)
    kernels.gluon_add.device_caches.clear()
    gc.collect()
    assert compiled() is not None
    launcher[(8,)](*args, BLOCK=32)
    launcher.forget()
    gc.collect()
    assert compiled() is None


def test_no_tensor_is_held(cuda):
    launcher = launch.prepare(kernels.copy_tile)
    bound, alive = None, []
    for _ in range(4):
        pair = [fake_cuda.Strided(torch.float16, (256, 64)) for _ in range(2)]
        given_ = [kernels.triton_descriptor(t, [32, 64]) for t in pair]
        bound = bound or launcher.bind((8,), *given_, 3, BLOCK=32)
        launcher[(8,)](*given_, 3, BLOCK=32)
        bound.launch(*pair)
        alive += map(weakref.ref, pair)
    del pair, given_
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_ten_thousand_shapes_keep_no_memory(cuda):
    launcher = launch.prepare(kernels.add)
    args = tensors(3)

    def run(first):
        for n in range(first, first + 5000):
            launcher[(n % 7 + 1,)](*args, 2 * n + 3, BLOCK=128)
            launcher[(n % 7 + 1,)](*args, 2 * n + 3, BLOCK=128)

    run(0)
    tracemalloc.start()
    try:
        run(5000)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(10000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(launcher._table) <= launcher_module.LIMIT
    assert len(launcher._seen) <= launcher_module.LIMIT
    assert after - before < 200_000, "bytes for 5,000 more shapes"


# Bad input


def test_a_cpu_tensor(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    on_host = DeviceTensor(is_cuda=False)
    on_host.device = torch.device("cpu")
    for _ in range(5):
        launcher[(8,)](x, y, out, 1000, BLOCK=128)
        with pytest.raises(errors.DeviceError) as caught:
            launcher[(8,)](x, on_host, out, 1000, BLOCK=128)
        assert str(caught.value) == (
            "launch: y of 'add' is on cpu; a GPU reads tensors on the GPU, or pinned ones. "
            "Try: y.to(the GPU)."
        )


def test_too_many_arguments(cuda):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000, 128)
    for _ in range(4):
        with pytest.raises(errors.ArgumentError) as caught:
            launcher[(8,)](*args, 4)
        launcher[(8,)](*args)
    assert str(caught.value) == (
        "launch: 6 arguments are given by position. The 5 parameters of 'add' are x, y, out, n, "
        "BLOCK. Try: compile options, such as num_warps, by keyword."
    )


def test_missing_and_doubled_arguments(cuda):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    for _ in range(4):
        with pytest.raises(errors.ArgumentError, match=r"launch: out, n are not given\. The 5"):
            launcher[(8,)](x, y, BLOCK=128)
        with pytest.raises((errors.ArgumentError, TypeError), match="y"):
            launcher[(8,)](x, y, out, 1000, y=y, BLOCK=128)
        launcher[(8,)](x, y, out, 1000, BLOCK=128)


def test_an_unknown_keyword(cuda):
    launcher = launch.prepare(kernels.add)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="'add' has no such parameter, and Triton"):
            launcher[(8,)](*tensors(3), 1000, BLOCK=128, blocks=3)


@pytest.mark.parametrize("value", ["text", [1, 2], object()])
def test_a_wrong_type(cuda, value):
    launcher = launch.prepare(kernels.add)
    x, y, out = tensors(3)
    name = type(value).__name__
    for _ in range(3):
        with pytest.raises(errors.ArgumentError, match=f"launch: n is a {name}; 'add' takes"):
            launcher[(8,)](x, y, out, value, BLOCK=128)
        launcher[(8,)](x, y, out, 1000, BLOCK=128)


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        ((2**31,), r"has 2147483648 blocks along x; the driver takes 0 to 2147483647"),
        ((1, 65536), r"has 65536 blocks along y; the driver takes 0 to 65535"),
        ((1, 1, -1), r"has -1 blocks along z"),
        ((), r"must be one to three integers"),
        ((1, 2, 3, 4), r"must be one to three integers"),
        ((1.5,), r"must be one to three integers"),
    ],
)
def test_a_grid_that_the_driver_does_not_take(cuda, grid, text):
    launcher = launch.prepare(kernels.add)
    args = (*tensors(3), 1000)
    for _ in range(3):
        with pytest.raises(errors.OptionError, match=text):
            launcher[grid](*args, BLOCK=128)
        launcher[(8,)](*args, BLOCK=128)


def test_the_drivers_error_is_a_sentence(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    _warm(launcher, args, BLOCK=128)
    cuda.fail(700)
    try:
        with pytest.raises(errors.LaunchError) as caught:
            launcher[(8,)](*args, BLOCK=128)
    finally:
        cuda.fail(0)
    assert str(caught.value) == ("launch: launching 'add' failed: CUDA error 700, a made-up error.")
    launcher[(8,)](*args, BLOCK=128)


def test_only_jitted_functions():
    with pytest.raises(errors.OptionError, match=r"launch\.prepare: kernel is a function; it must"):
        launch.prepare(lambda x: x)


# Tiers


def test_a_tier_that_fails_its_self_test_is_not_used(cuda, monkeypatch, caplog):
    monkeypatch.setattr(tiers, "_verdicts", {})

    def test(device, tier):
        if tier == "packed":
            raise errors.LaunchError("it wrote something else")

    monkeypatch.setattr(tiers, "self_test", test)
    assert "packed" not in tiers.usable(0)
    assert "the packed tier is not used on device 0: it wrote something else" in caplog.text
    both = Both(cuda, kernels.add)
    for _ in range(4):
        both((8,), *tensors(3), 1000, BLOCK=128)


def test_no_tier_at_all_is_still_right(cuda, monkeypatch):
    monkeypatch.setattr(tiers, "_verdicts", {(0, tier): False for tier in PREPARED})
    both = Both(cuda, kernels.add)
    for _ in range(5):
        both((8,), *tensors(3), 1000, BLOCK=128)
    assert not both.launcher._table


def test_the_plain_tier_on_request(cuda):
    with knobs.scope({"launch.tier": "plain"}):
        both = Both(cuda, kernels.add)
        for _ in range(4):
            both((8,), *tensors(3), 1000, BLOCK=128)
    assert not both.launcher._variants


def test_importing_and_preparing_load_no_triton():
    code = (
        "import sys; from tileloom import launch\n"
        "class Kernel:\n"
        "    run = None\n"
        "    def __getitem__(self, grid): return print\n"
        "launch.prepare(Kernel())\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_the_same_on_other_tritons(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not installed; `make setup` does")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
               "-W", "ignore", "-m", "not full", __file__]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{folder}:src:."}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
