"""Small kernels of what only sm_90 and later have: im2col loads, bulk copies, clusters."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from tests.cpasync.probes import STALE
from tileloom import cpasync


def any_map():
    """What it says is not read: the kernel's parameter is the descriptor given at the launch."""
    return cuda.create_tensor_map_tiled(
        global_address=cutlass.Int64(0), dtype=cutlass.Uint8, global_dims=[16], global_strides=[],
        box_dims=[16],
    )  # fmt: skip


@cute.kernel
def _im2col_kernel(
    images: cutlass.GridConstant[cuda.TensorMap],
    target: cutlass.GridConstant[cuda.TensorMap],
    crd: tuple[cutlass.Int32, ...],
    offsets: tuple[cutlass.Int32, ...],
    box_bytes: cutlass.Constexpr,
):
    """Load pixels under one tap of the window, and store them as a matrix."""
    smem = cute.arch.alloc_smem(cutlass.Int8, box_bytes, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    if cute.arch.thread_idx()[0] == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.arrive_and_expect_tx(mbar, box_bytes)
        cpasync.tma_load(images, mbar, smem, crd, im2col_offsets=offsets)
        cpasync.mbarrier_wait(mbar, 0)
        cpasync.tma_store(target, smem, (0, 0))
        cpasync.tma_store_arrive()
        cpasync.tma_store_wait(0)


@cute.jit
def im2col_probe(
    crd: tuple[cutlass.Int32, ...],
    offsets: tuple[cutlass.Int32, ...],
    box_bytes: cutlass.Constexpr,
):
    _im2col_kernel(any_map(), any_map(), crd, offsets, box_bytes).launch(
        grid=(1, 1, 1), block=(32, 1, 1)
    )


@cute.kernel
def _bulk_kernel(
    source: cute.Pointer, target: cute.Pointer, size: cutlass.Int32, policy: cutlass.Constexpr
):
    """Load `size` bytes, of 4 KiB at most, and store them."""
    smem = cute.arch.alloc_smem(cutlass.Int8, 4096, alignment=16)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    if cute.arch.thread_idx()[0] == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.mbarrier_expect_tx(mbar, size)
        cpasync.bulk_load(smem, source, size, mbar, eviction_kind=policy)
        cpasync.mbarrier_arrive(mbar)
        cpasync.mbarrier_wait(mbar, 0)
        cpasync.bulk_store(target, smem, size, eviction_kind=policy)
        cpasync.tma_store_arrive()
        cpasync.tma_store_wait(0)


@cute.jit
def bulk_probe(
    source: cute.Pointer, target: cute.Pointer, size: cutlass.Int32, policy: cutlass.Constexpr
):
    _bulk_kernel(source, target, size, policy).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def _arrivals_kernel(source: cute.Pointer, out: cute.Pointer):
    """cp.async of 128 threads that arrive at a barrier that expects them, and at one that does not.

    The first half of each 32 bytes goes by the former, the second by the latter.
    """
    thread = cute.arch.thread_idx()[0]
    smem = cute.arch.alloc_smem(cutlass.Float32, 128 * 8, alignment=16)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 2, alignment=8)
    if thread == 0:
        cpasync.mbarrier_init(mbar, 128)
        cpasync.mbarrier_init(mbar + 1, 128)
    cute.arch.sync_threads()
    at = thread * 8
    cpasync.cp_async_gs(16, smem + at, source + at)
    cpasync.mbarrier_cp_async_arrive_noinc(mbar)
    cpasync.cp_async_gs(16, smem + at + 4, source + at + 4)
    cpasync.mbarrier_cp_async_arrive(mbar + 1)
    cpasync.mbarrier_arrive(mbar + 1)
    other = (thread * 8 + 512) % 1024
    for half in cutlass.range_constexpr(2):
        cpasync.mbarrier_wait(mbar + half, 0)
        for i in cutlass.range_constexpr(4):
            value = cute.make_tensor(smem + other + half * 4 + i, cute.make_layout(1))[0]
            cute.make_tensor(out + other + half * 4 + i, cute.make_layout(1))[0] = value


@cute.jit
def arrivals_probe(source: cute.Pointer, out: cute.Pointer):
    _arrivals_kernel(source, out).launch(grid=(1, 1, 1), block=(128, 1, 1))


SLICE = 256  # float32 numbers: one box of 8 x 32


@cute.kernel
def _multicast_kernel(
    boxes: cutlass.GridConstant[cuda.TensorMap],
    source: cute.Pointer,
    out: cute.Pointer,
    masks: cutlass.Constexpr,
    is_bulk: cutlass.Constexpr,
):
    """Block r of a cluster loads slice r for the blocks of masks[r]; each writes what it has."""
    blocks = len(masks)
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    rank = cute.arch.block_idx_in_cluster()
    smem = cute.arch.alloc_smem(cutlass.Float32, blocks * SLICE, alignment=128)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    memory = cute.make_tensor(smem, cute.make_layout(blocks * SLICE))
    for i in cutlass.range_constexpr(blocks * SLICE // 128):
        memory[i * 128 + thread] = cutlass.Float32(STALE)
    cpasync.fence_proxy_async()
    if thread == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if thread == 0:
        for r in cutlass.range_constexpr(blocks):
            if rank == r:
                mine = sum(mask >> r & 1 for mask in masks)
                cpasync.arrive_and_expect_tx(mbar, mine * SLICE * 4)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if thread == 0:
        for r in cutlass.range_constexpr(blocks):
            if rank == r:
                to = smem + r * SLICE
                if cutlass.const_expr(is_bulk):
                    cpasync.bulk_load(
                        to, source + r * SLICE, SLICE * 4, mbar, multicast_mask=masks[r]
                    )
                else:
                    cpasync.tma_load(boxes, mbar, to, (0, r * 8), multicast_mask=masks[r])
    cpasync.mbarrier_wait(mbar, 0)
    target = cute.make_tensor(out + block * blocks * SLICE, cute.make_layout(blocks * SLICE))
    for i in cutlass.range_constexpr(blocks * SLICE // 128):
        target[i * 128 + thread] = memory[i * 128 + thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def multicast_probe(
    source: cute.Pointer, out: cute.Pointer, masks: cutlass.Constexpr, is_bulk: cutlass.Constexpr
):
    _multicast_kernel(any_map(), source, out, masks, is_bulk).launch(
        grid=(2 * len(masks), 1, 1), block=(128, 1, 1), cluster=(len(masks), 1, 1)
    )


@cute.kernel
def _remote_kernel(out: cute.Pointer, blocks: cutlass.Constexpr):
    """Every block but the first takes its time, then arrives at the first one's barrier."""
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    rank = cute.arch.block_idx_in_cluster()
    values = cute.make_tensor(out, cute.make_layout(blocks))
    if cute.arch.thread_idx()[0] == 0:
        cpasync.mbarrier_init(mbar, blocks - 1)
        cpasync.fence_barrier_init()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if cute.arch.thread_idx()[0] == 0:
        if rank == 0:
            cpasync.mbarrier_wait(mbar, 0, scope="cluster")
            total = cutlass.Int32(0)
            for i in cutlass.range_constexpr(1, blocks):
                total += values[i]
            values[0] = total
        else:
            start = cute.arch.globaltimer()
            while cute.arch.globaltimer() - start < 1_000_000 * rank:
                prims.nanosleep(1000)
            values[rank] = rank + 1
            cpasync.mbarrier_arrive(mbar, 0)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def remote_probe(out: cute.Pointer, blocks: cutlass.Constexpr):
    _remote_kernel(out, blocks).launch(
        grid=(blocks, 1, 1), block=(32, 1, 1), cluster=(blocks, 1, 1)
    )


@cute.kernel
def _im2col_store_kernel(
    source: cutlass.GridConstant[cuda.TensorMap],
    images: cutlass.GridConstant[cuda.TensorMap],
    crd: tuple[cutlass.Int32, ...],
    box_bytes: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Load a matrix, a pixel in each row, and store it, or add it, in im2col mode."""
    smem = cute.arch.alloc_smem(cutlass.Int8, box_bytes, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    if cute.arch.thread_idx()[0] == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.arrive_and_expect_tx(mbar, box_bytes)
        cpasync.tma_load(source, mbar, smem, (0, 0))
        cpasync.mbarrier_wait(mbar, 0)
        if cutlass.const_expr(op is None):
            cpasync.tma_store(images, smem, crd, im2col=True)
        else:
            cpasync.tma_reduce(images, smem, crd, op=op, im2col=True)
        cpasync.tma_store_arrive()
        cpasync.tma_store_wait(0)


@cute.jit
def im2col_store_probe(
    crd: tuple[cutlass.Int32, ...], box_bytes: cutlass.Constexpr, op: cutlass.Constexpr
):
    _im2col_store_kernel(any_map(), any_map(), crd, box_bytes, op).launch(
        grid=(1, 1, 1), block=(32, 1, 1)
    )


FORM_BOX = 8, 64  # of float16


@cute.jit
def _fetch(desc, out):
    """Load the box at row 8 through a descriptor of any form, and write it out."""
    smem = cute.arch.alloc_smem(cutlass.Float16, FORM_BOX[0] * FORM_BOX[1], alignment=128)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    size = FORM_BOX[0] * FORM_BOX[1] * 2
    if cute.arch.thread_idx()[0] == 0:
        cpasync.prefetch_tma_descriptor(desc)
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.arrive_and_expect_tx(mbar, size)
        cpasync.tma_load(desc, mbar, smem, (0, 8))
        cpasync.mbarrier_wait(mbar, 0)
        cpasync.bulk_store(out, smem, size)
        cpasync.tma_store_arrive()
        cpasync.tma_store_wait(0)


@cute.kernel
def _atom_kernel(desc: cute.CopyAtom, out: cute.Pointer):
    _fetch(desc, out)


@cute.jit
def atom_probe(matrix: cute.Pointer, out: cute.Pointer):
    box = cute.make_layout(FORM_BOX, stride=(FORM_BOX[1], 1))
    load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    tensor = cute.make_tensor(matrix, cute.make_layout((64, 64), stride=(64, 1)))
    atom, _ = cute.nvgpu.cpasync.make_tiled_tma_atom(load, tensor, box, FORM_BOX)
    _atom_kernel(atom, out).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def _table_kernel(
    table: cute.Pointer, out: cute.Pointer, number: cutlass.Int32, as_tensor: cutlass.Constexpr
):
    desc = table + number * (cpasync.BYTES_PER_TENSORMAP // cpasync.BYTES_PER_POINTER)
    if cutlass.const_expr(as_tensor):
        desc = cute.make_tensor(desc, cute.make_layout((1, 16), stride=(16, 1)))
    _fetch(desc, out)


@cute.jit
def table_probe(
    table: cute.Pointer, out: cute.Pointer, number: cutlass.Int32, as_tensor: cutlass.Constexpr
):
    _table_kernel(table, out, number, as_tensor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def _checked_kernel(source: cute.Pointer, out: cute.Pointer, offset: cutlass.Int32):
    """A copy of 16 bytes from and to an offset in elements that only the running kernel knows."""
    smem = cute.arch.alloc_smem(cutlass.Float32, 64, alignment=16)
    cpasync.cp_async_gs(16, smem + offset, source + offset)
    cpasync.cp_async_commit()
    cpasync.cp_async_wait(0)
    for i in cutlass.range_constexpr(4):
        value = cute.make_tensor(smem + offset + i, cute.make_layout(1))[0]
        cute.make_tensor(out + i, cute.make_layout(1))[0] = value


@cute.jit
def checked_probe(source: cute.Pointer, out: cute.Pointer, offset: cutlass.Int32):
    _checked_kernel(source, out, offset).launch(grid=(1, 1, 1), block=(1, 1, 1))


@cute.kernel
def _numbers_kernel(out: cute.Pointer, numbers: tuple):
    target = cute.make_tensor(out, cute.make_layout(len(numbers)))
    for i in cutlass.range_constexpr(len(numbers)):
        target[i] = cutlass.Float64(numbers[i])


@cute.jit
def numbers_probe(out: cute.Pointer, numbers: tuple):
    """Write numbers of every type to memory."""
    _numbers_kernel(out, numbers).launch(grid=(1, 1, 1), block=(1, 1, 1))


RAW_BYTES, RAW_STALE = 32 * 1024, 0x55555555


@cute.kernel
def _raw_kernel(
    source: cutlass.GridConstant[cuda.TensorMap],
    out: cute.Pointer,
    expected: cutlass.Int32,
    crd: tuple[cutlass.Int32, ...],
):
    """Load a box, and write out shared memory as it lies, then whether `expected` bytes came."""
    thread, words = cute.arch.thread_idx()[0], RAW_BYTES // 4
    smem = cute.arch.alloc_smem(cutlass.Int32, words, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    memory, target = (cute.make_tensor(p, cute.make_layout(words + 1)) for p in (smem, out))
    for i in cutlass.range(words // 128, unroll=1):
        memory[i * 128 + thread] = cutlass.Int32(RAW_STALE)
    cpasync.fence_proxy_async()
    cute.arch.sync_threads()
    if thread == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.arrive_and_expect_tx(mbar, expected)
        cpasync.tma_load(source, mbar, smem, crd)
        left = cutlass.Int32(100)
        while left > 0:
            left -= 1
            if prims.mbarrier_try_wait_parity(mbar, cutlass.Int32(0), time_limit=1_000_000):
                left = cutlass.Int32(-1)
        target[words] = left
    cute.arch.sync_threads()
    for i in cutlass.range(words // 128, unroll=1):
        target[i * 128 + thread] = memory[i * 128 + thread]


@cute.jit
def raw_probe(out: cute.Pointer, expected: cutlass.Int32, crd: tuple[cutlass.Int32, ...]):
    _raw_kernel(any_map(), out, expected, crd).launch(grid=(1, 1, 1), block=(128, 1, 1))
