"""The portable GEMM in Triton: C = activation(A B + bias) + residual, any strides.

Picture. One program for each tile of BLOCK_M x BLOCK_N of C, in the order of
`tileloom.scheduling.decode.tile_of`; it walks along k and keeps its tile in float32. float32
inputs are multiplied as IEEE float32, never as TF32.

Bytes moved: C once, A once for each column of tiles, B once for each row, from L2 where it can.
Nobody waits: programs are independent, and Triton orders what is inside one.

No number is compiled in: strides and sizes come divided by powers of two that the kernel multiplies
again, which is how the compiler knows their alignment. Offsets are 64-bit throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileloom.ops.gemm.pieces_activation import activate_triton
from tileloom.scheduling.device import tile_of_triton

INT64_ARGUMENTS = (
    "a_l", "a_m", "a_k", "b_l", "b_k", "b_n", "r_l", "r_m", "r_n", "o_l", "o_m", "o_n",
)  # fmt: skip
INT32_ARGUMENTS = ("m", "n", "k", "tiles_m", "tiles_n")


@triton.jit
def _strides(batch, row, column, UNIT: tl.constexpr):
    """Strides in elements: in units of |UNIT|, but 1 along the columns (UNIT > 0) or rows (< 0)."""
    if UNIT > 0:
        batch, row, column = batch * UNIT, row * UNIT, tl.full([], 1, tl.int64)
    elif UNIT < 0:
        batch, row, column = batch * -UNIT, tl.full([], 1, tl.int64), column * -UNIT
    return batch, row, column


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def matmul_portable_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, one,
    m: tl.int32, n: tl.int32, k: tl.int32, tiles_m: tl.int32, tiles_n: tl.int32,
    a_l: tl.int64, a_m: tl.int64, a_k: tl.int64, b_l: tl.int64, b_k: tl.int64, b_n: tl.int64,
    r_l: tl.int64, r_m: tl.int64, r_n: tl.int64, o_l: tl.int64, o_m: tl.int64, o_n: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, R_UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    M_UNIT: tl.constexpr, N_UNIT: tl.constexpr, K_UNIT: tl.constexpr,
):  # fmt: skip
    """Compute one tile of C.

    `m`, `n` and `k` come in units of M_UNIT, N_UNIT and K_UNIT. A's strides come in units of
    |A_UNIT| elements: positive where k is its contiguous dimension, negative where m is, 0 where
    neither; B_UNIT, R_UNIT and O_UNIT (residual, output) likewise, positive for the last dimension.
    """
    m, n, k = m * M_UNIT, n * N_UNIT, k * K_UNIT
    a_l, a_m, a_k = _strides(a_l, a_m, a_k, A_UNIT)
    b_l, b_k, b_n = _strides(b_l, b_k, b_n, B_UNIT)
    r_l, r_m, r_n = _strides(r_l, r_m, r_n, R_UNIT)
    o_l, o_m, o_n = _strides(o_l, o_m, o_n, O_UNIT)
    program = tl.program_id(0)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    i, j = tile_of_triton(program % (tiles_m * tiles_n), tiles_m, tiles_n, SWIZZLE)
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row = (rows < m)[:, None]
    has_column = (columns < n)[None, :]
    rows64, columns64, depth64 = rows.to(tl.int64), columns.to(tl.int64), depth.to(tl.int64)
    a_at = a_ptr + batch * a_l + (rows64[:, None] * a_m + depth64[None, :] * a_k)
    b_at = b_ptr + batch * b_l + (depth64[:, None] * b_k + columns64[None, :] * b_n)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        is_inside = depth < k - start
        a = tl.load(a_at, mask=has_row & is_inside[None, :], other=0)
        b = tl.load(b_at, mask=has_column & is_inside[:, None], other=0)
        if a.dtype == tl.float32:
            # Not `acc + dot`: Triton would sum all of k in one chain, which loses digits.
            acc = tl.fma(acc, one, tl.dot(a, b, input_precision="ieee"))
        else:
            acc = tl.dot(a, b, acc)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns64, mask=columns < n, other=0)
        acc += bias.to(tl.float32)[None, :]
    acc = activate_triton(acc, ACTIVATION, out_ptr.dtype.element_ty.fp_mantissa_width)
    is_there = has_row & has_column
    if HAS_RESIDUAL:
        r_at = residual_ptr + batch * r_l + (rows64[:, None] * r_m + columns64[None, :] * r_n)
        acc += tl.load(r_at, mask=is_there, other=0).to(tl.float32)
    o_at = out_ptr + batch * o_l + (rows64[:, None] * o_m + columns64[None, :] * o_n)
    tl.store(o_at, acc.to(out_ptr.dtype.element_ty), mask=is_there)
