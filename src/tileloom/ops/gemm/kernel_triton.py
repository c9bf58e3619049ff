"""The portable GEMM in Triton: C = activation(A B + bias) + residual, any strides.

Picture. One program for each tile of BLOCK_M x BLOCK_N of C, in the order of
`tileloom.scheduling.decode.tile_of`; it walks along k and keeps its tile in float32. float32
inputs are multiplied as IEEE float32, never as TF32.

Bytes moved: C once, A once for each column of tiles, B once for each row, from L2 where it can.
Nobody waits: programs are independent, and Triton orders what is inside one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tileloom.launch.launcher import prepared
from tileloom.ops.gemm.config import TritonConfig
from tileloom.ops.gemm.pieces_activation import activate_triton
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.scheduling.device import tile_of_triton


@triton.jit
def matmul_portable_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, one, m, n, k, tiles_m, tiles_n,
    a_l: tl.int64, a_m: tl.int64, a_k: tl.int64, b_l: tl.int64, b_k: tl.int64, b_n: tl.int64,
    r_l: tl.int64, r_m: tl.int64, r_n: tl.int64, o_l: tl.int64, o_m: tl.int64, o_n: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIZZLE: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    i, j = tile_of_triton(program % (tiles_m * tiles_n), tiles_m, tiles_n, SWIZZLE)
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row = (rows < m)[:, None]
    has_column = (columns < n)[None, :]
    rows64, columns64 = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    a_at = a_ptr + batch * a_l + rows64 * a_m + depth.to(tl.int64)[None, :] * a_k
    b_at = b_ptr + batch * b_l + columns64 * b_n + depth.to(tl.int64)[:, None] * b_k
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
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0).to(tl.float32)[None, :]
    acc = activate_triton(acc, ACTIVATION)
    is_there = has_row & has_column
    if HAS_RESIDUAL:
        r_at = residual_ptr + batch * r_l + rows64 * r_m + columns64 * r_n
        acc += tl.load(r_at, mask=is_there, other=0).to(tl.float32)
    o_at = out_ptr + batch * o_l + rows64 * o_m + columns64 * o_n
    tl.store(o_at, acc.to(out_ptr.dtype.element_ty), mask=is_there)


def constants(problem: MatmulProblem, config: TritonConfig) -> dict[str, object]:
    """The kernel's compile-time parameters for a problem."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWIZZLE": config.swizzle_size,
        "ACTIVATION": problem.activation,
        "HAS_BIAS": problem.bias_dtype is not None,
        "HAS_RESIDUAL": problem.residual is not None,
    }


def bind_matmul(
    problem: MatmulProblem,
    config: TritonConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> Callable[..., None]:
    """Prepare the launch for a problem that is not empty.

    Args:
        problem: What `config.reasons_against` has accepted.
        config: Tile sizes.
        a: `[l, m, k]`; like all tensors here an example, which is not kept.
        b: `[l, k, n]`.
        bias: `[n]`, contiguous, or None.
        residual: `[l, m, n]` or None.
        out: `[l, m, n]`.

    Returns:
        `launch(a, b, bias, residual, out)`, which writes `out`, for tensors of the same shapes,
        strides, types and alignments.
    """
    tiles = (-(-problem.m // config.block_m), -(-problem.n // config.block_n))
    r_strides = (0, 0, 0) if residual is None else residual.stride()
    bound = prepared(
        matmul_portable_kernel, num_warps=config.num_warps, num_stages=config.num_stages
    ).bind(
        (tiles[0] * tiles[1] * problem.l,),
        *(a, b, bias, residual, out, 1.0, problem.m, problem.n, problem.k, *tiles),
        *(*a.stride(), *b.stride(), *r_strides, *out.stride()),
        **constants(problem, config),
    )

    def launch(*tensors: torch.Tensor | None) -> None:
        bound.launch(*(tensor for tensor in tensors if tensor is not None))

    return launch
