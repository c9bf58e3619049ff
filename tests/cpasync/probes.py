"""Small kernels that show what single functions of `cpasync` do to memory."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from tileloom import cpasync

THREADS, STALE = 128, -1.0
BOX_BYTES = 16 * 1024  # more than a box: a swizzle wider than its rows spaces them out


@cute.kernel
def _copy_kernel(
    source: cute.Pointer,
    out: cute.Pointer,
    sizes: cute.Pointer,
    size: cutlass.Constexpr,
    how: cutlass.Constexpr,
):
    """Each thread copies within 16 bytes of its own, which held STALE; `sizes` says how much.

    From and to every multiple of the size.
    """
    thread = cute.arch.thread_idx()[0]
    smem = cute.arch.alloc_smem(cutlass.Float32, THREADS * 4, alignment=16)
    slot = cute.make_tensor(smem + thread * 4, cute.make_layout(4))
    for i in cutlass.range_constexpr(4):
        slot[i] = cutlass.Float32(STALE)
    cute.arch.sync_threads()
    given = cute.make_tensor(sizes, cute.make_layout(THREADS))[thread]
    each, words = 16 // size, size // 4
    dst = smem + thread * 4 + thread // each % each * words
    src = source + thread * 4 + thread % each * words
    if cutlass.const_expr(how == "src_size"):
        modifier = "cg" if size == 16 else "ca"
        cpasync.cp_async_shared_global(dst, src, size, modifier, src_size=given)
    else:
        fill = how == "zero_fill"
        cpasync.cp_async_gs_conditional(size, dst, src, given > 0, zero_fill=fill)
    cpasync.cp_async_commit()
    cpasync.cp_async_wait(0)
    cute.arch.sync_threads()
    target = cute.make_tensor(out + thread * 4, cute.make_layout(4))
    for i in cutlass.range_constexpr(4):
        target[i] = slot[i]


@cute.jit
def copy_probe(
    source: cute.Pointer,
    out: cute.Pointer,
    sizes: cute.Pointer,
    size: cutlass.Constexpr,
    how: cutlass.Constexpr,
):
    _copy_kernel(source, out, sizes, size, how).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def _box_kernel(
    source: cutlass.GridConstant[cuda.TensorMap],
    target: cutlass.GridConstant[cuda.TensorMap],
    crd: tuple[cutlass.Int32, ...],
    op: cutlass.Constexpr,
):
    """Load one box at `crd` and store it, or reduce it, at the origin of another tensor."""
    smem = cute.arch.alloc_smem(cutlass.Int8, BOX_BYTES, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    if cute.arch.thread_idx()[0] == 0:
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
        cpasync.arrive_and_expect_tx(mbar, source.global_tx_bytes())
        cpasync.tma_load(source, mbar, smem, crd)
        cpasync.mbarrier_wait(mbar, 0)
        if cutlass.const_expr(op is None):
            cpasync.tma_store(target, smem, (0,) * len(crd))
        else:
            cpasync.tma_reduce(target, smem, (0,) * len(crd), op=op)
        cpasync.tma_store_arrive()
        cpasync.tma_store_wait(0)


@cute.jit
def box_probe(
    source: cute.Pointer,
    target: cute.Pointer,
    crd: tuple[cutlass.Int32, ...],
    shape: cutlass.Constexpr,
    box: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    op: cutlass.Constexpr,
):
    """Of row-major tensors: one of `shape`, and one of the box alone."""
    order = tuple(reversed(range(len(shape))))
    maps = []
    for memory, extent in ((source, shape), (target, box)):
        tensor = cute.make_tensor(memory, cute.make_ordered_layout(extent, order=order))
        kind = cuda.TensorMapSwizzle.from_name(swizzle)
        maps.append(
            cuda.create_tensor_map_tiled_from_view(
                tensor, box_dims=box, stride_order=order, swizzle=kind
            )
        )
    _box_kernel(maps[0], maps[1], crd, op).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def _wait_kernel(out: cute.Pointer, nanoseconds: cutlass.Int32):
    """One warp sleeps, writes and arrives; another waits, and says what it then sees."""
    seen = cute.arch.alloc_smem(cutlass.Int32, 1, alignment=4)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    thread = cute.arch.thread_idx()[0]
    value = cute.make_tensor(seen, cute.make_layout(1))
    if thread == 0:
        value[0] = 0
        cpasync.mbarrier_init(mbar, 1)
        cpasync.fence_barrier_init()
    cute.arch.sync_threads()
    if thread == 32:
        start = cute.arch.globaltimer()
        while cute.arch.globaltimer() - start < nanoseconds:
            prims.nanosleep(1000)
        value[0] = 1
        cpasync.mbarrier_arrive(mbar)
    if thread == 0:
        cpasync.mbarrier_wait(mbar, 0, 1000)
        cute.make_tensor(out, cute.make_layout(1))[0] = value[0]


@cute.jit
def wait_probe(out: cute.Pointer, nanoseconds: cutlass.Int32):
    _wait_kernel(out, nanoseconds).launch(grid=(1, 1, 1), block=(64, 1, 1))


def memory(dtype, address=1 << 20, align=16):
    """A pointer into global memory, for compiling or for a call."""
    return make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
