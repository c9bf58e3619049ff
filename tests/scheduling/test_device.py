"""The device's schedule equals the host's, integer for integer."""

import random

import pytest
import torch
from tests.scheduling.cases import device_arguments, expected, random_params, rows_of, works_of
from tests.scheduling.kernels import dump_async_kernel, dump_dynamic_kernel, dump_static_kernel

from tileloom import emulator
from tileloom.scheduling import TileSchedulerParams


def _dump(params, grid, device):
    steps = -(-params.blocks_per_problem // grid) + 1
    return torch.full((grid, steps, 8), -1, dtype=torch.int32, device=device), steps


def _check_static(params, grid, device):
    dump, steps = _dump(params, grid, device)
    table, rest = device_arguments(params, device)
    dump_static_kernel[(grid,)](dump, steps, table, *rest, num_warps=4)
    for cta in range(grid):
        works = works_of(params, grid, cta)
        lines = [expected(w, params, is_last=w is works[-1]) for w in works]
        assert rows_of(dump, cta) == lines, (params, grid, cta)


def _check_async(params, grid, device, flags, epoch, timeout_us=10**6):
    dump, steps = _dump(params, grid, device)
    table, rest = device_arguments(params, device)
    late = torch.zeros(params.chunks, dtype=torch.int32, device=device)
    dump_async_kernel[(grid,)](
        dump, late, steps, table, flags, epoch, timeout_us, *rest, num_warps=4
    )
    for cta in range(grid):
        works = works_of(params, grid, cta)
        lines = [expected(w, params, is_last=w is works[-1]) for w in works]
        assert rows_of(dump, cta) == lines, (params, grid, cta)
    return late.tolist()


def _check_dynamic(params, grid, device):
    dump = torch.full(
        (grid, params.blocks_per_problem + 1, 8), -1, dtype=torch.int32, device=device
    )
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    table, rest = device_arguments(params, device)
    steps = dump.shape[1]
    dump_dynamic_kernel[(grid,)](dump, steps, table, counter, *rest, num_warps=4)
    whole = {work.linear: work for work in works_of(params, 1, 0)}
    seen = []
    for cta in range(grid):
        lines = rows_of(dump, cta)
        assert [line[0] for line in lines] == sorted(line[0] for line in lines)
        for line in lines:
            is_last = line[0] + 1 == params.blocks_per_problem
            assert line == expected(whole[line[0]], params, is_last=is_last)
        seen += [line[0] for line in lines]
    assert sorted(seen) == sorted(whole)


# A few shapes of tile so that few kernels are compiled; everything else is run-time data.
def _few(params: TileSchedulerParams) -> TileSchedulerParams:
    return TileSchedulerParams.to_underlying_arguments(
        *(params.m, params.n, params.k, params.l),
        block=(16, params.block_n, 8),
        raster_order="along_m" if params.m % 2 else "along_n",
        max_swizzle_size=3,
        chunk_offsets=params.chunk_offsets,
        chunk_pivot=params.chunk_pivot,
    )


def _cases(count):
    generator = random.Random(5)
    found = [_few(random_params(generator, most_tiles=60)) for _ in range(count)]
    sizes = [generator.choice([1, 2, 5]) for _ in found]
    return [(p, g) for p, g in zip(found, sizes) if p.blocks_per_problem]


@pytest.mark.timeout(300)
def test_static_and_async_schedules_on_the_emulator_equal_the_hosts():
    with emulator.run(schedule="random", seed=1):
        for params, grid in _cases(16):
            _check_static(params, grid, "cpu")
            flags = torch.full((params.chunks,), 7, dtype=torch.int32)
            assert not any(_check_async(params, grid, "cpu", flags, 7))


@pytest.mark.timeout(300)
def test_a_dynamic_schedule_on_the_emulator_deals_each_tile_once():
    for schedule in ("late", "eager", "random"):
        with emulator.run(schedule=schedule):
            for params, grid in _cases(5):
                _check_dynamic(params, grid, "cpu")


def test_no_tile_at_all():
    params = TileSchedulerParams.to_underlying_arguments(0, 64, 8, block=(16, 64, 8))
    with emulator.run():
        _check_static(params, 3, "cpu")


def test_programs_beyond_the_tiles_do_nothing():
    params = TileSchedulerParams.to_underlying_arguments(16, 64, 8, block=(16, 64, 8))
    with emulator.run():
        _check_static(params, 7, "cpu")


def test_a_flag_that_never_comes_is_said_and_the_kernel_ends():
    params = TileSchedulerParams.to_underlying_arguments(
        96, 64, 8, block=(16, 64, 8), chunk_offsets=(0, 32, 64, 96), chunk_pivot=1
    )
    flags = torch.tensor([3, 2, 3], dtype=torch.int32)  # the middle one is an epoch behind
    with emulator.run():
        late = _check_async(params, 2, "cpu", flags, 3, timeout_us=50)
    assert late[0] == late[2] == 0
    assert late[1] > 0


def test_epochs_wrap_around():
    params = TileSchedulerParams.to_underlying_arguments(
        32, 64, 8, block=(16, 64, 8), chunk_offsets=(0, 16, 32)
    )
    flags = torch.tensor([-(2**31), -(2**31) + 1], dtype=torch.int32)
    with emulator.run():
        assert not any(_check_async(params, 1, "cpu", flags, 2**31 - 1, timeout_us=50))


@pytest.mark.gpu
def test_schedules_on_a_gpu_equal_the_hosts():
    for params, _ in _cases(60):
        for grid in (1, 7, 132):
            _check_static(params, grid, "cuda")
            flags = torch.full((params.chunks,), 7, dtype=torch.int32, device="cuda")
            assert not any(_check_async(params, grid, "cuda", flags, 7))
            _check_dynamic(params, grid, "cuda")
