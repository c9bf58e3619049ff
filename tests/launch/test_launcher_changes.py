"""The launcher when something changes: hooks, knobs, forks, threads, memory."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import weakref

import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import DeviceTensor, tensors, warm

from tileloom import launch
from tileloom import target as targets
from tileloom.launch import launcher as launcher_module
from tileloom.launch import tiers, watch

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake


def test_hooks_see_launches(cuda):
    from triton import knobs as triton_knobs

    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    warm(launcher, args, BLOCK=128)
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
    warm(launcher, args, BLOCK=128)
    seen = []
    monkeypatch.setattr(triton_knobs.runtime, "launch_enter_hook", seen.append)
    launcher[(8,)](*args, BLOCK=128)
    assert len(seen) == 1


def test_hooks_before_the_launch(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    warm(launcher, args, BLOCK=128)
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
    warm(launcher, args, BLOCK=128)
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
    warm(launcher, args, BLOCK=128)
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


def test_a_first_launch_inside_a_capture_prepares_later(cuda, monkeypatch):
    """The self-test of the tiers cannot run there, so nothing is decided."""
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    monkeypatch.setattr(tiers, "_verdicts", {})
    monkeypatch.setattr(tiers, "self_test", lambda device, tier: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(4):
        launcher[(8,)](*args, BLOCK=128)
        bound.launch(*args[:3])
    assert not launcher._table
    assert not tiers._verdicts
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        bound.launch(*args[:3])
    warm(launcher, args, BLOCK=128)
    assert bound.launch not in (bound._first, bound._again)


def test_a_second_launch_inside_a_capture_tests_no_tier(cuda, monkeypatch):
    """The kernel is known from a launch before; a self-test now would break the capture."""
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    monkeypatch.setattr(tiers, "_verdicts", {})
    monkeypatch.setattr(tiers, "self_test", lambda device, tier: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    bound.launch(*args[:3])
    assert launcher._variants
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        bound.launch(*args[:3])
        launcher[(8,)](*args, BLOCK=128)
    assert not tiers._verdicts
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    bound.launch(*args[:3])
    assert tiers._verdicts
    assert bound.launch not in (bound._first, bound._again)


def test_refresh_forgets(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    bound = launcher.bind((8,), *args, BLOCK=128)
    for _ in range(3):
        bound.launch(*args[:3])
    warm(launcher, args, BLOCK=128)
    watch.refresh()
    assert not launcher._table
    assert not launcher._variants
    assert bound.launch == bound._first
    warm(launcher, args, BLOCK=128)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_prepares_anew(cuda):
    launcher, args = launch.prepare(kernels.add), (*tensors(3), 1000)
    warm(launcher, args, BLOCK=128)
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
    warm(launcher, args, BLOCK=128)
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
    warm(launcher, args, BLOCK=32)
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
