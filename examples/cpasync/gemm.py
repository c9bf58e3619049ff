"""C = A B^T in float16 or bfloat16: TMA loads, mbarriers, wgmma, TMA stores, one block for each SM.

A is M x K and B is N x K, both with K innermost. A block has three warpgroups: one thread of the
first loads, the other two multiply 64 x 256 of its 128 x 256 tile each, over a ring of K slices:

    full[s]    one thread loads: it expects 48 KiB, and TMA counts them down. Both multiply after.
    empty[s]   the eight multiplying warps arrive when their wgmma of stage s are done. The loader
               waits, then loads over it.

Each multiplying warpgroup stores its half alone, 64 columns at a time: registers, through stmatrix
to one of two buffers of its own, to global memory by TMA; meanwhile the loader is at the next tile.
All of it lies in shared memory as TMA's 128-byte swizzle has it: 16-byte chunk c of row r is at
c ^ (r % 8). M, N and K may end anywhere: TMA reads zeros beyond the edges and does not store there.
"""

# First, since it says what to install where the DSL is missing.
from cute_support import compile_kernel, counts, example_pointer, has_hopper, pointer

# isort: split
import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from tileloom import cpasync

TILE_M, TILE_N, TILE_K, STAGES = 128, 256, 64, 4
GROUP = 8  # rows of tiles that are worked on together, for the sake of L2
THREADS = 384
ROW_BYTES = 128  # of the swizzle: 64 elements of 16 bits, 32 of 32 bits
BUFFER_BYTES = 64 * ROW_BYTES
A_BYTES, B_BYTES = STAGES * TILE_M * TILE_K * 2, STAGES * TILE_N * TILE_K * 2
# Shared memory in this order: A, B, two buffers for each multiplying warpgroup, full, empty.
SHARED_BYTES = A_BYTES + B_BYTES + 4 * BUFFER_BYTES + 2 * STAGES * 8


@cute.jit
def tile_of(index, tiles_m, tiles_n):
    """Row and column of a tile: down a group of rows, then to the right."""
    group = index // (GROUP * tiles_n)
    height = cutlass.min(tiles_m - group * GROUP, GROUP)
    inside = index - group * GROUP * tiles_n
    return group * GROUP + inside % height, inside // height


@cute.jit
def load_tiles(a, b, smem_a, smem_b, full, empty, shape, splits):
    """The loading thread: every K slice of every tile of this block."""
    tiles_m, tiles_n, slices = shape
    blocks, stage, phase = cute.arch.grid_dim()[0], cutlass.Int32(0), cutlass.Int32(0)
    for work in cutlass.range(
        cute.arch.block_idx()[0], tiles_m * tiles_n * splits, blocks, unroll=1
    ):
        row, column = tile_of(work // splits, tiles_m, tiles_n)
        first, last = slices_of(work % splits, slices, splits)
        for k in cutlass.range(first, last, unroll=1):
            # A fresh barrier lets the wait for the phase before the first pass.
            cpasync.mbarrier_wait(empty + stage, phase ^ 1)
            cpasync.arrive_and_expect_tx(full + stage, (TILE_M + TILE_N) * TILE_K * 2)
            at_a, at_b = stage * TILE_M * TILE_K, stage * TILE_N * TILE_K
            cpasync.tma_load(a, full + stage, smem_a + at_a, (k * TILE_K, row * TILE_M))
            cpasync.tma_load(b, full + stage, smem_b + at_b, (k * TILE_K, column * TILE_N))
            stage += 1
            if stage == STAGES:
                stage, phase = cutlass.Int32(0), phase ^ 1


@cute.jit
def slices_of(part, slices, splits):
    """First and last K slice of one of `splits` parts; each has at least one slice."""
    return part * slices // splits, (part + 1) * slices // splits


@cute.jit
def multiply(mma, sums, frags_a, frags_b, half, stage, accumulate: cutlass.Constexpr):
    """One K slice: four wgmma of this warpgroup's 64 rows of A with all of B, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(TILE_K // 16):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        a, b = frags_a[None, None, k, stage * 2 + half], frags_b[None, None, k, stage]
        cute.gemm(mma, sums, a, b, sums)
    warpgroup.commit_group()


@cute.jit
def store_chunk(values, buffer, lane, warp):
    """64 columns of 64 rows from registers to a swizzled buffer, in 16 bits, by stmatrix."""
    # Matrix lane // 8 of the four: rows 8 further for the odd ones, columns 8 further from two on.
    row = warp * 16 + lane % 8 + lane // 8 % 2 * 8
    words = cute.recast_tensor(values, cutlass.Int32)
    for pair in cutlass.range_constexpr(4):
        chunk = (pair * 2 + lane // 16) ^ (row % 8)
        at = buffer + row * (ROW_BYTES // 2) + chunk * 8
        prims.stmatrix(at, [words[pair * 4 + i] for i in range(4)], prims.MMALayout.ROW)


@cute.jit
def store_chunk_float32(values, buffer, lane, warp):
    """32 columns of 64 rows from registers to a swizzled buffer, in 32 bits."""
    for half in cutlass.range_constexpr(2):
        row = warp * 16 + lane // 4 + half * 8
        for eight in cutlass.range_constexpr(4):
            chunk = (eight * 2 + lane % 4 // 2) ^ (row % 8)
            at = (buffer + row * (ROW_BYTES // 4) + chunk * 4 + lane % 2 * 2).align(8)
            pair = cute.make_rmem_tensor(2, cutlass.Float32)
            pair[0], pair[1] = values[eight * 4 + half * 2], values[eight * 4 + half * 2 + 1]
            cute.autovec_copy(pair, cute.make_tensor(at, cute.make_layout(2)))


@cute.jit
def store_half(c, sums, buffers, row, column, thread):
    """This warpgroup's 64 x 256 through its two buffers to global memory, as sum or as values."""
    dtype: cutlass.Constexpr = buffers.dtype
    width: cutlass.Constexpr = ROW_BYTES * 8 // dtype.width
    lane, warp, ident = thread % 32, thread % 128 // 32, thread // 128
    for chunk in cutlass.range_constexpr(TILE_N // width):
        buffer = buffers + chunk % 2 * 64 * width
        # The store that used this buffer, the last but one, has read it.
        if thread % 128 == 0:
            cpasync.tma_store_wait(1, read=True)
        cute.arch.barrier(barrier_id=ident, number_of_threads=128)
        values = cute.make_rmem_tensor(width // 2, dtype)
        for i in cutlass.range_constexpr(width // 2):
            values[i] = sums[chunk * (width // 2) + i].to(dtype)
        if cutlass.const_expr(dtype.width == 16):
            store_chunk(values, buffer, lane, warp)
        else:
            store_chunk_float32(values, buffer, lane, warp)
        cpasync.fence_proxy_async()
        cute.arch.barrier(barrier_id=ident, number_of_threads=128)
        if thread % 128 == 0:
            if cutlass.const_expr(dtype.width == 16):
                cpasync.tma_store(c, buffer, (column + chunk * width, row))
            else:
                cpasync.tma_reduce(c, buffer, (column + chunk * width, row))
            cpasync.tma_store_arrive()


@cute.jit
def multiply_tiles(mma, c, swizzled, buffers, full, empty, shape, splits):
    """A multiplying warpgroup: its half of every tile of this block."""
    smem_a, smem_b = swizzled
    tiles_m, tiles_n, slices = shape
    thread = cute.arch.thread_idx()[0]
    half = thread // 128 - 1
    lanes = mma.get_slice(0)
    frags_a = mma.make_fragment_A(lanes.partition_A(smem_a))
    frags_b = mma.make_fragment_B(lanes.partition_B(smem_b))
    sums = cute.make_rmem_tensor(mma.partition_shape_C((64, TILE_N)), cutlass.Float32)
    mine = buffers + half * 2 * BUFFER_BYTES * 8 // buffers.dtype.width
    blocks, stage, phase = cute.arch.grid_dim()[0], cutlass.Int32(0), cutlass.Int32(0)
    for work in cutlass.range(
        cute.arch.block_idx()[0], tiles_m * tiles_n * splits, blocks, unroll=1
    ):
        row, column = tile_of(work // splits, tiles_m, tiles_n)
        first, last = slices_of(work % splits, slices, splits)
        cpasync.mbarrier_wait(full + stage, phase)
        multiply(mma, sums, frags_a, frags_b, half, stage, False)
        before = stage
        for _ in cutlass.range(first + 1, last, unroll=1):
            stage += 1
            if stage == STAGES:
                stage, phase = cutlass.Int32(0), phase ^ 1
            cpasync.mbarrier_wait(full + stage, phase)
            multiply(mma, sums, frags_a, frags_b, half, stage, True)
            # With one group of wgmma in flight, the slice before is done.
            warpgroup.wait_group(1)
            if thread % 32 == 0:
                cpasync.mbarrier_arrive(empty + before)
            before = stage
        warpgroup.wait_group(0)
        if thread % 32 == 0:
            cpasync.mbarrier_arrive(empty + before)
        stage += 1
        if stage == STAGES:
            stage, phase = cutlass.Int32(0), phase ^ 1
        store_half(c, sums, mine, row * TILE_M + half * 64, column * TILE_N, thread)


@cute.kernel
def gemm_kernel(
    a: cutlass.GridConstant[cuda.TensorMap],
    b: cutlass.GridConstant[cuda.TensorMap],
    c: cutlass.GridConstant[cuda.TensorMap],
    tiles_m: cutlass.Int32,
    tiles_n: cutlass.Int32,
    slices: cutlass.Int32,
    splits: cutlass.Int32,
):
    shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
    smem_a = cute.recast_ptr(shared, dtype=a.dtype)
    smem_b = cute.recast_ptr(shared + A_BYTES, dtype=b.dtype)
    buffers = cute.recast_ptr(shared + A_BYTES + B_BYTES, dtype=c.dtype)
    full = cute.recast_ptr(shared + A_BYTES + B_BYTES + 4 * BUFFER_BYTES, dtype=cutlass.Int64)
    empty = full + STAGES
    thread = cute.arch.thread_idx()[0]
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cpasync.mbarrier_init(full + stage, 1)
            cpasync.mbarrier_init(empty + stage, 8)
        cpasync.fence_barrier_init()
    cute.arch.sync_threads()

    shape = tiles_m, tiles_n, slices
    if cute.arch.make_warp_uniform(thread // 128) == 0:
        cute.arch.setmaxregister_decrease(40)
        if thread == 0:
            cpasync.prefetch_tma_descriptor(a)
            cpasync.prefetch_tma_descriptor(b)
            load_tiles(a, b, smem_a, smem_b, full, empty, shape, splits)
    else:
        cute.arch.setmaxregister_increase(232)
        # The same memory as wgmma sees it: A in stages of two halves of 64 rows.
        swizzled = []
        for memory, extent in (
            (smem_a, (64, TILE_K, 2 * STAGES)),
            (smem_b, (TILE_N, TILE_K, STAGES)),
        ):
            kind = warpgroup.SmemLayoutAtomKind.K_SW128
            atom = warpgroup.make_smem_layout_atom(kind, memory.dtype)
            layout = cute.tile_to_shape(atom, extent, order=(0, 1, 2))
            swizzled.append(cute.make_tensor(cute.recast_ptr(memory, layout.inner), layout.outer))
        operation = warpgroup.MmaF16BF16Op(
            a.dtype, cutlass.Float32, (64, TILE_N, 16), warpgroup.OperandSource.SMEM,
            OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        mma = cute.make_tiled_mma(cute.make_mma_atom(operation))
        multiply_tiles(mma, c, swizzled, buffers, full, empty, shape, splits)
        if thread % 128 == 0:
            cpasync.tma_store_wait(0)


def tensor_map(memory, rows, columns, stride, box):
    """A descriptor of a matrix for boxes of 128 swizzled bytes a row; coordinates (column, row)."""
    matrix = cute.make_tensor(memory, cute.make_layout((rows, columns), stride=(stride, 1)))
    return cuda.create_tensor_map_tiled_from_view(
        matrix,
        box_dims=box,
        stride_order=(1, 0),
        swizzle=cuda.TensorMapSwizzle.s128b,
        l2_promotion=cuda.TensorMapL2Promotion.l2_128b,
    )


@cute.jit
def launch(
    a: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    m: cutlass.Int32,
    n: cutlass.Int32,
    k: cutlass.Int32,
    splits: cutlass.Int32,
    blocks: cutlass.Int32,
):
    """Contiguous A, B and C; a float32 C is added to, in `splits` parts of K for each tile."""
    map_a = tensor_map(a, m, k, cutlass.Int64(k), (TILE_M, TILE_K))
    map_b = tensor_map(b, n, k, cutlass.Int64(k), (TILE_N, TILE_K))
    map_c = tensor_map(c, m, n, cutlass.Int64(n), (64, ROW_BYTES * 8 // c.dtype.width))
    tiles_m, tiles_n = cute.ceil_div(m, TILE_M), cute.ceil_div(n, TILE_N)
    slices = cute.ceil_div(k, TILE_K)
    grid = cutlass.min(tiles_m * tiles_n * splits, blocks)
    gemm_kernel(map_a, map_b, map_c, tiles_m, tiles_n, slices, splits).launch(
        grid=(grid, 1, 1), block=(THREADS, 1, 1), smem=SHARED_BYTES
    )


def build(dtype=torch.float16, out_dtype=None, arch="sm_90a", options=""):
    """The compiled function and its PTX; no GPU is needed."""
    arguments = [example_pointer(d) for d in (dtype, dtype, out_dtype or dtype)]
    numbers = [cutlass.Int32(1)] * 5
    return compile_kernel(launch, *arguments, *numbers, arch=arch, options=options)


def gemm(compiled, a, b, c, splits=1):
    """Write A B^T to C, or add it to a float32 C, on the default stream.

    All are contiguous, their rows multiples of 16 bytes, K is not 0.
    """
    (m, k), n = a.shape, b.shape[0]
    assert k * a.itemsize % 16 == 0, "rows of A and B are multiples of 16 bytes"
    assert n * c.itemsize % 16 == 0, "rows of C are multiples of 16 bytes"
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    compiled(pointer(a), pointer(b), pointer(c), m, n, k, splits, sms)
    return c


INSTRUCTIONS = (
    "cp.async.bulk.tensor.2d.shared::cta.global",
    "cp.async.bulk.tensor.2d.global",
    "cp.reduce.async.bulk.tensor.2d.global",
    "wgmma.mma_async",
    "stmatrix",
)


def main():
    compiled, ptx = build()
    print("gemm:", counts(ptx, *INSTRUCTIONS))
    if not has_hopper():
        print("compiled for sm_90a; not run: no Hopper GPU here")
        return
    device = torch.device("cuda")
    for m, n, k in ((128, 256, 64), (100, 200, 40), (1000, 1032, 1000), (4096, 4096, 4096)):
        a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
        c = gemm(compiled, a, b, torch.empty(m, n, dtype=torch.float16, device=device))
        error = (c.double() - a.double() @ b.double().T).abs().max().item()
        print(f"{m} x {n} x {k}: off by {error:.1e}")


if __name__ == "__main__":
    main()
