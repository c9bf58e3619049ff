"""The launcher on a real GPU: memory written, graphs, threads, processes, hooks, descriptors."""

import gc
import logging
import multiprocessing
import os
import threading

import pytest
import torch
from tests.launch import launch_kernels as kernels

from tileloom import errors, knobs, launch
from tileloom.launch import tiers

pytestmark = pytest.mark.gpu

TIERS = ("packed", "direct", "seam", "plain")
SIZE, BLOCK = 1000, 128
GRID = (8,)


@pytest.fixture
def xyz():
    generator = torch.Generator(device=torch.cuda.current_device()).manual_seed(1)
    x, y = torch.randn((2, SIZE), device=torch.cuda.current_device(), generator=generator)
    return x, y, torch.zeros_like(x)


def _tier_there(tier):
    device = torch.cuda.current_device()
    return tier == "plain" or tier in tiers.usable(device)


def _warm(launcher, *args, **named):
    for _ in range(4):
        launcher[GRID](*args, **named)


def test_the_packed_tier_passes_its_self_test():
    assert "packed" in tiers.usable(torch.cuda.current_device())


@pytest.mark.parametrize("tier", TIERS)
def test_each_tier_writes_what_triton_writes(tier, xyz):
    x, y, out = xyz
    if not _tier_there(tier):
        pytest.skip(f"this Triton has no {tier} tier")
    with knobs.scope({"launch.tier": tier}):
        launcher = launch.prepare(kernels.add)
        for step in range(5):
            out.zero_()
            compiled = launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
            assert torch.equal(out, x + y), step
            # The same with other tensors, of the same kind and of another alignment.
            for shift in (0, 1, 4):
                a, b = x[shift:].clone() if shift == 4 else x[shift:], y[shift:]
                target = torch.zeros_like(out)
                launcher[GRID](a, b, target, SIZE - shift, BLOCK=BLOCK)
                assert torch.equal(target[: SIZE - shift], a + b)
                assert target[SIZE - shift :].eq(0).all()
        assert compiled.asm["cubin"]


@pytest.mark.parametrize("tier", ["packed", "seam"])
def test_every_kind_of_argument(tier):
    device = torch.cuda.current_device()
    source = torch.randn(32, device=device)
    calls = [
        (small, large, number, truth, nothing, wide)
        for small in (1, 16, -7)
        for large in (2**40, 17)
        for number in (0.5, float("inf"))
        for truth in (True, False)
        for nothing in (None, 3)
        for wide in (1, 2**33)
    ]
    with knobs.scope({"launch.tier": tier}):
        launcher = launch.prepare(kernels.mixed)
        for _ in range(3):
            for call in calls:
                expected, found = torch.zeros((2, 32), device=device)
                kernels.mixed[(1,)](expected, source, *call)
                launcher[(1,)](found, source, *call)
                assert torch.equal(expected, found), call


@pytest.mark.parametrize("tier", ["packed", "direct", "seam"])
@pytest.mark.parametrize("gluon", [False, True])
def test_descriptors(tier, gluon):
    if not _tier_there(tier):
        pytest.skip(f"this Triton has no {tier} tier")
    make = kernels.gluon_descriptor if gluon else kernels.triton_descriptor
    kernel = kernels.gluon_copy_tile if gluon else kernels.copy_tile
    with knobs.scope({"launch.tier": tier}):
        launcher = launch.prepare(kernel)
        for step in range(6):
            source = torch.randn((256, 64), device=torch.cuda.current_device()).half()
            target = torch.zeros_like(source)
            launcher[(8,)](make(source, [32, 64]), make(target, [32, 64]), 3, BLOCK=32)
            assert torch.equal(target, source + 3), step
        # One descriptor, changed in place between launches.
        descriptor = make(target, [32, 64])
        for rows in (256, 128):
            target.zero_()
            descriptor.shape[0] = rows
            for _ in range(4):
                launcher[(8,)](make(source, [32, 64]), descriptor, 3, BLOCK=32)
            assert torch.equal(target[:rows], (source + 3)[:rows])
            assert target[rows:].eq(0).all()


def test_a_bound_launch(xyz):
    x, y, out = xyz
    bound = launch.prepare(kernels.add).bind(GRID, x, y, out, SIZE, BLOCK=BLOCK)
    for _ in range(5):
        a, b = torch.randn((2, SIZE), device=x.device)
        bound.launch(a, b, out)
        assert torch.equal(out, a + b)


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_graph_capture_of_first_and_later_launches(warm, xyz):
    x, y, out = xyz
    kernels.add[GRID](x, y, out, SIZE, BLOCK=BLOCK)  # compiled: no compiler runs inside a capture
    launcher = launch.prepare(kernels.add)
    for _ in range(warm):
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    x.normal_()
    out.zero_()
    graph.replay()
    assert torch.equal(out, x + y)
    out.zero_()
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    assert torch.equal(out, x + y)


def test_a_graph_outlives_its_launcher(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    del launcher
    gc.collect()
    out.zero_()
    graph.replay()
    assert torch.equal(out, x + y)


def test_the_module_lives_as_long_as_the_launcher(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    kernels.add.device_caches.clear()
    gc.collect()
    out.zero_()
    launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    assert torch.equal(out, x + y)


def test_streams(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    out.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the launch is behind the sleep, on the side stream"
    side.synchronize()
    assert torch.equal(out, x + y)


def test_eight_threads_on_one_kernel(xyz):
    x, _y, _ = xyz
    launcher = launch.prepare(kernels.add)
    wrong = []
    start = threading.Barrier(8)

    def work(seed):
        device = x.device
        stream = torch.cuda.Stream(device)
        start.wait()
        with torch.cuda.stream(stream):
            for step in range(300):
                size = SIZE - (seed + step) % 5
                a = torch.full((SIZE,), float(seed * 1000 + step), device=device)
                out = torch.zeros(SIZE, device=device)
                launcher[GRID](a, a, out, size, BLOCK=BLOCK)
                stream.synchronize()
                if not torch.equal(out[:size], 2 * a[:size]) or out[size:].any():
                    wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_without_a_context(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    out.zero_()
    torch.cuda.synchronize()
    failed = []

    def work():
        try:
            launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    torch.cuda.synchronize()
    assert torch.equal(out, x + y)


def _spawned(queue):
    device = torch.cuda.current_device()
    x = torch.randn(SIZE, device=device)
    out = torch.zeros_like(x)
    launcher = launch.prepare(kernels.add)
    for _ in range(4):
        launcher[GRID](x, x, out, SIZE, BLOCK=BLOCK)
    queue.put(bool(torch.equal(out, 2 * x)))


def test_spawn(xyz):
    x, y, out = xyz
    _warm(launch.prepare(kernels.add), x, y, out, SIZE, BLOCK=BLOCK)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_spawned, args=(queue,))
    child.start()
    assert queue.get(timeout=120)
    child.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_says_what_torch_says(xyz):
    """CUDA does not survive a fork: the child must not launch by what the parent prepared."""
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
            text = f"launched {launcher._table}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "launched" not in text
    assert "fork" in text or "CUDA" in text
    launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    assert torch.equal(out, x + y)


def test_hooks_see_launches(xyz):
    from triton import knobs as triton_knobs

    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    seen = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton_knobs.runtime.launch_enter_hook.add(hook)
    try:
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    finally:
        triton_knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["add"]
    launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
    assert seen == ["add"]


def test_the_profiler_of_torch_sees_launches(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(3):
            launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if event.key == "add") == 3


def test_ten_thousand_shapes_keep_no_memory(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for n in range(10_000):
        launcher[(n % 100 + 1,)](x, y, out, n % 997 + 2, BLOCK=BLOCK)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert len(launcher._table) <= 1024
    assert len(launcher._seen) <= 1024


def test_no_tensor_is_held():
    device = torch.cuda.current_device()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    launcher = launch.prepare(kernels.copy_tile)
    for _ in range(4):
        source, target = torch.zeros((2, 256, 64), device=device)
        make = kernels.triton_descriptor
        launcher[(8,)](make(source, [32, 64]), make(target, [32, 64]), 3, BLOCK=32)
    del source, target
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_cpu_tensor_is_refused_at_every_launch(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    for _ in range(5):
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
        with pytest.raises(errors.DeviceError, match=r"launch: y of 'add' is on cpu.* Try: y\.to"):
            launcher[GRID](x, y.cpu(), out, SIZE, BLOCK=BLOCK)


def test_pinned_memory_is_taken(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    pinned = y.cpu().pin_memory()
    for _ in range(4):
        out.zero_()
        launcher[GRID](x, pinned, out, SIZE, BLOCK=BLOCK)
        assert torch.equal(out, x + y)


def test_a_grid_that_the_driver_does_not_take_is_a_sentence(xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add)
    with pytest.raises(errors.OptionError, match=r"takes 1 to 65535"):
        launcher[(1, 70000)](x, y, out, SIZE, BLOCK=BLOCK)


def test_a_failed_self_test_is_logged_and_demotes(monkeypatch, caplog, xyz):
    x, y, out = xyz
    device = torch.cuda.current_device()
    plain = tiers._BUILDERS["packed"]

    def wrong(variant, grid, forms):
        entry = plain(variant, grid, [5 if form == -7 else form for form in forms])
        return entry

    monkeypatch.setattr(tiers, "_verdicts", {})
    monkeypatch.setitem(tiers._BUILDERS, "packed", wrong)
    with caplog.at_level(logging.WARNING, "tileloom.launch"):
        assert "packed" not in tiers.usable(device)
    assert "the packed tier is not used on device" in caplog.text
    launcher = launch.prepare(kernels.add)
    _warm(launcher, x, y, out, SIZE, BLOCK=BLOCK)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("options", [{"num_ctas": 2}, {"launch_pdl": True},
                                     {"launch_cooperative_grid": True}])  # fmt: skip
def test_clusters_programmatic_and_cooperative_launches(options, xyz):
    x, y, out = xyz
    launcher = launch.prepare(kernels.add, **options)
    for _ in range(4):
        out.zero_()
        launcher[GRID](x, y, out, SIZE, BLOCK=BLOCK)
        assert torch.equal(out, x + y)
    assert launcher._table
