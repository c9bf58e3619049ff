"""Attention of one head per program: a producer, two consumers that take turns by named barriers.

Operands come by 4-D descriptors; P is the register operand of the second multiply; buffers are
handed back by every thread's own arrival.
"""

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

from tests.emulator.cases.names import (
    arrive_each_thread,
    named_barrier_arrive,
    named_barrier_sync,
    tma_load,
    tma_store,
)


@gluon.jit
def load_keys(q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, L):
    STAGES: gl.constexpr = k_s.type.shape[0]
    BN: gl.constexpr = k_s.type.shape[3]
    head = gl.program_id(1)
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        q_row = gl.program_id(0) * 128 + w * 64
        tma_load(q_desc, [0, head, q_row, 0], q_full.index(w), q_s.index(w))
    for i in range(gl.cdiv(L, BN)):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma_load(k_desc, [0, head, i * BN, 0], k_full.index(slot), k_s.index(slot))
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma_load(v_desc, [0, head, i * BN, 0], v_full.index(slot), v_s.index(slot))


@gluon.jit
def attend(
    WG: gl.constexpr, o_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, scale, L
):
    STAGES: gl.constexpr = k_s.type.shape[0]
    BN: gl.constexpr = k_s.type.shape[3]
    D: gl.constexpr = k_s.type.shape[4]
    SC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    if WG == 1:
        named_barrier_arrive(8, 256)
    mbarrier.wait(q_full.index(WG), 0)
    q = q_s.index(WG).reshape([64, D])
    zero = gl.zeros([64, BN], gl.float32, SC)
    acc = gl.zeros([64, D], gl.float32, OUT)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SC))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, SC))
    for i in range(gl.cdiv(L, BN)):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        named_barrier_sync(8 + WG, 256)
        keys = k_s.index(slot).reshape([BN, D]).permute((1, 0))
        s = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        named_barrier_arrive(9 - WG, 256)  # tileloom: harmless(turns only order the issue)
        arrive_each_thread(k_empty.index(slot))
        cols = i * BN + gl.arange(0, BN, gl.SliceLayout(0, SC))
        s = gl.where(gl.expand_dims(cols < L, 0), s * scale, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - gl.expand_dims(m_new, 1))
        alpha = gl.exp2(m - m_new)
        total = total * alpha + gl.sum(p, 1)
        m = m_new
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
        mbarrier.wait(v_full.index(slot), phase)
        p = gl.convert_layout(p.to(gl.bfloat16), PL)
        acc = warpgroup_mma(p, v_s.index(slot).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        arrive_each_thread(v_empty.index(slot))
    if WG == 0:
        named_barrier_sync(8, 256)
    acc = acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
    q_s.index(WG).reshape([64, D]).store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma_store(o_desc, [0, gl.program_id(1), gl.program_id(0) * 128 + WG * 64, 0], q_s.index(WG))
    tma.store_wait(0)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_desc, scale, L, STAGES: gl.constexpr):
    BN: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = k_desc.block_type.shape[3]
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=256)
        mbarrier.init(v_empty.index(i), count=256)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend,
                (0, o_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, scale, L),
            ),
            (
                attend,
                (1, o_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, scale, L),
            ),
            (
                load_keys,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_s,
                    k_s,
                    v_s,
                    q_full,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    L,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def describe(tensor, rows):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor.from_tensor(tensor, [1, 1, rows, tensor.shape[3]], layout)


def main(heads=2, length=200, dim=64, stages=2):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, dim, dtype=torch.bfloat16) for _ in range(3))
    o = torch.zeros_like(q)
    attention[(triton.cdiv(length, 128), heads)](
        describe(q, 64), describe(k, 64), describe(v, 64), describe(o, 64),
        dim**-0.5 * 1.4426950408889634, length, stages, num_warps=4,
    )  # fmt: skip
    reference = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    return o, reference
