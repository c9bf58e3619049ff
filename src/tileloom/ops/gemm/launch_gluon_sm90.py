"""The launch of the Hopper GEMM: descriptors, grid, and what the kernel is told of a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.launch.launcher import prepared
from tileloom.ops.gemm.config import GluonSm90Config
from tileloom.ops.gemm.kernel_gluon_sm90 import matmul_kernel
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.scheduling import StaticPersistentScheduler, TileSchedulerParams
from tileloom.target import target_of

BLOCK_K = 64


def layout_arguments(columns: int, itemsize: int) -> dict[str, int]:
    """Shared-memory layout of a box `[1, rows, columns]`: the widest swizzle that fits."""
    swizzle = min(128, columns * itemsize)
    return {"swizzle_byte_width": swizzle, "element_bitwidth": 8 * itemsize, "rank": 3}


@functools.cache
def _layout(columns: int, itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(**layout_arguments(columns, itemsize))


def descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Make a TMA descriptor over a tensor of three dimensions, for boxes `[1, rows, columns]`."""
    # The stride of a dimension of size 1 is never used, but the driver checks it.
    least = -(-x.shape[2] * x.element_size() // 16) * 16 // x.element_size()
    strides = [s if n > 1 else least for n, s in zip(x.shape[:-1], x.stride())]
    box = [1, rows, columns]
    layout = _layout(columns, x.element_size())
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)


def boxes(problem: MatmulProblem, config: GluonSm90Config) -> dict[str, tuple[int, int]]:
    """Rows and columns of each descriptor's box."""
    rows, columns = config.warpgroup_tile()
    return {
        "a_desc": (BLOCK_K, rows) if problem.a_is_transposed else (rows, BLOCK_K),
        "b_desc": (columns, BLOCK_K) if problem.b_is_transposed else (BLOCK_K, columns),
        "out_desc": (rows, min(columns, config.slice_columns(problem))),
    }


def constants(
    problem: MatmulProblem, config: GluonSm90Config, params: TileSchedulerParams, *, chunked: bool
) -> dict[str, object]:
    """The kernel's compile-time parameters for a problem."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages_of(problem),
        "BUFFERS": config.buffers(problem),
        "SWIZZLE": config.swizzle_size,
        "ALONG_M": params.raster_order == "along_m",
        "UNIFORM": params.rows_per_chunk > 0,
        "A_TRANSPOSED": problem.a_is_transposed,
        "B_TRANSPOSED": problem.b_is_transposed,
        "ACTIVATION": problem.activation,
        "HAS_BIAS": problem.bias_dtype is not None,
        "HAS_RESIDUAL": problem.residual is not None,
        "CHUNKED": chunked,
        "DYNAMIC": config.scheduler == "dynamic",
    }


def params_of(problem: MatmulProblem, config: GluonSm90Config, **chunks: Any) -> TileSchedulerParams:
    """The schedule of a problem; `chunks` are those arguments of `to_underlying_arguments`."""
    return TileSchedulerParams.to_underlying_arguments(
        *(problem.m, problem.n, problem.k, problem.l),
        block=(config.block_m, config.block_n, BLOCK_K),
        max_swizzle_size=config.swizzle_size,
        **chunks,
    )


def bind_matmul(
    problem: MatmulProblem,
    config: GluonSm90Config,
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
    params = params_of(problem, config)
    is_dynamic = config.scheduler == "dynamic"
    box = boxes(problem, config)
    a_flips, b_flips = problem.a_is_transposed, problem.b_is_transposed
    bound = prepared(matmul_kernel, num_warps=4).bind(
        (StaticPersistentScheduler.get_grid_shape(params, target_of(a).sms),),
        descriptor(a.transpose(1, 2) if a_flips else a, *box["a_desc"]),
        descriptor(b.transpose(1, 2) if b_flips else b, *box["b_desc"]),
        descriptor(out, *box["out_desc"]),
        None if residual is None else descriptor(residual, *box["out_desc"]),
        out,
        bias,
        None,
        None,
        None,
        _counter(a) if is_dynamic else None,
        *(0, 0, problem.m, problem.n, params.k_tiles, params.tiles_n, params.blocks_per_problem),
        *(problem.m, 1, 0, out.stride(1)),
        **constants(problem, config, params, chunked=False),
    )

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        given: list[torch.Tensor] = [a, b, out]
        if residual is not None:
            given.append(residual)
        given.append(out)
        if bias is not None:
            given.append(bias)
        if is_dynamic:
            given.append(_counter(a))
        bound.launch(*given)

    return launch


def _counter(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)
