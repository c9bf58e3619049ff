"""The launch of the kernel for one row: grid, strides in units, and what it is told."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileloom.launch.launcher import prepared
from tileloom.ops.gemm.config_matvec import MatvecConfig, overlaps
from tileloom.ops.gemm.kernel_triton_matvec import matvec_kernel
from tileloom.ops.gemm.launch_triton import in_units, of_tensors
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.target import Target, target_of


def arguments(
    problem: MatmulProblem, config: MatvecConfig, target: Target
) -> tuple[tuple[int, ...], dict[str, object]]:
    """The kernel's numbers, from `n` on, and its compile-time parameters for a problem."""
    p = problem
    a_unit, a = in_units(p.a, (p.l, p.m, p.k), p.dtype.itemsize)
    if a_unit <= 0:
        a_unit, a = 0, p.a.strides
    widest = 16 // p.dtype.itemsize
    b_l, _, b_n = (s if size > 1 else 0 for s, size in zip(p.b.strides, (p.l, p.k, p.n)))
    b_unit = widest if not (p.k % widest or b_l % widest or b_n % widest) else 1
    residual = (0, 0, 0) if p.residual is None else p.residual.strides
    numbers = (
        *(p.n, p.k // b_unit, -(-p.n // config.block_n)),
        *(*a[::2], b_l // b_unit, b_n // b_unit, *residual[::2], *p.out.strides[::2]),
    )
    return numbers, {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "IS_WHOLE": p.k % config.block_k == 0,
        "ACTIVATION": p.activation,
        "HAS_BIAS": p.bias_dtype is not None,
        "HAS_RESIDUAL": p.residual is not None,
        "A_UNIT": a_unit,
        "B_UNIT": b_unit,
        "PDL": overlaps(target),
    }


def bind_matmul(
    problem: MatmulProblem,
    config: MatvecConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> Callable[..., None]:
    """Prepare the launch; arguments and result are those of the Hopper kernel's `bind_matmul`."""
    numbers, constexprs = arguments(problem, config, target_of(a))
    options = {"launch_pdl": True} if constexprs["PDL"] else {}
    blocks = -(-problem.n // config.block_n) * problem.l
    bound = prepared(matvec_kernel, num_warps=config.num_warps, **options).bind(
        (blocks,), a, b, bias, residual, out, *numbers, **constexprs
    )

    return of_tensors(bound)
