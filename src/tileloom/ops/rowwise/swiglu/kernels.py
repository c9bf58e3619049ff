"""The shipped configs of SwiGLU's kernels, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.specs import row_spec
from tileloom.ops.rowwise.swiglu.config import rule
from tileloom.ops.rowwise.swiglu.plans import arguments
from tileloom.ops.rowwise.swiglu.problem import SwigluProblem
from tileloom.target import H100

PROVED_32BIT: Mapping[str, str] = {}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer. None does."""


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec of both kernels, on halves of one tensor."""
    from tileloom.ops.rowwise.swiglu import kernel_triton as kernel

    specs: list[KernelSpec] = []
    for short, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        half, whole = (2 * 11008, 1), (11008, 1)
        strides = [half, half, whole, whole, whole]
        for name, function, count in (
            ("swiglu_fwd", kernel.swiglu_fwd_kernel, 3),
            ("swiglu_bwd", kernel.swiglu_bwd_kernel, 5),
        ):
            rows = rows_of((4096, 11008), strides[:count], dtype.itemsize)
            problem = SwigluProblem(rows, dtype)
            tile = rule(problem, H100).forward
            assert tile is not None
            _, fixed = arguments(problem, tile)
            tensors = (f"*{short}",) * count
            specs.append(
                row_spec(f"{name}[n11008-{short}]", function, tensors, fixed, tile.num_warps)
            )
    return tuple(specs)
