"""A GEMM by clusters of two CTAs: each loads its rows of A, the first one multicasts B to both.

`full` is an mbarrier for each CTA. `empty` lies in the first CTA, which waits there for both before
it overwrites B in both.
"""

import torch
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

from tests.emulator.cases.names import cluster_barrier, tma_load, tma_store


@gluon.jit
def cluster_gemm(a_desc, b_desc, c_desc, steps, STAGES: gl.constexpr, ACC: gl.constexpr):
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BN: gl.constexpr = b_desc.block_type.shape[1]
    a_s = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(gl.float16, [STAGES, BK, BN], b_desc.layout)
    c_s = gl.allocate_shared_memory(gl.float16, [BM, BN], c_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared(cluster=True)
    cluster_barrier()
    row = gl.program_id(0) * BM
    col = gl.program_id(1) * BN
    acc = gl.zeros([BM, BN], gl.float32, ACC)
    for k in range(steps):
        slot = k % STAGES
        phase = (k // STAGES) & 1
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma_load(a_desc, [row, k * BK], full.index(slot), a_s.index(slot))
        tma_load(b_desc, [k * BK, col], full.index(slot), b_s.index(slot), multicast=True)
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
    c_s.store(acc.to(gl.float16))
    fence_async_shared()
    tma_store(c_desc, [row, col], c_s)
    tma.store_wait(0)
    cluster_barrier()


def describe(tensor, block, bases):
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16, cga_layout=bases)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def main(m=200, n=128, k=160, stages=2):
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float16), torch.randn(k, n, dtype=torch.float16)
    c = torch.zeros(m, n, dtype=torch.float16)
    acc = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cga_layout=[[1, 0]])
    cluster_gemm[(-(-m // 128), n // 64)](
        describe(a, [128, 32], [[1, 0]]), describe(b, [32, 64], [[0, 0]]),
        describe(c, [128, 64], [[1, 0]]), k // 32, stages, acc, num_warps=4, num_ctas=2,
    )  # fmt: skip
    return c, a.float() @ b.float()
