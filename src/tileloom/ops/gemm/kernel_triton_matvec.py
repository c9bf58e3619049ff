"""One row times a matrix that lies by columns: C = activation(A B + bias) + residual.

Picture. B's columns, K numbers each that follow each other (rows of a layer's weight), are read
once, in whole pieces and by plain loads; a program takes BLOCK_N of them. Each number of B is
multiplied with A's at the same k and added to a sum of its own place in the piece; the sums are
added up at the end. No tensor core: one would get 16 rows, 15 of them zeros.

    b:   column j      [ BLOCK_K ][ BLOCK_K ] ... along k         a: one row, from L1
         column j + 1  [ BLOCK_K ][ BLOCK_K ] ...                 sums: BLOCK_N x BLOCK_K

Bytes moved: B once, C once, A once for each program, from L2.
Nobody waits: programs are independent. Launched with `launch_pdl` (PDL) a program begins while the
kernel ahead still ends, and waits for it before it touches memory.

Sizes and strides come in units, as in `kernel_triton.py`. Offsets are 64-bit throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileloom.ops.gemm.pieces_activation import activate_triton

INT64_ARGUMENTS = ("a_l", "a_k", "b_l", "b_n", "r_l", "r_n", "o_l", "o_n")
INT32_ARGUMENTS = ("n", "k", "blocks")


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def matvec_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, n: tl.int32, k: tl.int32, blocks: tl.int32,
    a_l: tl.int64, a_k: tl.int64, b_l: tl.int64, b_n: tl.int64, r_l: tl.int64, r_n: tl.int64,
    o_l: tl.int64, o_n: tl.int64, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of C.

    `k` and B's strides come in units of B_UNIT elements. A's strides come in units of A_UNIT where
    that is above 0, and k is then its contiguous dimension. IS_WHOLE: BLOCK_K divides k.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k *= B_UNIT
    b_l, b_n = b_l * B_UNIT, b_n * B_UNIT
    if A_UNIT > 0:
        a_l, a_k = a_l * A_UNIT, tl.full([], 1, tl.int64)
    program = tl.program_id(0)
    batch = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = columns < n
    has_column = is_there[:, None]
    depth = tl.arange(0, BLOCK_K)
    depth64 = depth.to(tl.int64)
    a_at = a_ptr + batch * a_l + depth64 * a_k
    b_at = b_ptr + batch * b_l + (columns[:, None] * b_n + depth64[None, :])
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for _start in range(k // BLOCK_K):
        a = tl.load(a_at)
        b = tl.load(b_at, mask=has_column, other=0, eviction_policy="evict_first")
        sums += b.to(tl.float32) * a.to(tl.float32)[None, :]
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K
    if not IS_WHOLE:
        is_inside = depth < k % BLOCK_K
        a = tl.load(a_at, mask=is_inside, other=0)
        b = tl.load(b_at, mask=has_column & is_inside[None, :], other=0)
        sums += b.to(tl.float32) * a.to(tl.float32)[None, :]
    x = tl.sum(sums, 1)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=is_there, other=0).to(tl.float32)
    x = activate_triton(x, ACTIVATION, out_ptr.dtype.element_ty.fp_mantissa_width)
    if HAS_RESIDUAL:
        r_at = residual_ptr + batch * r_l + columns * r_n
        x += tl.load(r_at, mask=is_there, other=0).to(tl.float32)
    o_at = out_ptr + batch * o_l + columns * o_n
    tl.store(o_at, x.to(out_ptr.dtype.element_ty), mask=is_there)
