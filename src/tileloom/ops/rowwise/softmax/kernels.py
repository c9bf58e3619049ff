"""The shipped configs of the softmax kernels, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tileloom.launch.aot import KernelSpec
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

PROVED_32BIT: Mapping[str, str] = {}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer. None does."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_WIDTHS = (8, 128, 1024, 4096, 16384, 32768, 131072)


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every tile of the rule, and for the layouts that change the code most."""
    specs: list[KernelSpec] = []
    for width in _WIDTHS:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.empty((4096, width), dtype=dtype, device="meta")
            specs.append(_forward(f"{width}", forward_problem(x, None), dtype))
            specs.append(_backward(f"{width}", backward_problem(x, x), dtype))
    for width in (1001, 40001):  # no vector loads, and a mask of another layout
        x = torch.empty((2, 8, 512, width), dtype=torch.float16, device="meta")
        mask = torch.empty((2, 1, 512, width), dtype=torch.bool, device="meta")
        specs.append(_forward(f"{width}-mask", forward_problem(x, mask), x.dtype))
        specs.append(_backward(f"{width}", backward_problem(x, x), x.dtype))
    x = torch.empty((40000, 512), dtype=torch.float16, device="meta").t()
    specs.append(_forward("strided", forward_problem(x, None), x.dtype))
    specs.append(_backward("strided", backward_problem(x, x), x.dtype))
    return tuple(specs)


def _forward(name: str, problem: SoftmaxProblem, dtype: torch.dtype) -> KernelSpec:
    from tileloom.ops.rowwise.softmax.plans import forward_step

    tile = softmax_rule(problem, H100).forward
    assert tile is not None
    step = forward_step(problem, tile)
    short = _SHORT[dtype]
    tensors = (f"*{short}", "*u8" if problem.has_mask else None, f"*{short}", *_workspace(step))
    title = f"softmax_fwd_triton[{name}-{short}]"
    return row_spec(title, step.kernel, tensors, step.fixed, tile.num_warps)


def _backward(name: str, problem: SoftmaxProblem, dtype: torch.dtype) -> KernelSpec:
    from tileloom.ops.rowwise.softmax.plans import backward_step

    tile = softmax_rule(problem, H100).backward
    assert tile is not None
    step = backward_step(problem, tile)
    short = _SHORT[dtype]
    tensors = (*(f"*{short}",) * 3, *_workspace(step))
    title = f"softmax_bwd_triton[{name}-{short}]"
    return row_spec(title, step.kernel, tensors, step.fixed, tile.num_warps)


def _workspace(step: Step) -> tuple[str, ...]:
    return ("*i32", "*fp32") if step.counters else ()
