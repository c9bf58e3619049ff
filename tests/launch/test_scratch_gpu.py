"""Kernels that need scratch memory, on a real GPU: descriptors that they make by themselves."""

import threading

import pytest
import torch
from tests.launch import launch_kernels as kernels

from tileloom import errors, knobs, launch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.fixture
def allocated():
    """Sizes that Triton's allocator was asked for; it gives what PyTorch does."""
    from triton.runtime import _allocation

    sizes = []

    def allocate(size, alignment, stream):
        sizes.append(size)
        # Full of ones: a kernel that does not write its descriptors there would not find them.
        return torch.full((size,), -1, dtype=torch.int8, device=torch.cuda.current_device())

    before = _allocation._allocator.set(allocate)
    yield sizes
    _allocation._allocator.reset(before)


@pytest.mark.parametrize("tier", ["packed", "seam", "plain"])
@pytest.mark.parametrize("kind", ["own", "mixed"])
def test_each_tier_copies_what_triton_copies(tier, kind, allocated):
    """Descriptors made on the device lie in memory that each launch is given."""
    rows, columns = 96, 64
    kernel = kernels.copy_by_own if kind == "own" else kernels.copy_to_own
    make = lambda t: t if kind == "own" else kernels.triton_descriptor(t, [32, 32])  # noqa: E731
    with knobs.scope({"launch.tier": tier}):
        launcher = launch.prepare(kernel)
        for step in range(6):
            source = torch.randn((rows, columns), device=torch.cuda.current_device())
            expected, found = torch.full((2, rows, columns), float("nan"), device=source.device)
            # The second grid leaves rows out.
            for grid in ((3, 2), (2, 2)):
                kernel[grid](make(source), expected, rows, columns, BLOCK=32)
                launcher[grid](make(source), found, rows, columns, BLOCK=32)
                assert allocated[-1] == allocated[-2]
                assert torch.equal(found[: grid[0] * 32], source[: grid[0] * 32]), step
                assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), step
    assert len(launcher._table) == (0 if tier == "plain" else 2)


def test_on_streams_and_in_threads(allocated):
    """Each thread on a stream of its own, to whose launches alone its memory goes again."""
    launcher = launch.prepare(kernels.copy_by_own)
    device = torch.cuda.current_device()
    wrong = []
    start = threading.Barrier(4)

    def work(seed):
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for step in range(100):
                source = torch.full((96, 64), float(seed * 1000 + step), device=device)
                found = torch.zeros_like(source)
                launcher[(3, 2)](source, found, 96, 64, BLOCK=32)
                spoiler = torch.full((6 * 256,), -1, dtype=torch.int8, device=device)
                if not torch.equal(found, source) or not spoiler.eq(-1).all():
                    wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("warm", [0, 4])
def test_in_a_graph(warm, allocated):
    source = torch.randn((96, 64), device=torch.cuda.current_device())
    found = torch.zeros_like(source)
    kernels.copy_by_own[(3, 2)](source, found, 96, 64, BLOCK=32)
    launcher = launch.prepare(kernels.copy_by_own)
    for _ in range(warm):
        launcher[(3, 2)](source, found, 96, 64, BLOCK=32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launcher[(3, 2)](source, found, 96, 64, BLOCK=32)
    for _ in range(3):
        source.normal_()
        found.zero_()
        spoilers = torch.full((8, 6 * 256), -1, dtype=torch.int8, device=source.device)
        graph.replay()
        assert torch.equal(found, source)
        assert spoilers.eq(-1).all()


def test_no_allocator_is_a_sentence(allocated):
    from triton.runtime import _allocation

    source = torch.randn((96, 64), device=torch.cuda.current_device())
    launcher = launch.prepare(kernels.copy_by_own)
    triton.set_allocator(_allocation.NullAllocator())
    with pytest.raises(errors.LaunchError, match="'copy_by_own' needs scratch memory, and no"):
        launcher[(3, 2)](source, source, 96, 64, BLOCK=32)
