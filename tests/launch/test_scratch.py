"""Kernels that need scratch memory, over Triton's real launchers and a fake libcuda."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest
import torch
from tests.launch import fake_cuda
from tests.launch.fake_cuda import Both, DeviceTensor, Strided, tensors

from tileloom import errors, knobs, launch
from tileloom.launch import scratch, tiers

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("tests.launch.launch_kernels")
SIZE = 256  # two tensor maps
NONE_SET = (
    "launch: 'copy_by_own' needs scratch memory, and no allocator is set in this thread. Try: "
    "triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, "
    "device=the GPU))."
)


@pytest.fixture(scope="module")
def cuda():
    with fake_cuda.installed() as fake:
        yield fake


@pytest.fixture
def asked(cuda):
    """What the allocator is asked for; one buffer for each size, at an address of its own."""
    found = []
    buffers = {}

    def allocate(size, alignment, stream):
        found.append((size, alignment, stream))
        return buffers.setdefault(size, DeviceTensor(torch.int8))

    with allocator(allocate):
        yield found


@contextlib.contextmanager
def allocator(function):
    from triton.runtime import _allocation

    before = _allocation._allocator.set(function or _allocation.NullAllocator())
    try:
        yield
    finally:
        _allocation._allocator.reset(before)


@pytest.fixture(params=["packed", "direct", "seam"])
def tier(request, cuda):
    if request.param == "direct" and not hasattr(cuda.driver.utils, "launch"):
        pytest.skip("this Triton has no generic launcher")
    with knobs.scope({"launch.tier": request.param}):
        yield request.param


def grids():
    return [(1,), (8,), (3, 2), (2, 3, 4), (3, 2), (8,), (1,)] * 3


def test_every_tier_gives_the_driver_what_triton_gives(tier, cuda, asked):
    both = Both(cuda, kernels.copy_by_own)
    for grid in grids():
        both(grid, *tensors(2), 96, 64, BLOCK=32)
    blocks = {(1,): 1, (8,): 8, (3, 2): 6, (2, 3, 4): 24}
    # By Triton, twice the first time, and by us: the same sizes, alignments and streams.
    assert [size for size, _, _ in asked[1:]] == [
        blocks[grid] * SIZE for grid in grids() for _ in range(2)
    ]
    assert {(alignment, stream) for _, alignment, stream in asked} == {(128, 0)}
    assert len(both.launcher._table) == (0 if tier == "direct" else 4)


def test_the_memory_of_a_cluster(cuda, asked):
    both = Both(cuda, kernels.copy_by_own, num_ctas=2)
    for _ in range(3):
        both((3, 2), *tensors(2), 96, 64, BLOCK=32)
    assert {size for size, _, _ in asked} == {6 * 2 * SIZE}
    assert both.launcher._table


def test_with_a_descriptor_among_the_arguments(tier, cuda, asked):
    both = Both(cuda, kernels.copy_to_own)
    for _ in range(4):
        source = kernels.triton_descriptor(Strided(torch.float32, (96, 64)), [32, 32])
        both((3, 2), source, DeviceTensor(), 96, 64, BLOCK=32)
    assert {size for size, _, _ in asked} == {6 * SIZE // 2}


def test_prepared_launches_leave_tritons_launcher(cuda, asked, monkeypatch):
    """On 3.6 that one is compiled by gcc."""
    launcher = launch.prepare(kernels.copy_by_own)
    args = (*tensors(2), 96, 64)
    bound = launcher.bind((3, 2), *args, BLOCK=32)
    for _ in range(4):
        compiled = launcher[(3, 2)](*args, BLOCK=32)
        bound.launch(*args[:2])
    monkeypatch.setattr(compiled, "_run", None)
    before = cuda.count(), len(asked)
    for _ in range(3):
        launcher[(3, 2)](*args, BLOCK=32)
        bound.launch(*args[:2])
    assert (cuda.count(), len(asked)) == (before[0] + 6, before[1] + 6)


def test_a_grid_given_in_each_launch(cuda, asked):
    variant = variant_of(cuda, None)
    entry = variant.entry(None, [tiers.ADDRESS, tiers.ADDRESS, tiers.NUMBER, 64, 32])
    del asked[:]
    for grid in ((1, 1, 1), (5, 1, 1), (3, 2, 7)):
        entry(*grid, 0x5EA, 4096, 8192, 96)
        assert cuda.last().grid == grid
        assert cuda.last().stream == 0x5EA
    assert asked == [(blocks * SIZE, 128, 0x5EA) for blocks in (1, 5, 42)]
    assert len({cuda.last(back).values for back in (1, 2, 3)}) == 3


def variant_of(cuda, allocate):
    compiled = kernels.copy_by_own[(1,)](*tensors(2), 96, 64, BLOCK=32)
    cuda.define(compiled)
    return tiers.Variant(compiled, kernels.copy_by_own, 0, allocate)


@pytest.mark.parametrize("tier", ["packed", "seam"])
def test_an_allocator_of_its_own_goes_before_that_of_triton(tier, cuda, asked):
    mine = []

    def allocate(size, alignment, stream):
        mine.append((size, stream))
        return DeviceTensor()

    variant = variant_of(cuda, allocate)
    forms = [tiers.ADDRESS, tiers.ADDRESS, tiers.NUMBER, 64, 32]
    del asked[:]
    with knobs.scope({"launch.tier": tier}):
        variant.entry((3, 2, 1), forms)(7, 4096, 8192, 96)
        variant.entry(None, forms)(2, 1, 1, 8, 4096, 8192, 96)
        variant.launch((4, 1, 1), 9, [*tensors(2), 96, 64, 32])
    assert mine == [(6 * SIZE, 7), (2 * SIZE, 8), (4 * SIZE, 9)]
    assert not asked
    variant_of(cuda, None).launch((1, 1, 1), 0, [*tensors(2), 96, 64, 32])
    assert asked, "that of Triton is there again"


def test_a_kernel_that_needs_none_asks_nobody(tier, cuda, asked):
    both = Both(cuda, kernels.add)
    for _ in range(4):
        both((8,), *tensors(3), 1000, BLOCK=128)
    assert not asked


class Buffer:
    """Memory that says when it is let go."""

    def __init__(self, ends, cuda):
        self.ends, self.cuda = ends, cuda

    def data_ptr(self):
        return 0x7F00CAFE0000

    def __del__(self):
        self.ends.append(self.cuda.count())


def test_the_memory_is_held_until_the_launch_is_queued_and_no_longer(tier, cuda):
    ends = []
    with allocator(lambda size, alignment, stream: Buffer(ends, cuda)):
        launcher = launch.prepare(kernels.copy_by_own)
        for _ in range(5):
            before = cuda.count()
            launcher[(3, 2)](*tensors(2), 96, 64, BLOCK=32)
            assert (ends.pop(), ends) == (before + 1, [])


def test_the_stream_is_that_of_the_launch(tier, cuda, asked, monkeypatch):
    launcher = launch.prepare(kernels.copy_by_own)
    for step in range(5):
        monkeypatch.setattr(cuda, "stream", 0x1000 + step)
        launcher[(3, 2)](*tensors(2), 96, 64, BLOCK=32)
        assert asked[-1][2] == cuda.last().stream == 0x1000 + step


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_no_allocator_is_a_sentence(tier, warm, cuda, asked):
    launcher = launch.prepare(kernels.copy_by_own)
    args = (*tensors(2), 96, 64)
    for _ in range(warm):
        launcher[(8,)](*args, BLOCK=32)
    before = cuda.count()
    with allocator(None), pytest.raises(errors.LaunchError, match=f"^{re.escape(NONE_SET)}$"):
        launcher[(8,)](*args, BLOCK=32)
    assert cuda.count() == before
    launcher[(8,)](*args, BLOCK=32)
    assert cuda.count() == before + 1


def test_each_thread_has_an_allocator_of_its_own(cuda, asked):
    """It is a context variable: a thread that set none is told so; no thread has another's."""
    launcher = launch.prepare(kernels.copy_by_own)
    for _ in range(4):
        launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)
    found, start = {}, threading.Barrier(8)

    def work(number):
        sizes = []
        start.wait()
        if number:
            triton.set_allocator(lambda *asked: sizes.append(asked) or 4096 * number)
        try:
            for step in range(50):
                launcher[(step % 8 + 1,)](*tensors(2), 96, 64, BLOCK=32)
            found[number] = [size // SIZE for size, _, _ in sizes]
        except errors.LaunchError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop(0) == NONE_SET
    assert found == {n: [step % 8 + 1 for step in range(50)] for n in range(1, 8)}


@pytest.mark.parametrize(
    ("buffer", "shown"),
    [
        (torch.empty(8), "Tensor on cpu"),
        (torch.empty(8, device="meta"), "Tensor on meta"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
    ],
)
def test_memory_that_is_none_is_a_sentence(buffer, shown, cuda, asked):
    launcher = launch.prepare(kernels.copy_by_own)
    for _ in range(3):
        launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)
    before = cuda.count()
    text = (
        "launch: 'copy_by_own' needs scratch memory on its GPU, and the allocator that "
        f"triton.set_allocator was given returns a {shown}. Try: one that returns a tensor on the "
        "GPU."
    )
    with (
        allocator(lambda size, alignment, stream: buffer),
        pytest.raises(errors.LaunchError, match=f"^{re.escape(text)}$"),
    ):
        launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)
    assert cuda.count() == before


def test_an_allocator_that_fails_fails_the_launch(tier, cuda, asked):
    launcher = launch.prepare(kernels.copy_by_own)
    for _ in range(3):
        launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)

    def fail(size, alignment, stream):
        raise torch.cuda.OutOfMemoryError(f"{size} bytes are too many")

    before = cuda.count()
    with allocator(fail), pytest.raises(torch.cuda.OutOfMemoryError, match="2048 bytes are"):
        launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)
    assert cuda.count() == before
    launcher[(8,)](*tensors(2), 96, 64, BLOCK=32)
    assert cuda.count() == before + 1


def test_a_kernel_for_the_profiler_stays_with_triton(cuda, asked):
    variant = variant_of(cuda, None)
    metadata = variant.compiled.metadata._replace(profile_scratch_size=64)
    variant.compiled.metadata, before = metadata, variant.compiled.metadata
    try:
        other = tiers.Variant(variant.compiled, kernels.copy_by_own, 0)
    finally:
        variant.compiled.metadata = before
    with pytest.raises(tiers.Unsupported, match="for Triton's profiler"):
        other.entry((1, 1, 1), [4096, 8192, 96, 64, 32])


def test_scratch_memory_is_the_last_parameter_but_one(cuda, asked):
    """The code reads its address there, in every version."""
    compiled = kernels.copy_by_own[(1,)](*tensors(2), 96, 64, BLOCK=32)
    ptx = compiled.asm["ptx"]
    count = len(re.findall(r"^\s*\.param", ptx, re.MULTILINE))
    read = {int(n) for n in re.findall(r"ld\.param\.\w+\s+%\w+, \[\w+_param_(\d+)\]", ptx)}
    assert count == 6  # two tensors, two sizes, scratch memory, the profiler's
    assert read == {0, 1, 2, 3, 4}


def test_of_torch_allocates_in_the_order_of_the_stream(monkeypatch):
    """In the pool of the launch's stream, which need not be the current one."""
    on, made = [None], []

    @contextlib.contextmanager
    def stream(given):
        on.append(given)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (number, device))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: made.append((size, on[-1])))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    allocate = scratch.of_torch(1)
    allocate(512, 128, 7)
    allocate(256, 128, 0)
    assert made == [(512, None), (256, (0, torch.device("cuda", 1)))]
    assert on == [None]
