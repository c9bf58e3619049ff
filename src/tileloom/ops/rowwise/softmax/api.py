"""The public function `softmax`: checks its arguments, then calls `tileloom::softmax_fwd`."""

from __future__ import annotations

from typing import Any

import torch

from tileloom.errors import unknown_option
from tileloom.ops._op import is_eager
from tileloom.ops._plans import plan_key
from tileloom.ops.rowwise.checks import check_config, check_no_tangent, check_rows
from tileloom.ops.rowwise.config import CONFIGS, RowConfig, announce
from tileloom.ops.rowwise.softmax.autograd import softmax_fwd
from tileloom.ops.rowwise.softmax.checks import check_mask
from tileloom.ops.rowwise.softmax.plans import forward_plan, forward_plans

_OPTIONS = ("mask", "config")
_ELSEWHERE = {  # what other libraries call it
    "dim": "softmax(x.transpose(dim, -1)).transpose(dim, -1), which copies nothing",
    "axis": "softmax(x.transpose(axis, -1)).transpose(axis, -1), which copies nothing",
    "dtype": "softmax(x.to(dtype))",
    "attn_mask": "mask=",
    "where": "mask=",
    "scale": "softmax(scale * x)",
}


def softmax(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    config: RowConfig | None = None,
    **unknown: object,
) -> torch.Tensor:
    """Compute softmax over the last dimension, of all elements or of those that a mask shows.

    Math: `y_i = exp(x_i) / sum_j exp(x_j)` over the visible elements of a row, in float32, with the
    row's maximum subtracted first.
    Equivalent: `torch.softmax(x.masked_fill(~mask, -inf), -1)`, but for rows that show nothing.

    Args:
        x: `[..., N]`, float16, bfloat16 or float32 (float64 by the reference), any strides.
        mask: A bool tensor that broadcasts to x (True = visible), any strides; it is not expanded
            in memory.
        config: Forces a backend: a `ReferenceConfig` or `TritonConfig` of
            `tileloom.ops.rowwise.config`. Default: the kernels where they take the problem.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        `[..., N]` in x's dtype; it lies in memory as `torch.empty_like(x)` does. A hidden element,
        and one that is -inf, gives 0; a hidden one may hold anything, NaN included. A row that
        shows nothing gives 0 (as attention does, and `torch._safe_softmax`; `torch.softmax` gives
        NaN). A visible NaN or +inf makes its row NaN.

    Raises:
        ShapeError: If x has no dimension, or the mask does not broadcast to it.
        DtypeError: If a dtype is not supported.
        DeviceError: If the tensors lie on different devices.
        OptionError: If `config` is no config.
        UnknownOptionError: If there is no such option.
        GradientError: If a gradient of the gradient, or a forward-mode derivative, is asked for.
        ConfigError: If `config` cannot run the problem; it lists the reasons.

    Memory: the output, which is all that is kept for the gradient.
    Determinism: bitwise repeatable.
    Gradients: of x, `y (dy - sum(dy y))`, 0 where an element is hidden; not twice.
    Autocast: leaves it alone: x's dtype is the output's, and sums are in float32 anyway.
    Hardware: portable kernels from sm_80 on; the CPU by the reference.
    Source: online softmax (arXiv 1805.02867) where a row does not fit into registers.

    Example:
        >>> softmax(torch.tensor([[0.0, 0.0, 9.0]]), mask=torch.tensor([True, True, False]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    if unknown:
        raise unknown_option("softmax", next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    text: Any = "" if config is None else config.encode() if isinstance(config, CONFIGS) else None
    plan = key = None
    if isinstance(x, torch.Tensor) and is_eager((x, mask)):  # pyright: ignore[reportUnnecessaryIsInstance]
        key = plan_key((x, mask), text)
        plan = forward_plans.get(key)
    if plan is None:
        _check(x, mask, config)
    if key is None or (x.requires_grad and torch.is_grad_enabled()):
        return softmax_fwd(x, mask, text)
    if plan is None:
        plan = forward_plan(x, mask, text)
        announce(plan.choice, plan.choice.problem)
        forward_plans.put(key, plan)
    return plan.run(x, mask)


def _check(x: torch.Tensor, mask: torch.Tensor | None, config: RowConfig | None) -> None:
    check_rows("softmax", "x", x)
    check_mask(mask, x)
    check_config("softmax", config)
    check_no_tangent("softmax", x)
