"""Every shipped config of the portable attention backward, to be compiled with no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.attention.config_backward import Tile, triton_backward_rule
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import SMEM_BYTES, Target

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_PIECE = "tileloom.ops.attention.kernel_triton_bwd"
_FILES = {
    "attention_dkv_kernel": _PIECE,
    "attention_dq_kernel": _PIECE,
    "attention_dbias_kernel": f"{_PIECE}_bias",
    "attention_weight_kernel": f"{_PIECE}_rows",
    "attention_delta_kernel": f"{_PIECE}_rows",
}


_OCCUPANCY = (
    "ptxas (Triton 3.7.1) takes 96 and 64 of 255 registers for sm_100, for its own choice of "
    "occupancy, and stores two; none on sm_80 and sm_90. No sm_100 was there to measure."
)
_ON_H200 = "H200, Triton 3.6.0, 2026-11-28, the whole backward, "
_NARROW = _ON_H200 + "causal, B 2, H 8, L 2048: 0.285 ms; with 8 warps and no spills 0.387."
_SPILLS: Mapping[str, tuple[int, str]] = {
    "attention_dbias_triton[d64-window-lengths-mask-bias-bf16-64x32-w4-s1]": (8, _OCCUPANCY),
    "attention_weight_triton[d64-window-lengths-mask-bias-fp32-32x32-w8-s1-c16]": (8, _OCCUPANCY),
    "attention_dkv_triton[d128-window-lengths-bf16-32x64-w4-s1]": (272, _NARROW),
    "attention_dkv_triton[d128-packed-causal-bf16-32x64-w4-s1]": (272, _NARROW),
    "attention_dkv_triton[d128-window-lengths-mask-bias-bf16-32x64-w8-s1]": (
        216,
        _ON_H200 + "a bias, B 2, H 8, L 2048: 2.00 ms; with 16 rows and no spills 2.36.",
    ),
    "attention_dkv_triton[d256-window-lengths-bf16-64x32-w8-s1]": (
        16,
        _ON_H200 + "causal, B 2, H 4, L 2048: 0.540 ms; with 32 rows and no spills 0.696.",
    ),
    "attention_dq_triton[d256-window-lengths-bf16-64x64-w8-s1]": (
        96,
        _ON_H200 + "causal, B 2, H 4, L 2048: 0.627 ms; with 32 keys and no spills 0.696.",
    ),
    "attention_dkv_triton[d64-causal-fp32-32x32-w4-s1-c32]": (
        12,
        _ON_H200 + "full, B 2, H 16, L 1024: 5.41 ms; with 8 warps and no spills 6.61.",
    ),
}
"""Name -> bytes allowed on any architecture, and why."""


def triton_backward_specs(
    problems: Iterable[tuple[AttentionProblem, str]],
) -> Iterator[KernelSpec]:
    """Give the specs of the kernels that the gradients of some problems take.

    Args:
        problems: Problems, each with the name of its form. The kernels that only a bias or float32
            needs are given for head dim 64 alone, that of delta for head dim 128.
    """
    from tileloom.ops.attention.launch_triton_bwd import dkv_launches

    for problem, form in problems:
        calls: list[tuple[str, Mapping[str, bool]]] = [
            *(("attention_dkv_kernel", results) for results in dkv_launches(problem)),
            ("attention_dq_kernel", {}),
        ]
        if problem.head_dim == 64 and problem.has_bias:
            calls += [("attention_dbias_kernel", {}), ("attention_weight_kernel", {})]
        if problem.head_dim == 128 and not problem.has_bias:
            calls.append(("attention_delta_kernel", {}))
        for kernel, results in calls:
            archs: dict[Tile, list[str]] = {}
            for capability, smem in SMEM_BYTES.items():
                target = Target("cuda", capability, 1, smem, "any")
                config = triton_backward_rule(problem, target)
                tile = config.dkv if kernel == "attention_dkv_kernel" else config.dq
                if kernel == "attention_delta_kernel":
                    tile = Tile()
                archs.setdefault(tile, []).append(target.arch)
            for tile, names in archs.items():
                yield backward_spec(kernel, problem, form, tile, tuple(names), results)


def backward_spec(
    kernel: str,
    problem: AttentionProblem,
    form: str,
    tile: Tile,
    archs: tuple[str, ...],
    results: Mapping[str, bool],
) -> KernelSpec:
    """Describe one kernel for one problem, whose tensors are contiguous and aligned."""
    from tileloom.ops.attention.kernel_triton_bwd import INT32_ARGUMENTS, INT64_ARGUMENTS
    from tileloom.ops.attention.kernel_triton_bwd_bias import BIAS_ARGUMENTS
    from tileloom.ops.attention.launch_triton_bwd import constants, parameters

    dtype = _SHORT[problem.dtype]
    given: dict[str, object] = {
        **constants(problem, tile),
        **results,
        "VECTOR": 16 // problem.dtype.itemsize,
        # A mask and a bias with a row for each query, the bias unaligned: the costliest form.
        "MASK_MODE": 2 if problem.has_mask else 0,
        "MASK_VECTOR": 16 if problem.has_mask else 0,
        "BIAS_MODE": 2 if problem.has_bias else 0,
        "BIAS_VECTOR": 1 if problem.has_bias else 0,
        "DBIAS_VECTOR": 16 // problem.dtype.itemsize,
        "BIAS_GRAD": problem.has_bias,
        "HAS_DQ": True,
        "SUM_ROWS": False,
        "SUM_KEYS": False,
    }
    types = {
        **dict.fromkeys(("do", "q", "k", "v", "out", "dq", "dk", "dv", "bias"), f"*{dtype}"),
        **dict.fromkeys(("lse", "dlse", "delta", "weight"), "*fp32"),
        "dbias": f"*{dtype}" if kernel == "attention_dq_kernel" else "*fp32",
        "mask": "*u8",
        **dict.fromkeys(("lengths", "cu_q", "cu_k"), "*i32"),
        **dict.fromkeys(("scale", "scale_out", "keep_scale"), "fp32"),
        **dict.fromkeys(INT64_ARGUMENTS, "i64"),
        **dict.fromkeys((*INT32_ARGUMENTS, *BIAS_ARGUMENTS), "i32"),
        "share": "i64",
    }
    absent = {
        "mask": not problem.has_mask,
        "bias": not problem.has_bias,
        "dbias": not problem.has_bias,
        **dict.fromkeys(("seed_at", "offset_at"), True),  # seed and offset come as numbers
        "lengths": not problem.has_key_lengths,
        **dict.fromkeys(("cu_q", "cu_k"), problem.packed is None),
        "weight": not given["WEIGHTED"],
        "flags": True,  # of other backends
    }
    constexprs: dict[str, Any] = {}
    signature: dict[str, str] = {}
    for name in parameters(_FILES[kernel], kernel):
        if name in given or absent.get(name, False):
            constexprs[name] = given.get(name)
            signature[name] = "constexpr"
        else:
            signature[name] = types[name]
    tiles = f"{tile.block_m}x{tile.block_n}-w{tile.num_warps}-s{tile.num_stages}"
    tiles += f"-c{tile.chunk_d}" if tile.chunk_d else ""
    written = kernel.removeprefix("attention_").removesuffix("_kernel")
    if written == "dkv" and not all(results.values()):
        written = "dk" if results["HAS_DK"] else "dv"
    name = f"attention_{written}_triton[d{problem.head_dim}-{form}-{dtype}-{tiles}]"
    spills, reason = _SPILLS.get(name, (0, ""))
    return KernelSpec(
        name=name,
        function=f"{_FILES[kernel]}:{kernel}",
        gluon=False,
        signature=signature,
        constexprs=constexprs,
        archs=archs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*") and n != "bias"),
        spill_budget=spills,
        spill_reason=reason,
    )
