"""A GEMM of one partition: TMA loads run ahead of wgmma through a ring of shared buffers."""

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
def fetch(a_desc, b_desc, a_s, b_s, full, k, row, col, STAGES: gl.constexpr, BK: gl.constexpr):
    slot = k % STAGES
    mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, [row, k * BK], full.index(slot), a_s.index(slot))
    tma_load(b_desc, [k * BK, col], full.index(slot), b_s.index(slot))


@gluon.jit
def pipelined_gemm(a_desc, b_desc, c_desc, steps, STAGES: gl.constexpr):
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BN: gl.constexpr = b_desc.block_type.shape[1]
    dtype: gl.constexpr = a_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    a_s = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], b_desc.layout)
    c_s = gl.allocate_shared_memory(dtype, [BM, BN], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    row = gl.program_id(0) * BM
    col = gl.program_id(1) * BN
    for k in gl.static_range(STAGES - 1):
        fetch(a_desc, b_desc, a_s, b_s, full, k, row, col, STAGES, BK)
    acc = gl.zeros([BM, BN], gl.float32, layout)
    for k in range(steps):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), (k // STAGES) & 1)
        acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if k + STAGES - 1 < steps:
            fetch(a_desc, b_desc, a_s, b_s, full, k + STAGES - 1, row, col, STAGES, BK)
    c_s.store(acc.to(dtype))
    fence_async_shared()
    tma_store(c_desc, [row, col], c_s)
    tma.store_wait(0)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))  # tileloom: harmless(the program ends here)


def describe(tensor, rows, cols):
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.float16)
    return TensorDescriptor.from_tensor(tensor, [rows, cols], layout)


def main(m=128, n=64, k=192, stages=3):
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float16), torch.randn(k, n, dtype=torch.float16)
    c = torch.zeros(m, n, dtype=torch.float16)
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    pipelined_gemm[grid](
        describe(a, 64, 32), describe(b, 32, 64), describe(c, 64, 64), triton.cdiv(k, 32), stages,
        num_warps=4,
    )  # fmt: skip
    return c, a.float() @ b.float()
