"""The shipped configs of the normalisations, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.rowwise.config import Tile
from tileloom.ops.rowwise.norm import arguments
from tileloom.ops.rowwise.norm.config import rule
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.specs import row_spec
from tileloom.target import H100

PROVED_32BIT: Mapping[str, str] = {}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer. None does."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ROWS = 4096


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every kernel in the forms that differ most."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return (
        forward_spec(problem(4096, bf16, is_centred=False)),
        forward_spec(problem(32760, fp32, is_centred=True, has_residual=True)),
        forward_split_spec(problem(2**20, bf16, is_centred=True, has_residual=True)),
        backward_spec(problem(4096, bf16, is_centred=False)),
        backward_spec(problem(8184, fp32, is_centred=True, has_residual=True)),
        backward_spec(problem(16384, bf16, is_centred=False)),
        backward_split_spec(problem(16384, fp32, is_centred=True, has_residual=True)),
        backward_split_spec(problem(2**20, bf16, is_centred=True, has_residual=True)),
        vectors_spec(problem(4096, bf16, is_centred=True)),
    )


def problem(
    width: int, dtype: torch.dtype, *, is_centred: bool, has_residual: bool = False
) -> NormProblem:
    """A call with everything that the operator has: layer norm a bias as well."""
    return NormProblem(
        rows=rows_of((_ROWS, width), [(width, 1)] * 4, dtype.itemsize),
        dtype=dtype,
        is_centred=is_centred,
        has_weight=True,
        has_bias=is_centred,
        has_residual=has_residual,
        is_backward=False,
    )


def _types(problem: NormProblem) -> tuple[str, str | None, str | None, str | None]:
    """Types of rows, of rows that come with a residual, of the bias, and of the mean."""
    kind = f"*{_SHORT[problem.dtype]}"
    return (
        kind,
        kind if problem.has_residual else None,
        "*fp32" if problem.has_bias else None,
        "*fp32" if problem.is_centred else None,
    )


def _name(kernel: str, problem: NormProblem, tile: Tile) -> str:
    form = "layer" if problem.is_centred else "rms"
    added = "-residual" if problem.has_residual else ""
    kind = f"n{problem.rows.width}-{form}{added}-{_SHORT[problem.dtype]}"
    stages = f"-s{tile.stages}" if tile.stages > 1 else ""
    return f"{kernel}[{kind}-{tile.block}x{tile.rows}-w{tile.num_warps}{stages}]"


def _forward_tile(problem: NormProblem) -> Tile:
    tile = rule(problem, H100).forward
    assert tile is not None
    return tile


def _backward_tile(problem: NormProblem) -> Tile:
    tile = rule(problem, H100).backward
    assert tile is not None
    return tile


def forward_spec(problem: NormProblem, tile: Tile | None = None) -> KernelSpec:
    """Spec of whole rows: float32 vectors, sums saved."""
    from tileloom.ops.rowwise.norm.kernel_triton_fwd import norm_fwd_kernel

    tile = tile or _forward_tile(problem)
    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, "*fp32", bias, rows, added, mean, "*fp32")
    _, fixed = arguments.forward(problem, tile, (None, None), 1e-5)
    return row_spec(
        _name("norm_fwd", problem, tile), norm_fwd_kernel, tensors, fixed, tile.num_warps
    )


def forward_split_spec(problem: NormProblem, tile: Tile | None = None) -> KernelSpec:
    """Spec of shared rows."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_fwd_split_kernel

    tile = tile or _forward_tile(problem)
    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, "*fp32", bias, rows, added, mean, "*fp32", "*i32", "*fp32")
    _, fixed = arguments.forward_split(problem, tile, (None, None), 1e-5)
    name = _name("norm_fwd_split", problem, tile)
    return row_spec(name, norm_fwd_split_kernel, tensors, fixed, tile.num_warps)


def backward_spec(problem: NormProblem, tile: Tile | None = None) -> KernelSpec:
    """Spec of whole rows: float32 vectors, whose gradients are wanted."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_bwd_kernel

    tile = tile or _backward_tile(problem)
    rows, added, _, mean = _types(problem)
    tensors = (rows, added, rows, "*fp32", mean, "*fp32", rows, "*fp32")
    _, fixed = arguments.backward(problem, tile, None, H100.sms)
    return row_spec(
        _name("norm_bwd", problem, tile), norm_bwd_kernel, tensors, fixed, tile.num_warps
    )


def backward_split_spec(problem: NormProblem, tile: Tile | None = None) -> KernelSpec:
    """Spec of shared rows."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_bwd_split_kernel

    tile = tile or _backward_tile(problem)
    rows, added, _, mean = _types(problem)
    tensors = (rows, added, rows, "*fp32", mean, "*fp32", rows, "*fp32", "*i32", "*fp32")
    _, fixed = arguments.backward_split(problem, tile, None, H100.sms)
    name = _name("norm_bwd_split", problem, tile)
    return row_spec(name, norm_bwd_split_kernel, tensors, fixed, tile.num_warps)


def vectors_spec(problem: NormProblem) -> KernelSpec:
    """Spec of the kernel that adds up the shares of dweight and dbias."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_vectors_kernel

    _, fixed = arguments.vectors(problem, H100.sms)
    tensors = ("*fp32", "*fp32", "*fp32" if problem.has_bias else None)
    return row_spec("norm_vectors[fp32]", norm_vectors_kernel, tensors, fixed, 8)
