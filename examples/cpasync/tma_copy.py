"""A matrix copied by TMA alone: a ring of loads and stores that one thread of each block drives.

For each tile it waits for the load, stores it, and loads a tile ahead into the stage whose store,
the last but one, has been read. The data never passes through registers, and both sides use the
async proxy, so no fence is needed. Tiles reach past the edges; TMA writes zeros for what is outside
and stores nothing of it. full[s]: the thread that issued the load waits for its bytes. Bytes moved:
2 for each byte.
"""

import cutlass
import torch
from common import compile_kernel, counts, example_pointer, has_hopper, pointer
from cutlass import cute
from cutlass.experimental import cuda

from tileloom import cpasync

ROWS, ROW_BYTES, STAGES = 32, 512, 6
AHEAD = STAGES - 2  # tiles that loads run ahead of stores
TILE_BYTES = ROWS * ROW_BYTES


@cute.kernel
def copy_kernel(
    source: cutlass.GridConstant[cuda.TensorMap],
    target: cutlass.GridConstant[cuda.TensorMap],
    tiles_across: cutlass.Int32,
    tiles: cutlass.Int32,
    dtype: cutlass.Constexpr,
):
    width = ROW_BYTES * 8 // dtype.width
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    smem = cutlass.memory.SmemAllocator()
    ring = smem.allocate_array(dtype, STAGES * ROWS * width, byte_alignment=128)
    full = smem.allocate_array(cutlass.Int64, STAGES, byte_alignment=8)

    if cute.arch.thread_idx()[0] == 0:
        cpasync.prefetch_tma_descriptor(source)
        cpasync.prefetch_tma_descriptor(target)
        for stage in cutlass.range_constexpr(STAGES):
            cpasync.mbarrier_init(full + stage, 1)
        cpasync.fence_barrier_init()
        mine = (tiles - block + blocks - 1) // blocks
        for i in cutlass.range(mine + AHEAD, unroll=1):
            if i < mine:
                stage, tile = i % STAGES, block + i * blocks
                row, column = tile // tiles_across * ROWS, tile % tiles_across * width
                cpasync.arrive_and_expect_tx(full + stage, TILE_BYTES)
                cpasync.tma_load(
                    source, full + stage, ring + stage * ROWS * width, (column, row),
                    eviction_kind="first",
                )  # fmt: skip
            j = i - AHEAD
            if j >= 0:
                stage, tile = j % STAGES, block + j * blocks
                row, column = tile // tiles_across * ROWS, tile % tiles_across * width
                cpasync.mbarrier_wait(full + stage, j // STAGES & 1)
                cpasync.tma_store(
                    target, ring + stage * ROWS * width, (column, row), eviction_kind="first"
                )
                cpasync.tma_store_arrive()
                # The next load goes into the stage that the store before this one read.
                cpasync.tma_store_wait(1, read=True)
        cpasync.tma_store_wait(0)


@cute.jit
def launch(
    source: cute.Pointer,
    target: cute.Pointer,
    rows: cutlass.Int32,
    columns: cutlass.Int32,
    source_stride: cutlass.Int64,
    target_stride: cutlass.Int64,
    blocks: cutlass.Int32,
):
    dtype = source.dtype
    width = ROW_BYTES * 8 // dtype.width
    maps = [
        cuda.create_tensor_map_tiled_from_view(
            cute.make_tensor(memory, cute.make_layout((rows, columns), stride=(stride, 1))),
            box_dims=(ROWS, width),
            stride_order=(1, 0),
        )
        for memory, stride in ((source, source_stride), (target, target_stride))
    ]
    across = cute.ceil_div(columns, width)
    tiles = across * cute.ceil_div(rows, ROWS)
    copy_kernel(maps[0], maps[1], across, tiles, dtype).launch(
        grid=(cutlass.min(tiles, blocks), 1, 1), block=(32, 1, 1)
    )


def build(dtype=torch.float16, arch="sm_90a", options=""):
    """The compiled function and its PTX; no GPU is needed."""
    any_of = example_pointer(dtype)
    numbers = [cutlass.Int32(1)] * 2 + [cutlass.Int64(1)] * 2 + [cutlass.Int32(1)]
    return compile_kernel(launch, any_of, any_of, *numbers, arch=arch, options=options)


def copy(compiled, source, target):
    """Copy a matrix on the default stream; its rows lie at multiples of 16 bytes."""
    sms = torch.cuda.get_device_properties(source.device).multi_processor_count
    strides = source.stride(0), target.stride(0)
    compiled(pointer(source), pointer(target), *source.shape, *strides, 2 * sms)


def main():
    compiled, ptx = build()
    loads = ("cp.async.bulk.tensor.2d.shared::cta.global", "cp.async.bulk.tensor.2d.global")
    print("tma_copy:", counts(ptx, *loads, "mbarrier.try_wait"))
    if not has_hopper():
        print("compiled for sm_90a; not run: no Hopper GPU here")
        return
    for rows, columns in ((1, 8), (33, 264), (1000, 3000), (16384, 16384)):
        source = torch.randn(rows, columns, device=torch.device("cuda")).half()
        target = torch.full_like(source, float("nan"))
        copy(compiled, source, target)
        print(f"{rows} x {columns}: {(source != target).sum().item()} elements differ")


if __name__ == "__main__":
    main()
