"""The shipped configs of the normalisations, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.rowwise.config import Tile
from tileloom.ops.rowwise.norm import arguments
from tileloom.ops.rowwise.norm.config import rule
from tileloom.ops.rowwise.norm.problem import NormProblem
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.specs import row_spec
from tileloom.target import H100, SMEM_BYTES, Target

PROVED_32BIT: Mapping[str, str] = {
    "norm_bwd_few_kernel": "columns are below a row's width, which is at most 2^30 elements",
    "norm_fwd_cluster_kernel": "columns are below CTAS * BLOCK, at most 2^17 elements",
    "norm_fwd_walk_kernel": "rows are fewer than 2^31, columns below CTAS * BLOCK, at most 2^18",
    "norm_bwd_walk_kernel": "rows are fewer than 2^31, columns below CTAS * BLOCK, at most 2^17",
    "norm_bwd_ring_kernel": "columns are below CHUNKS * BLOCK, which fits into shared memory",
}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_TARGETS = tuple(Target("cuda", each, H100.sms, smem, "any") for each, smem in SMEM_BYTES.items())

_ON_H100 = "H100, Triton 3.6.0, 2026-11-28, share of copy bandwidth: "
_ON_H200 = "H200, Triton 3.6.0, 2026-11-28, share of copy bandwidth: "
_SPILLS: Mapping[tuple[str, int], tuple[int, str]] = {
    ("norm_fwd", 32768): (16, _ON_H100 + "0.98; two programs a row, which spill nothing, 0.84."),
    ("norm_fwd_split", 16384): (
        832,
        _ON_H200 + "0.60 of 2^20 columns; 0.58 with 32 warps, which spill less; smaller parts "
        "would be more than may wait for each other.",
    ),
    ("norm_bwd", 16384): (144, _ON_H200 + "0.87; two programs a row, which spill nothing, 0.63."),
    ("norm_bwd_ring", 4096): (48, _ON_H200 + "0.74; shared rows, which spill nothing, 0.55."),
    ("norm_bwd_walk", 8192): (40, _ON_H200 + "0.83 (Triton 3.6, no spills); a ring 0.69."),
    ("norm_bwd_walk", 16384): (24, _ON_H200 + "0.71 (Triton 3.6, no spills); shared rows 0.49."),
    ("norm_bwd_split", 16384): (
        1800,
        _ON_H200 + "0.41 of 2^20 columns (rms norm); 0.34 with 32 warps, which spill less; smaller "
        "parts would be more than may wait for each other.",
    ),
}
"""Kernel and block -> bytes allowed on any Triton, and the measurement that justifies them."""

_Maker = Callable[[NormProblem, Tile, Target], KernelSpec]


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every kernel in the forms that differ most, for each target's own tiles."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return (
        *_of(forward_spec, problem(4096, bf16, is_centred=False)),
        *_of(forward_spec, problem(16384, bf16, is_centred=True)),
        *_of(forward_spec, problem(32760, fp32, is_centred=True, has_residual=True)),
        *_of(forward_split_spec, problem(2**20, bf16, is_centred=True, has_residual=True)),
        *_of(forward_cluster_spec, problem(65536, bf16, is_centred=True)),
        *_of(forward_walk_spec, walked(131072, 2, is_centred=False)),
        *_of(forward_walk_spec, walked(131072, 2, is_centred=True)),
        *_of(forward_walk_spec, walked(32768, 2, is_centred=True)),
        *_of(forward_walk_spec, walked(16384, 4, is_centred=True)),
        *_of(backward_spec, problem(1024, bf16, is_centred=False)),
        *_of(backward_spec, problem(8184, fp32, is_centred=True, has_residual=True)),
        *_of(backward_spec, problem(16384, bf16, is_centred=False)),
        *_of(backward_walk_spec, walked(131072, 2, is_centred=False, is_backward=True)),
        *_of(backward_walk_spec, walked(131072, 2, is_centred=True, is_backward=True)),
        *_of(backward_walk_spec, walked(16384, 4, is_centred=False, is_backward=True)),
        *_of(backward_walk_spec, walked(16384, 4, is_centred=True, is_backward=True)),
        *_of(backward_walk_spec, walked(16384, 2, is_centred=True, is_backward=True)),
        *_of(backward_ring_spec, problem(16384, bf16, is_centred=True)),
        *_of(backward_ring_spec, problem(5120, bf16, is_centred=True, has_residual=True)),
        *_of(backward_few_spec, problem(4096, bf16, is_centred=True, has_residual=True, rows=16)),
        *_of(backward_split_spec, problem(16384, fp32, is_centred=True, has_residual=True)),
        *_of(backward_split_spec, problem(2**20, bf16, is_centred=True, has_residual=True)),
        *_of(vectors_spec, problem(4096, bf16, is_centred=True)),
    )


def _of(make: _Maker, problem: NormProblem) -> Iterator[KernelSpec]:
    """One spec for each tile that the rule gives, for the architectures that it gives it for."""
    alike: dict[tuple[Tile, bool], list[Target]] = {}
    for target in _TARGETS:
        tiles = rule(problem, target)
        is_forward = make in _FORWARD
        tile = tiles.forward if is_forward else tiles.backward
        assert tile is not None
        if tile.ring != (make in (backward_ring_spec, forward_walk_spec, backward_walk_spec)):
            continue
        if (tile.ctas > 1) != (
            make in (forward_cluster_spec, forward_walk_spec, backward_walk_spec)
        ):
            continue
        is_one = is_forward or make is backward_few_spec
        alike.setdefault((tile, not is_one and arguments.overlaps(target)), []).append(target)
    for (tile, _), targets in alike.items():
        spec = make(problem, tile, targets[-1])
        names = [target.arch for target in targets]
        spills, reason = _SPILLS.get((spec.name.partition("[")[0], tile.block), (0, ""))
        yield replace(spec, archs=tuple(names), spill_budget=spills, spill_reason=reason)


def problem(
    width: int,
    dtype: torch.dtype,
    *,
    is_centred: bool,
    has_residual: bool = False,
    rows: int = 4096,
) -> NormProblem:
    """A call with everything that the operator has: layer norm a bias as well."""
    return NormProblem(
        rows=rows_of((rows, width), [(width, 1)] * 4, dtype.itemsize),
        dtype=dtype,
        is_centred=is_centred,
        has_weight=True,
        has_bias=is_centred,
        has_residual=has_residual,
        is_backward=False,
    )


def walked(
    width: int, weight_bytes: int, *, is_centred: bool, is_backward: bool = False
) -> NormProblem:
    """A call in bfloat16 whose rows clusters walk over, forward unless told otherwise."""
    asked = problem(width, torch.bfloat16, is_centred=is_centred)
    return replace(asked, weight_bytes=weight_bytes, is_backward=is_backward)


def _types(problem: NormProblem) -> tuple[str, str | None, str | None, str | None]:
    """Types of rows, of rows that come with a residual, of the bias, and of the mean."""
    kind = f"*{_SHORT[problem.dtype]}"
    return (
        kind,
        kind if problem.has_residual else None,
        "*fp32" if problem.has_bias else None,
        "*fp32" if problem.is_centred else None,
    )


def _name(kernel: str, problem: NormProblem, tile: Tile, *, overlaps: bool = False) -> str:
    form = "layer" if problem.is_centred else "rms"
    added = "-residual" if problem.has_residual else ""
    kind = f"n{problem.rows.width}-{form}{added}-{_SHORT[problem.dtype]}"
    stages = f"-s{tile.stages}" if tile.stages > 1 else ""
    over = "-overlapped" if overlaps else ""
    ctas = f"-c{tile.ctas}" if tile.ctas > 1 else ""
    return f"{kernel}[{kind}-{tile.block}x{tile.rows}-w{tile.num_warps}{stages}{ctas}{over}]"


def forward_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of whole rows: float32 vectors, sums saved."""
    from tileloom.ops.rowwise.norm.kernel_triton_fwd import norm_fwd_kernel

    del target
    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, "*fp32", bias, rows, added, mean, "*fp32")
    _, fixed = arguments.forward(problem, tile, (None, None), 1e-5)
    return row_spec(
        _name("norm_fwd", problem, tile), norm_fwd_kernel, tensors, fixed, tile.num_warps
    )


def forward_split_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of shared rows."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_fwd_split_kernel

    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, "*fp32", bias, rows, added, mean, "*fp32", "*i32")
    _, fixed = arguments.forward_split(problem, tile, (None, None), 1e-5, target.sms)
    name = _name("norm_fwd_split", problem, tile)
    return row_spec(name, norm_fwd_split_kernel, tensors, fixed, tile.num_warps, tile.registers)


def forward_cluster_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of rows that a cluster takes."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_fwd import norm_fwd_cluster_kernel

    del target
    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, "*fp32", bias, rows, added, mean, "*fp32")
    _, fixed = arguments.forward_cluster(problem, tile, 1e-5)
    return row_spec(
        _name("norm_fwd_cluster", problem, tile), norm_fwd_cluster_kernel, tensors, fixed,
        tile.num_warps, tile.register_bound, ctas=tile.ctas,
    )  # fmt: skip


def forward_walk_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of rows that clusters walk over; vectors as `weight_bytes`."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_fwd_walk import norm_fwd_walk_kernel

    rows, _, bias, mean = _types(problem)
    vector = "*fp32" if problem.weight_bytes == 4 else rows
    tensors = (rows, vector, vector if bias else None, rows, mean, "*fp32")
    _, fixed = arguments.forward_walk(problem, tile, 1e-5, target.sms // tile.ctas)
    return row_spec(
        _name("norm_fwd_walk", problem, tile), norm_fwd_walk_kernel, tensors, fixed, tile.num_warps,
        tile.register_bound, ctas=tile.ctas,
    )  # fmt: skip


def backward_walk_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of rows that clusters walk over; vectors as `weight_bytes`."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_bwd_walk import norm_bwd_walk_kernel

    rows, _, _, mean = _types(problem)
    vector = "*fp32" if problem.weight_bytes == 4 else rows
    tensors = (rows, rows, vector, mean, "*fp32", rows, "*fp32")
    _, fixed = arguments.backward_walk(problem, tile, target.sms // tile.ctas, target)
    return row_spec(
        _name("norm_bwd_walk", problem, tile), norm_bwd_walk_kernel, tensors, fixed, tile.num_warps,
        tile.register_bound, ctas=tile.ctas,
    )  # fmt: skip


def backward_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of whole rows: float32 vectors, whose gradients are wanted."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_bwd_kernel

    rows, added, _, mean = _types(problem)
    tensors = (rows, added, rows, "*fp32", mean, "*fp32", rows, "*fp32")
    _, fixed = arguments.backward(problem, tile, None, target)
    name = _name("norm_bwd", problem, tile, overlaps=arguments.overlaps(target))
    return row_spec(name, norm_bwd_kernel, tensors, fixed, tile.num_warps)


def backward_ring_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of whole rows that come through a ring of shared memory; vectors as `weight_bytes`."""
    from tileloom.ops.rowwise.norm.kernel_gluon_sm90_bwd import norm_bwd_ring_kernel

    rows, added, _, mean = _types(problem)
    weight = "*fp32" if problem.weight_bytes == 4 else rows
    tensors = (rows, added, rows, weight, mean, "*fp32", rows, "*fp32")
    _, fixed = arguments.backward_ring(problem, tile, target)
    name, registers = _name("norm_bwd_ring", problem, tile), tile.register_bound
    spec = row_spec(name, norm_bwd_ring_kernel, tensors, fixed, tile.num_warps, registers)
    return replace(spec, gluon=True)


def backward_few_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of few rows, with the gradients of the vectors in the same launch."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd_few import norm_bwd_few_kernel

    del target
    rows, added, bias, mean = _types(problem)
    tensors = (rows, added, rows, "*fp32", mean, "*fp32", rows, "*fp32", bias)
    _, fixed = arguments.backward_few(problem, tile, None)
    name = _name("norm_bwd_few", problem, tile)
    return row_spec(name, norm_bwd_few_kernel, tensors, fixed, tile.num_warps)


def backward_split_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of shared rows."""
    from tileloom.ops.rowwise.norm.kernel_triton_split import norm_bwd_split_kernel

    rows, added, _, mean = _types(problem)
    tensors = (rows, added, rows, "*fp32", mean, "*fp32", rows, "*fp32", "*i32")
    _, fixed = arguments.backward_split(problem, tile, None, target)
    name = _name("norm_bwd_split", problem, tile, overlaps=arguments.overlaps(target))
    return row_spec(name, norm_bwd_split_kernel, tensors, fixed, tile.num_warps, tile.registers)


def vectors_spec(problem: NormProblem, tile: Tile, target: Target) -> KernelSpec:
    """Spec of the kernel that adds up the shares of dweight and dbias."""
    from tileloom.ops.rowwise.norm.kernel_triton_bwd import norm_vectors_kernel

    del tile
    _, fixed = arguments.vectors(problem, target.sms, target, halves=False)
    tensors = ("*fp32", "*fp32", "*fp32" if problem.has_bias else None)
    overlaps = arguments.overlaps(target)
    name = f"norm_vectors[fp32{'-overlapped' if overlaps else ''}]"
    spec = row_spec(name, norm_vectors_kernel, tensors, fixed, 8)
    return replace(spec, options={"launch_pdl": True}) if overlaps else spec


_FORWARD = (forward_spec, forward_split_spec, forward_cluster_spec, forward_walk_spec)
