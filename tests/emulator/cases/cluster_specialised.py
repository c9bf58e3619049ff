"""A warp-specialised GEMM by clusters of two by two CTAs: A and B are multicast along one way each.

CTA `r + 2 c` has the rows `r` and columns `c` of the tile. A's part is loaded by column 0 into both
columns, B's part by row 0 into both rows. A slot is free for the next expect once the CTA's own
consumer has left it, for the next load of A or B once the consumers of all receivers have.
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

from tests.emulator.cases.cluster_gemm import describe
from tests.emulator.cases.names import cluster_barrier, tma_load, tma_store


@gluon.jit
def load_tiles(a_desc, b_desc, a_s, b_s, full, free, free_a, free_b, steps):
    STAGES: gl.constexpr = a_s.type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BM: gl.constexpr = a_desc.block_type.shape[0]
    row = gl.program_id(0) * BM
    for k in range(steps):
        slot = k % STAGES
        phase = ((k // STAGES) & 1) ^ 1
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(full.index(slot), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        mbarrier.wait(free_a.index(slot), phase)
        tma_load(a_desc, [row, k * BK], full.index(slot), a_s.index(slot), multicast=True)
        mbarrier.wait(free_b.index(slot), phase)
        tma_load(b_desc, [k * BK, 0], full.index(slot), b_s.index(slot), multicast=True)


@gluon.jit
def multiply_tiles(c_desc, a_s, b_s, c_s, full, free, free_a, free_b, steps, ACC: gl.constexpr):
    STAGES: gl.constexpr = a_s.type.shape[0]
    BM: gl.constexpr = a_s.type.shape[1]
    BN: gl.constexpr = b_s.type.shape[2]
    acc = gl.zeros([BM, BN], gl.float32, ACC)
    for k in range(steps):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), (k // STAGES) & 1)
        acc = warpgroup_mma(a_s.index(slot), b_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.arrive(free_a.index(slot), count=1)
        mbarrier.arrive(free_b.index(slot), count=1)
    c_s.store(acc.to(gl.float16))
    fence_async_shared()
    tma_store(c_desc, [gl.program_id(0) * BM, 0], c_s)
    tma.store_wait(0)


@gluon.jit
def cluster_specialised(a_desc, b_desc, c_desc, steps, STAGES: gl.constexpr, ACC: gl.constexpr):
    BM: gl.constexpr = a_desc.block_type.shape[0]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    BN: gl.constexpr = b_desc.block_type.shape[1]
    ROWS: gl.constexpr = mbarrier.MBarrierLayout([[1], [0]])
    COLS: gl.constexpr = mbarrier.MBarrierLayout([[0], [1]])
    a_s = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(gl.float16, [STAGES, BK, BN], b_desc.layout)
    c_s = gl.allocate_shared_memory(gl.float16, [BM, BN], c_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    free_a = gl.allocate_shared_memory(gl.int64, [STAGES, 2], ROWS)
    free_b = gl.allocate_shared_memory(gl.int64, [STAGES, 2], COLS)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(free_a.index(i), count=1)
        mbarrier.init(free_b.index(i), count=1)
    fence_async_shared(cluster=True)
    cluster_barrier()
    gl.warp_specialize(
        [
            (multiply_tiles,
             (c_desc, a_s, b_s, c_s, full, free, free_a, free_b, steps, ACC)),
            (load_tiles, (a_desc, b_desc, a_s, b_s, full, free, free_a, free_b, steps)),
        ],
        [1],
        [24],
    )  # fmt: skip
    cluster_barrier()


def main(m=200, k=160, stages=2):
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float16), torch.randn(k, 120, dtype=torch.float16)
    c = torch.zeros(m, 120, dtype=torch.float16)
    bases = [[1, 0], [0, 1]]
    acc = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cga_layout=bases)
    cluster_specialised[(-(-m // 128),)](
        describe(a, [128, 32], [[1, 0], [0, 0]]), describe(b, [32, 128], [[0, 0], [0, 1]]),
        describe(c, [128, 128], bases), k // 32, stages, acc, num_warps=4, num_ctas=4,
    )  # fmt: skip
    return c, a.float() @ b.float()
