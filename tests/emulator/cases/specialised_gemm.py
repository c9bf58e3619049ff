"""A persistent warp-specialised GEMM: a TMA producer, an MMA consumer, an epilogue by TMA store."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.names import tma_load, tma_store


@gluon.jit
def load_tiles(a_desc, b_desc, a_s, b_s, full, empty, tiles, cols, steps):
    STAGES: gl.constexpr = a_s.type.shape[0]
    BM: gl.constexpr = a_s.type.shape[1]
    BK: gl.constexpr = a_s.type.shape[2]
    BN: gl.constexpr = b_s.type.shape[2]
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(steps):
            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(empty.index(slot), phase ^ 1)
            mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [tile // cols * BM, k * BK], full.index(slot), a_s.index(slot))
            tma_load(b_desc, [k * BK, tile % cols * BN], full.index(slot), b_s.index(slot))
            count += 1


@gluon.jit
def multiply_tiles(c_desc, a_s, b_s, c_s, full, empty, tiles, cols, steps):
    STAGES: gl.constexpr = a_s.type.shape[0]
    BM: gl.constexpr = a_s.type.shape[1]
    BN: gl.constexpr = b_s.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([BM, BN], gl.float32, layout)
        for k in range(steps):
            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(full.index(slot), phase)
            acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((count - 1) % STAGES), count=1, pred=k > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        tma.store_wait(0)
        c_s.store(acc.to(c_desc.dtype))
        fence_async_shared()
        tma_store(c_desc, [tile // cols * BM, tile % cols * BN], c_s)
    tma.store_wait(0)


@gluon.jit
def specialised_gemm(a_desc, b_desc, c_desc, tiles, cols, steps, STAGES: gl.constexpr):
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BN: gl.constexpr = b_desc.block_type.shape[1]
    a_s = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BK, BN], b_desc.layout)
    c_s = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (c_desc, a_s, b_s, c_s, full, empty, tiles, cols, steps)),
            (load_tiles, (a_desc, b_desc, a_s, b_s, full, empty, tiles, cols, steps)),
        ],
        [1],
        [24],
    )


def describe(tensor, rows, cols):
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.float16)
    return TensorDescriptor.from_tensor(tensor, [rows, cols], layout)


def main(m=192, n=128, k=224, stages=3, programs=4):
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float16), torch.randn(k, n, dtype=torch.float16)
    c = torch.zeros(m, n, dtype=torch.float16)
    rows, cols = triton.cdiv(m, 64), triton.cdiv(n, 64)
    specialised_gemm[(programs,)](
        describe(a, 64, 32), describe(b, 32, 64), describe(c, 64, 64), rows * cols, cols,
        triton.cdiv(k, 32), stages, num_warps=4,
    )  # fmt: skip
    return c, a.float() @ b.float()
