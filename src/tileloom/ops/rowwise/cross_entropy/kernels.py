"""The shipped configs of the cross-entropy kernels, as something that compiles with no GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tileloom.launch.aot import KernelSpec
from tileloom.ops.rowwise.cross_entropy.config import cross_entropy_rule
from tileloom.ops.rowwise.cross_entropy.problem import (
    Options,
    backward_problem,
    forward_problem,
)
from tileloom.ops.rowwise.specs import row_spec
from tileloom.target import H100

PROVED_32BIT: Mapping[str, str] = {
    "cross_entropy_fwd_kernel": "`start + inside` is a column of a row, and a row has at most 2^30",
    "cross_entropy_bwd_kernel": "`start + inside` is a column of a row, and a row has at most 2^30",
}
"""Kernel name -> proof, for each that adds a 32-bit offset to a pointer."""

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_SPILLS: Mapping[str, tuple[int, str]] = {
    "bwd[50257-shifted-all-bf16]": (8, "Two registers on sm_100 with Triton 3.7.1, else none."),
}
_PLAIN = Options(0.0, -100, 0.0, "mean")
_ALL = Options(0.1, -100, 30.0, "none")


def shipped() -> tuple[KernelSpec, ...]:
    """Return a spec for every kernel in the forms that differ most."""

    def logits(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((4, 2048, width), dtype=dtype, device="meta")

    return (
        *_specs("16", logits(16, torch.float16), _PLAIN),
        *_specs("32000", logits(32000, torch.bfloat16), _PLAIN),
        *_specs("32000-all", logits(32000, torch.float32), _ALL),
        *_specs("50257-shifted-all", logits(50257, torch.bfloat16)[:, :-1], _ALL),
        *_specs("strided", logits(2000, torch.bfloat16).transpose(1, 2), _PLAIN),
    )


def _specs(name: str, logits: torch.Tensor, options: Options) -> list[KernelSpec]:
    from tileloom.ops.rowwise.cross_entropy.plans import backward_step, forward_step, sum_step

    labels = torch.empty(logits.shape[:-1], dtype=torch.int64, device="meta")
    shape = labels.shape if options.reduction == "none" else ()
    grad = torch.empty(shape, dtype=torch.float32, device="meta")
    forward = forward_problem(logits, labels, options)
    backward = backward_problem(grad, logits, labels, torch.empty_like(logits).stride(), options)
    tiles = cross_entropy_rule(forward, H100)
    assert tiles.forward is not None
    assert tiles.backward is not None
    kind = _SHORT[logits.dtype]
    steps = {
        "fwd": (forward_step(forward, tiles.forward), (f"*{kind}", "*i64", "*fp32", "*fp32")),
        "bwd": (
            backward_step(backward, tiles.backward),
            ("*fp32", f"*{kind}", "*i64", "*fp32", f"*{kind}"),
        ),
    }
    if options.reduction != "none":
        steps["sum"] = (sum_step(forward), ("*fp32", "*i64", "*fp32", "*fp32"))
    return [
        row_spec(
            f"cross_entropy_{which}_triton[{name}-{kind}]", step.kernel, tensors, step.fixed,
            step.num_warps, step.registers, spills=_SPILLS.get(f"{which}[{name}-{kind}]", (0, "")),
        )
        for which, (step, tensors) in steps.items()
    ]  # fmt: skip
