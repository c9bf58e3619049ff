"""The public function `swiglu`."""

from __future__ import annotations

import torch

from tileloom.errors import unknown_option
from tileloom.ops._plans import is_short, plan_key
from tileloom.ops.rowwise.checks import (
    check_alike,
    check_config,
    check_no_tangent,
    check_rows,
)
from tileloom.ops.rowwise.config import RowConfig
from tileloom.ops.rowwise.swiglu.autograd import swiglu_fwd
from tileloom.ops.rowwise.swiglu.plans import forward_plan, forward_plans, run_announced

_ELSEWHERE = {  # what other libraries call it
    "x": "gate, up = x.chunk(2, -1), which copies nothing",
    "beta": "leaving it out: silu is gate * sigmoid(gate)",
}


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, config: RowConfig | None = None, **unknown: object
) -> torch.Tensor:
    """Gate one tensor by another.

    Math: `out = gate * sigmoid(gate) * up`, element by element in float32, rounded once.
    Equivalent: `torch.nn.functional.silu(gate) * up`.

    Args:
        gate: `[..., n]`, float16, bfloat16 or float32 (float64 by the reference), any shape of one
            dimension or more, any strides: the halves of one tensor, `x.chunk(2, -1)`, cost no
            copy.
        up: gate's shape, dtype and device, any strides.
        config: Forces a backend: a `ReferenceConfig` or `TritonConfig` of
            `tileloom.ops.rowwise.config`. Default: the fastest that takes the problem.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        `[..., n]` in gate's dtype; it lies in memory as `torch.empty_like(gate)` does.

    Raises:
        ShapeError: If the shapes differ, or gate has no dimension.
        DtypeError: If the dtypes differ or are not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If config is none of the configs.
        UnknownOptionError: If there is no such option.
        GradientError: If a gradient of the gradient, or a forward-mode derivative, is asked for.
        ConfigError: If `config` cannot run the problem; it lists the reasons.

    Memory: the output; backward the two gradients. gate and up are kept for it.
    Determinism: bitwise repeatable.
    Gradients: of gate and up; not twice (the reference has any order).
    Autocast: leaves it alone: it computes in float32 anyhow, and the output has gate's dtype.
    Hardware: Triton from sm_80 on; the CPU by the reference.
    Source: Shazeer: GLU Variants Improve Transformer (arXiv 2002.05202).

    Example:
        >>> gate, up = torch.randn(2, 3, 128).chunk(2, -1)
        >>> swiglu(gate, up).shape
        torch.Size([2, 3, 64])
    """
    if unknown:
        raise unknown_option("swiglu", next(iter(unknown)), ("config",), _ELSEWHERE)
    text = config.encode() if isinstance(config, RowConfig) else ""
    goes_short = is_short((gate, up))
    if goes_short and config is None:
        plan = forward_plans.get(plan_key((gate, up), text))
        if plan is not None:
            return plan.run(gate, up)
    check_rows("swiglu", "gate", gate)
    check_alike("swiglu", "up", up, gate, "gate")
    check_config("swiglu", config)
    check_no_tangent("swiglu", gate, up)
    if goes_short:
        return run_announced(forward_plan(gate, up, text), gate, up)
    return swiglu_fwd(gate, up, text)
