"""The launch of the portable GEMM: grid, strides in units, and what the kernel is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tileloom.launch.bound import BoundLaunch
from tileloom.launch.launcher import prepared
from tileloom.launch.layout import Layout
from tileloom.ops.gemm.config import TritonConfig
from tileloom.ops.gemm.kernel_triton import matmul_portable_kernel
from tileloom.ops.gemm.problem import MatmulProblem

_SIZE_UNIT = 16
Strides = tuple[int, ...]


def in_units(layout: Layout, sizes: Sequence[int], itemsize: int) -> tuple[int, Strides]:
    """Unit and strides of `[l, rows, columns]` as the kernel takes them; see its docstring."""
    batch, row, column = strides = [s if n > 1 else 0 for s, n in zip(layout.strides, sizes)]
    if column == 1 or sizes[2] == 1:
        direction, outer = 1, (batch, row)
    elif row == 1 or sizes[1] == 1:
        direction, outer = -1, (batch, column)
    else:
        return 0, tuple(strides)
    widest = 16 // itemsize
    unit = 1 if any(s % widest for s in outer) else widest
    return direction * unit, tuple(s // unit for s in strides)


def arguments(
    problem: MatmulProblem, config: TritonConfig
) -> tuple[tuple[int, ...], dict[str, object]]:
    """The kernel's numbers, from `m` on, and its compile-time parameters for a problem."""
    p = problem
    a_unit, a = in_units(p.a, (p.l, p.m, p.k), p.dtype.itemsize)
    b_unit, b = in_units(p.b, (p.l, p.k, p.n), p.dtype.itemsize)
    o_unit, out = in_units(p.out, (p.l, p.m, p.n), p.out_dtype.itemsize)
    r_unit, residual = 0, (0, 0, 0)
    if p.residual is not None and p.residual_dtype is not None:
        r_unit, residual = in_units(p.residual, (p.l, p.m, p.n), p.residual_dtype.itemsize)
    # What is read in vectors ends at one as well: the compiler must know it from the size.
    is_along = {
        "M_UNIT": min(a_unit, r_unit, o_unit) < -1,
        "N_UNIT": max(b_unit, r_unit, o_unit) > 1,
        "K_UNIT": a_unit > 1 or b_unit < -1,
    }
    units = {
        name: _SIZE_UNIT if is_along[name] and size % _SIZE_UNIT == 0 else 1
        for name, size in zip(is_along, (p.m, p.n, p.k))
    }
    numbers = (
        *(size // unit for size, unit in zip((p.m, p.n, p.k), units.values())),
        *(-(-p.m // config.block_m), -(-p.n // config.block_n)),
        *(*a, *b, *residual, *out),
    )
    return numbers, {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWIZZLE": config.swizzle_size,
        "ACTIVATION": p.activation,
        "HAS_BIAS": p.bias_dtype is not None,
        "HAS_RESIDUAL": p.residual is not None,
        "A_UNIT": a_unit,
        "B_UNIT": b_unit,
        "R_UNIT": r_unit,
        "O_UNIT": o_unit,
        **units,
    }


def of_tensors(bound: BoundLaunch) -> Callable[..., None]:
    """Take a call's tensors, None where the kernel was bound without one."""

    def launch(*tensors: torch.Tensor | None) -> None:
        bound.launch(*(tensor for tensor in tensors if tensor is not None))

    return launch


def bind_matmul(
    problem: MatmulProblem,
    config: TritonConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> Callable[..., None]:
    """Prepare the launch; arguments and result are those of the Hopper kernel's `bind_matmul`."""
    numbers, constexprs = arguments(problem, config)
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.l
    bound = prepared(
        matmul_portable_kernel, num_warps=config.num_warps, num_stages=config.num_stages
    ).bind((tiles,), a, b, bias, residual, out, 1.0, *numbers, **constexprs)

    return of_tensors(bound)
