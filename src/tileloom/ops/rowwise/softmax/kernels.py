"""The shipped configs of the softmax kernels, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.softmax.config import softmax_rule
from tileloom.ops.rowwise.softmax.problem import (
    SoftmaxProblem,
    backward_problem,
    forward_problem,
)
from tileloom.ops.rowwise.specs import row_spec
from tileloom.target import H100

if TYPE_CHECKING:
    from tileloom.ops.rowwise.softmax.plans import Step

PROVED_32BIT: Mapping[str, str] = {
    "softmax_fwd_cluster_kernel": "columns are below CTAS * BLOCK, at most 2^17 elements",
    "softmax_fwd_split_kernel": "`part` is below `2 * parts`, and a row has at most 2^14 parts",
    "softmax_bwd_split_kernel": "`part` is below `parts`, and a row has at most 2^14 of them",
}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_SPILLS: Mapping[str, tuple[int, str]] = {
    "1048576-fp32": (8, "Two registers on sm_100 with Triton 3.7.1, else none."),
}
_WALK = TritonConfig(Tile(8192, 1, 8), Tile(4096, 1, 8))


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every kernel in the forms that differ most."""
    bf16, fp32 = torch.bfloat16, torch.float32
    specs: list[KernelSpec] = []
    sizes = ((128, fp32), (4096, bf16), (16384, fp32), (16384, bf16), (32768, bf16), (2**20, fp32))
    for width, dtype in sizes:
        specs += _both(f"{width}", torch.empty((4096, width), dtype=dtype, device="meta"))
    specs += _both("131072", torch.empty((512, 131072), dtype=bf16, device="meta"))
    # No vector loads, and a mask of another layout.
    odd = torch.empty((2, 8, 512, 50257), dtype=torch.float16, device="meta")
    mask = torch.empty((2, 1, 512, 50257), dtype=torch.bool, device="meta")
    specs += _both("odd-mask", odd, mask)
    specs += _both("odd-mask-walk", odd, mask, _WALK)
    strided = torch.empty((2000, 512), dtype=bf16, device="meta").t()
    specs += _both("strided", strided)
    specs += _both("walk", torch.empty((512, 2**20), dtype=bf16, device="meta"), None, _WALK)
    return tuple(specs)


def _both(
    name: str, x: torch.Tensor, mask: torch.Tensor | None = None, config: TritonConfig | None = None
) -> list[KernelSpec]:
    """Forward and backward as the rule or a config has them on an H100."""
    forward, backward = forward_problem(x, mask), backward_problem(x, x)
    return [
        _forward(name, forward, config or softmax_rule(forward, H100)),
        _backward(name, backward, config or softmax_rule(backward, H100)),
    ]


def _forward(name: str, problem: SoftmaxProblem, config: TritonConfig) -> KernelSpec:
    from tileloom.ops.rowwise.softmax.plans import forward_step

    tile = config.forward
    assert tile is not None
    step = forward_step(problem, tile)
    short = _SHORT[problem.dtype]
    tensors = (f"*{short}", "*u8" if problem.has_mask else None, f"*{short}", *_words(step))
    spills = _SPILLS.get(f"{name}-{short}", (0, ""))
    if tile.ctas > 1:
        title = f"softmax_fwd_cluster[{name}-{short}]"
        return row_spec(
            title, step.kernel, (f"*{short}",) * 2, step.fixed, tile.num_warps, tile.register_bound,
            ("sm_90",), ctas=tile.ctas,
        )  # fmt: skip
    title = f"softmax_fwd_triton[{name}-{short}]"
    return row_spec(title, step.kernel, tensors, step.fixed, tile.num_warps, spills=spills)


def _backward(name: str, problem: SoftmaxProblem, config: TritonConfig) -> KernelSpec:
    from tileloom.ops.rowwise.softmax.plans import backward_step

    tile = config.backward
    assert tile is not None
    step = backward_step(problem, tile)
    short = _SHORT[problem.dtype]
    tensors = (*(f"*{short}",) * 3, *_words(step))
    title = f"softmax_bwd_triton[{name}-{short}]"
    return row_spec(title, step.kernel, tensors, step.fixed, tile.num_warps)


def _words(step: Step) -> tuple[str, ...]:
    return ("*i32",) if step.words else ()
