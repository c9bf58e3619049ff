"""A matrix copied by TMA alone: boxes that one thread of each block loads and stores.

A block with no more boxes than stages loads them all at once, and stores each as it arrives: many
small blocks, which the hardware starts in order, copy fastest. A block with more of them goes
round: it loads a box ahead into the stage whose store, the last but one, has been read. The data
never passes through registers, and both sides use the async proxy, so no fence is needed. Boxes
reach past the edges; TMA writes zeros for what is outside and stores nothing of it. full[s]: the
thread that issued the load waits for its bytes. Bytes moved: 2 for each byte.
"""

from dataclasses import dataclass

# First, since it says what to install where the DSL is missing.
from cute_support import compile_kernel, counts, example_pointer, has_hopper, pointer

# isort: split
import cutlass
import torch
from cutlass import cute
from cutlass.experimental import cuda

from tileloom import cpasync


@dataclass(frozen=True)
class Ring:
    """A box of `rows` times `row_bytes`, how many there are, and how stores are waited for."""

    rows: int = 8
    row_bytes: int = 512
    stages: int = 4
    read: bool = True  # only until shared memory has been read, not until memory is written

    @property
    def bytes(self):
        """Shared memory of all boxes; the barriers lie behind."""
        return self.rows * self.row_bytes * self.stages


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
        # In a ring the stage of the store before last is free.
        ahead = cutlass.Int32(ring.stages - 2)
        if mine <= ring.stages:
            ahead = mine
        for i in cutlass.range(mine + ahead, unroll=1):
            if i < mine:
                stage, tile = i % ring.stages, block + i * blocks
                row, column = tile // tiles_across * ring.rows, tile % tiles_across * width
                box = boxes + stage * ring.rows * width
                cpasync.arrive_and_expect_tx(full + stage, ring.rows * ring.row_bytes)
                cpasync.tma_load(source, full + stage, box, (column, row), eviction_kind="first")
            j = i - ahead
            if j >= 0:
                stage, tile = j % ring.stages, block + j * blocks
                row, column = tile // tiles_across * ring.rows, tile % tiles_across * width
                cpasync.mbarrier_wait(full + stage, j // ring.stages & 1)
                box = boxes + stage * ring.rows * width
                cpasync.tma_store(target, box, (column, row), eviction_kind="first")
                cpasync.tma_store_arrive()
                # The next load goes into the stage that the store before this one read.
                cpasync.tma_store_wait(1, read=ring.read)
        # Shared memory must live until it has been read; the end of the kernel waits for the rest.
        cpasync.tma_store_wait(0, read=ring.read)


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


def copy(compiled, source, target, ring=Ring()):
    """Copy a matrix on the default stream; its rows lie at multiples of 16 bytes."""
    strides = source.stride(0), target.stride(0)
    assert all(s * source.itemsize % 16 == 0 for s in strides), "rows lie at multiples of 16 bytes"
    rows, columns = source.shape
    boxes = -(-rows // ring.rows) * -(-columns * source.itemsize // ring.row_bytes)
    blocks = -(-boxes // ring.stages)
    compiled(pointer(source), pointer(target), *source.shape, *strides, blocks)


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
