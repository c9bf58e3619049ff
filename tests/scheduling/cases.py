"""Schedules for the tests, and the launch of the kernels that write them down."""

import itertools
import random

import torch

from tileloom.scheduling import AsyncInputScheduler, TileSchedulerParams
from tileloom.scheduling.host import WorkTileInfo


def random_params(generator: random.Random, *, most_tiles: int = 400) -> TileSchedulerParams:
    """A random schedule: uneven and empty chunks, any pivot, raster and group."""
    while True:
        block = (generator.choice([1, 16, 64]), generator.choice([1, 32, 64]), 8)
        chunks = generator.choice([1, 1, 2, 3, 4, 5, 8, 13])
        step = generator.choice([1, 5, block[0], 3 * block[0]])
        rows = [generator.choice([0, 1, step, block[0] + 1]) for _ in range(chunks)]
        if generator.random() < 0.3:
            rows = [step] * chunks
        offsets = (0, *itertools.accumulate(rows))
        params = TileSchedulerParams.to_underlying_arguments(
            offsets[-1],
            generator.randrange(1, 9 * block[1]),
            generator.randrange(0, 40),
            1 if chunks > 1 else generator.choice([1, 1, 3]),
            block=block,
            raster_order=generator.choice(["along_m", "along_n", "heuristic"]),
            max_swizzle_size=generator.choice([1, 2, 3, 8]),
            chunk_offsets=offsets,
            chunk_pivot=generator.randrange(chunks),
        )
        if params.blocks_per_problem <= most_tiles:
            return params


def works_of(params: TileSchedulerParams, grid: int, cta: int) -> list[WorkTileInfo]:
    """What the host's static order gives to one program."""
    scheduler = AsyncInputScheduler(params, grid, cta)
    work = scheduler.initial_work_tile_info()
    found = []
    while work.is_valid_tile:
        found.append(work)
        work = scheduler.fetch_next_work()
    return found


def device_arguments(params: TileSchedulerParams, device: str) -> tuple[torch.Tensor, tuple]:
    """The table and the other arguments of a `TileOrder`."""
    table = torch.tensor(params.to_device(), dtype=torch.int32, device=device)
    scalars = (params.m, params.tiles_n, params.blocks_per_problem, params.rows_per_chunk,
               params.chunks, params.chunk_pivot)  # fmt: skip
    is_uniform = params.rows_per_chunk > 0
    choices = (params.block_m, params.swizzle_size, params.raster_order == "along_m", is_uniform)
    return table, (*scalars, *choices)


def rows_of(dump: torch.Tensor, cta: int) -> list[list[int]]:
    """The lines that one program wrote."""
    return [line for line in dump[cta].tolist() if line[0] >= 0]


def expected(work: WorkTileInfo, params: TileSchedulerParams, *, is_last: bool) -> list[int]:
    """The line that a kernel writes for a tile."""
    end = params.tile_edges[work.chunk][1]
    return [work.linear, work.m_idx, work.n_idx, work.l_idx, work.chunk, work.row, end, is_last]
