"""The launch of the Hopper GEMM: descriptors, grid, and what the kernel is told of a problem."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.launch.bound import Number
from tileloom.launch.launcher import prepared
from tileloom.launch.tiers import is_settled, usable
from tileloom.ops._counters import split_counters, workspace, zero_counter
from tileloom.ops.gemm.config import GluonSm90Config
from tileloom.ops.gemm.kernel_gluon_sm90 import matmul_kernel
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.signals import status_of
from tileloom.scheduling import StaticPersistentScheduler, TileSchedulerParams
from tileloom.target import target_of


def layout_arguments(columns: int, itemsize: int) -> dict[str, Any]:
    """Shared-memory layout of a box `[1, rows, columns]`: the widest swizzle that fits."""
    swizzle = min(128, columns * itemsize)
    swizzle = 0 if swizzle < 32 else swizzle
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
    """Rows and columns of each descriptor's box; that of the output lies as C does."""
    (rows, columns), depth = config.warpgroup_tile(), config.block_k
    seen, tail = config.seen(problem), config.tail
    front = columns - tail
    width = min(columns, config.slice_columns(problem))
    return {
        "a_desc": (depth, rows) if seen.a_is_transposed else (rows, depth),
        "b_desc": (front, depth) if seen.b_is_transposed else (depth, front),
        "tail_desc": (tail, depth) if seen.b_is_transposed else (depth, tail),
        "edge_desc": (config.edge_box(problem), 64),
        "out_desc": (width, rows) if config.swap_ab else (rows, width),
    }


def constants(
    problem: MatmulProblem,
    config: GluonSm90Config,
    params: TileSchedulerParams,
    *,
    chunked: bool,
    any_value: bool = False,
) -> dict[str, object]:
    """The kernel's compile-time parameters for a problem.

    Args:
        problem: The product.
        config: Tile sizes.
        params: The schedule.
        chunked: Whether tiles wait for the flags of chunks.
        any_value: Whether a flag is there as soon as it is not 0.
    """
    seen = config.seen(problem)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages_of(problem),
        "BUFFERS": config.buffers(problem),
        "SWIZZLE": config.swizzle_size,
        "ALONG_M": params.raster_order == "along_m",
        "UNIFORM": params.rows_per_chunk > 0,
        "A_TRANSPOSED": seen.a_is_transposed,
        "B_TRANSPOSED": seen.b_is_transposed,
        "ACTIVATION": problem.activation,
        "HAS_BIAS": problem.bias_dtype is not None,
        "HAS_RESIDUAL": problem.residual is not None,
        "CHUNKED": chunked,
        "DYNAMIC": config.scheduler == "dynamic",
        "ANY": any_value,
        "SPLITS": config.splits,
        "SWAP_AB": config.swap_ab,
        "TAIL": config.tail,
        "EARLY": config.stores_early(problem),
        "BLOCK_K": config.block_k,
        "EDGE": config.edge_rows(problem),
    }


def params_of(
    problem: MatmulProblem, config: GluonSm90Config, **chunks: Any
) -> TileSchedulerParams:
    """The schedule of a problem; `chunks` are those arguments of `to_underlying_arguments`.

    Tiles that a counter deals go in groups of rows of any C: see docs/matmul_measurements.md.
    """
    seen = config.seen(problem)
    return TileSchedulerParams.to_underlying_arguments(
        *(seen.m, seen.n, seen.k, seen.l * config.splits),
        block=(config.block_m, config.block_n, config.block_k),
        raster_order="along_n" if config.scheduler == "dynamic" else "heuristic",
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
        `launch(a, b, bias, residual, out)`, which writes `out`, for tensors that lie like these and
        have the same types and alignments; a dimension of size 1 may be missing.
    """
    params = params_of(problem, config)
    shared = _shared(config, params)
    given = operator.itemgetter(*_places(problem, config))
    bound = prepared(matmul_kernel, num_warps=4, launch_pdl=True).bind(
        (StaticPersistentScheduler.get_grid_shape(params, target_of(a).sms),),
        *_tensors(problem, config, a, b, bias, residual, out),
        *(None, None, None, None, *(*shared(a), None, None)[:2], 0, 0),
        *_sizes(config.seen(problem), params),
        **constants(problem, config, params, chunked=False),
    )

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        bound.launch(*given((a, b, out, residual, bias)), *shared(a))

    return launch


def _places(problem: MatmulProblem, config: GluonSm90Config) -> list[int]:
    """What of (a, b, out, residual, bias) the kernel takes, in its order."""
    first, second = (1, 0) if config.swap_ab else (0, 1)
    return [
        *(first, second, *([second] if config.tail else [])),
        *([0] if config.edge_rows(problem) else []),
        *(2, *([] if problem.residual is None else [3])),
        *(2, *([] if problem.bias_dtype is None else [4])),
    ]


def _shared(
    config: GluonSm90Config, params: TileSchedulerParams
) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    """What blocks share, on the device of a tensor: a counter, counters and sums, or nothing."""
    if config.splits > 1:
        counts = config.consumers * params.blocks_per_problem // config.splits
        elements = params.blocks_per_problem * config.block_m * config.block_n
        return lambda like: (split_counters(like, counts), workspace(like, elements))
    if config.scheduler == "dynamic":
        return lambda like: (zero_counter(like),)
    return lambda like: ()


def bind_async_matmul(
    problem: MatmulProblem,
    config: GluonSm90Config,
    params: TileSchedulerParams,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    any_value: bool,
) -> Callable[..., None]:
    """Prepare the launch of a product whose rows of A may still be arriving.

    Args:
        problem: What `config.reasons_against` has accepted.
        config: Tile sizes.
        params: The schedule, with the chunks of A.
        a: `[1, m, k]`; like all tensors here an example, which is not kept.
        b: `[1, k, n]`.
        bias: `[n]`, contiguous, or None.
        residual: `[1, m, n]` or None.
        out: `[1, m, n]`.
        flags: uint32 `[chunks]`, contiguous.
        any_value: Whether a flag is there as soon as it is not 0.

    Returns:
        `launch(a, b, bias, residual, out, flags, epoch, timeout_us)`; epoch as a signed 32-bit
        number, a negative time waits for ever.
    """
    if a.is_cuda and is_settled(a.get_device()):
        usable(a.get_device())  # tests ways to launch by a kernel, which would wait behind ours
    table = None
    if not params.rows_per_chunk:
        table = torch.tensor(params.to_device(), dtype=torch.int32).to(a.device)
    shared = _shared(config, params)
    bound = prepared(matmul_kernel, num_warps=4, launch_pdl=True).bind(
        (StaticPersistentScheduler.get_grid_shape(params, target_of(a).sms),),
        *_tensors(problem, config, a, b, bias, residual, out),
        *(table, flags, status_of(a).seen, status_of(a).claim, *(*shared(a), None, None)[:2]),
        *(Number(0), Number(0)),
        *_sizes(problem, params),
        **constants(problem, config, params, chunked=True, any_value=any_value),
    )

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        flags: torch.Tensor,
        epoch: int,
        timeout_us: int,
    ) -> None:
        status = status_of(a)
        given = _present(a, b, b if config.tail else None, out, residual, out, bias, table, flags)
        bound.launch(*given, status.seen, status.claim, *shared(a), epoch, timeout_us)

    return launch


def _tensors(
    problem: MatmulProblem,
    config: GluonSm90Config,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[Any, ...]:
    """The kernel's first arguments: descriptors and pointers."""
    box, seen = boxes(problem, config), config.seen(problem)
    edge = descriptor(a, *box["edge_desc"]) if config.edge_rows(problem) else None
    if config.swap_ab:
        a, b = b.mT, a.mT
    b = b.mT if seen.b_is_transposed else b
    return (
        descriptor(a.mT if seen.a_is_transposed else a, *box["a_desc"]),
        descriptor(b, *box["b_desc"]),
        descriptor(b, *box["tail_desc"]) if config.tail else None,
        edge,
        descriptor(out, *box["out_desc"]),
        None if residual is None else descriptor(residual, *box["out_desc"]),
        out,
        bias,
    )


def _sizes(problem: MatmulProblem, params: TileSchedulerParams) -> tuple[int, ...]:
    """The kernel's numbers, from `m` on."""
    return (
        problem.m, problem.n, params.k_tiles, params.tiles_n, params.blocks_per_problem,
        params.rows_per_chunk, params.chunks, params.chunk_pivot,
    )  # fmt: skip


def _present(*tensors: Any) -> tuple[Any, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
