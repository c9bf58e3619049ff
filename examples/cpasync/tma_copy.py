"""A matrix copied by TMA alone: a ring of loads and stores that one thread of each block drives.

For each tile it waits for the load, stores it, and loads a tile ahead into the stage whose store,
the last but one, has been read. The data never passes through registers, and both sides use the
async proxy, so no fence is needed. Tiles reach past the edges; TMA writes zeros for what is outside
and stores nothing of it. full[s]: the thread that issued the load waits for its bytes. Bytes moved:
2 for each byte.
"""

from dataclasses import dataclass

import cutlass
import torch
from cute_support import compile_kernel, counts, example_pointer, has_hopper, pointer
from cutlass import cute
from cutlass.experimental import cuda

from tileloom import cpasync


@dataclass(frozen=True)
class Ring:
    """A box of `rows` times `row_bytes`, how many there are, and how stores are waited for."""

    rows: int = 32
    row_bytes: int = 512
    stages: int = 6
    read: bool = True  # only until shared memory has been read, not until memory is written

    @property
    def bytes(self):
        """Shared memory of all boxes; the barriers lie behind."""
        return self.rows * self.row_bytes * self.stages

    @property
    def ahead(self):
        """Tiles that loads run ahead of stores: the stage of the store before last is free."""
        return self.stages - 2


@cute.kernel
def copy_kernel(
    source: cutlass.GridConstant[cuda.TensorMap],
    target: cutlass.GridConstant[cuda.TensorMap],
    tiles_across: cutlass.Int32,
    tiles: cutlass.Int32,
    dtype: cutlass.Constexpr,
    ring: cutlass.Constexpr,
):
    width = ring.row_bytes * 8 // dtype.width
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=128)
    boxes = cute.recast_ptr(shared, dtype=dtype)
    full = cute.recast_ptr(shared + ring.bytes, dtype=cutlass.Int64)

    if cute.arch.thread_idx()[0] == 0:
        cpasync.prefetch_tma_descriptor(source)
        cpasync.prefetch_tma_descriptor(target)
        for stage in cutlass.range_constexpr(ring.stages):
            cpasync.mbarrier_init(full + stage, 1)
        cpasync.fence_barrier_init()
        mine = (tiles - block + blocks - 1) // blocks
        for i in cutlass.range(mine + ring.ahead, unroll=1):
            if i < mine:
                stage, tile = i % ring.stages, block + i * blocks
                row, column = tile // tiles_across * ring.rows, tile % tiles_across * width
                box = boxes + stage * ring.rows * width
                cpasync.arrive_and_expect_tx(full + stage, ring.rows * ring.row_bytes)
                cpasync.tma_load(source, full + stage, box, (column, row), eviction_kind="first")
            j = i - ring.ahead
            if j >= 0:
                stage, tile = j % ring.stages, block + j * blocks
                row, column = tile // tiles_across * ring.rows, tile % tiles_across * width
                cpasync.mbarrier_wait(full + stage, j // ring.stages & 1)
                box = boxes + stage * ring.rows * width
                cpasync.tma_store(target, box, (column, row), eviction_kind="first")
                cpasync.tma_store_arrive()
                # The next load goes into the stage that the store before this one read.
                cpasync.tma_store_wait(1, read=ring.read)
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
    ring: cutlass.Constexpr,
):
    dtype = source.dtype
    width = ring.row_bytes * 8 // dtype.width
    maps = [
        cuda.create_tensor_map_tiled_from_view(
            cute.make_tensor(memory, cute.make_layout((rows, columns), stride=(stride, 1))),
            box_dims=(ring.rows, width),
            stride_order=(1, 0),
            l2_promotion=cuda.TensorMapL2Promotion.l2_128b,
        )
        for memory, stride in ((source, source_stride), (target, target_stride))
    ]
    across = cute.ceil_div(columns, width)
    tiles = across * cute.ceil_div(rows, ring.rows)
    copy_kernel(maps[0], maps[1], across, tiles, dtype, ring).launch(
        grid=(cutlass.min(tiles, blocks), 1, 1),
        block=(32, 1, 1),
        smem=ring.bytes + 8 * ring.stages,
    )


def build(dtype=torch.float16, ring=Ring(), arch="sm_90a", options=""):
    """The compiled function and its PTX; no GPU is needed."""
    any_of = example_pointer(dtype)
    numbers = [cutlass.Int32(1)] * 2 + [cutlass.Int64(1)] * 2 + [cutlass.Int32(1)]
    return compile_kernel(launch, any_of, any_of, *numbers, ring, arch=arch, options=options)


def copy(compiled, source, target, blocks_per_sm=2):
    """Copy a matrix on the default stream; its rows lie at multiples of 16 bytes."""
    sms = torch.cuda.get_device_properties(source.device).multi_processor_count
    strides = source.stride(0), target.stride(0)
    assert all(s * source.itemsize % 16 == 0 for s in strides), "rows lie at multiples of 16 bytes"
    compiled(pointer(source), pointer(target), *source.shape, *strides, blocks_per_sm * sms)


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
