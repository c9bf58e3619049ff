"""Small kernels that show each thing the ahead-of-time compiler must report.

Imported only in the compiling processes; `samples.py` has their specs and needs no Triton.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Renamed in 3.7; 3.9 has only the new name.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def matmul_kernel(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, col, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    a_at = a + row[:, None] * k + depth[None, :]
    b_at = b + col[None, :] * k + depth[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, k, BK):
        acc = tl.dot(tl.load(a_at), tl.load(b_at), acc)
        a_at += BK
        b_at += BK
    tl.store(c + row[:, None] * BN + col[None, :], acc.to(tl.bfloat16))


@triton.jit
def wrong_kernel(x):
    tl.store(x, tl.no_such_function(1))


@gluon.jit
def wgmma_kernel(
    a_desc, b_desc, out, steps, N: gl.constexpr, NUM_STAGES: gl.constexpr, SERIAL: gl.constexpr
):
    """Multiply in a ring of buffers; SERIAL reads the accumulator in a second branch."""
    K: gl.constexpr = a_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    a_s = gl.allocate_shared_memory(a_desc.dtype, [NUM_STAGES, 64, K], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [NUM_STAGES, N, K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    acc = gl.zeros([64, N], gl.float32, layout)
    gl.assume(steps > 0)
    for i in range(steps):
        stage = i % NUM_STAGES
        bar = full.index(stage)
        mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        async_load(a_desc, [0, i * K], bar, a_s.index(stage))
        async_load(b_desc, [0, i * K], bar, b_s.index(stage))
        mbarrier.wait(bar, (i // NUM_STAGES) & 1)
        b = b_s.index(stage).permute((1, 0))
        acc = warpgroup_mma(a_s.index(stage), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if SERIAL and i == 7:
            acc = acc * 2.0
    acc = warpgroup_mma_wait(0, deps=(acc,))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    col = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(out + gl.expand_dims(row, 1) * N + gl.expand_dims(col, 0), acc)


@gluon.jit
def aborting_kernel(x):
    """Its layout reaches only half of the elements: Triton 3.6 to 3.9 abort the process."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[2], [4], [8], [16], [32]], [[64], [77]], [], [256]
    )
    at = gl.arange(0, 256, layout)
    gl.store(x + at, gl.full([256], 1.0, gl.float32, layout))
