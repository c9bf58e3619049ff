"""The public function `rms_norm`."""

from __future__ import annotations

import torch

from tileloom.errors import unknown_option
from tileloom.ops.rowwise.config import RowConfig
from tileloom.ops.rowwise.norm.calls import call
from tileloom.ops.rowwise.rms_norm.autograd import rms_norm_fwd
from tileloom.ops.rowwise.rms_norm.reference import default_eps

_OPTIONS = ("eps", "residual", "config")
_ELSEWHERE = {  # what other libraries call it
    "normalized_shape": "leaving it out: the last dimension is normalised",
    "epsilon": "eps=",
    "variance_epsilon": "eps=",
    "gamma": "weight=",
    "bias": "tileloom.layer_norm, or adding it to the output",
    "prenorm": "residual=, which returns the new residual stream as well",
}


def _operator(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: None,
    residual: torch.Tensor | None,
    eps: float,
    config: str,
) -> tuple[torch.Tensor, ...]:
    """Call the operator as layer norm's is called."""
    del bias
    return rms_norm_fwd(x, weight, residual, eps, config)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    config: RowConfig | None = None,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the rows of a tensor by the root of their mean square.

    Math: `out = h / sqrt(sum h^2 / n + eps) * weight` with `h = x`, or `h = x + residual`; the sums
    are in float32.
    Equivalent: `torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)`; with a residual
    `h = x + residual` first, rounded to x's dtype.

    Args:
        x: `[..., n]`, float16, bfloat16 or float32 (float64 by the reference), any leading shape
            and strides; n may be 0.
        weight: `[n]`, any floating dtype: a float32 weight with bfloat16 rows costs no cast.
        eps: Added to the mean square: a finite number >= 0. Default: `torch.finfo(float32).eps`,
            about 1.2e-7, for float64 rows that of float64, as torch has it.
        residual: Added to x before: x's shape, dtype and device, any strides.
        config: Forces a backend: a `ReferenceConfig` or `TritonConfig` of
            `tileloom.ops.rowwise.config`. Default: the fastest that takes the problem.
        unknown: Any other keyword is refused with the nearest option.

    Returns:
        `[..., n]` in x's dtype; it lies in memory as `torch.empty_like(x)` does. With a residual
        `(out, stream)`, where the stream is x + residual in x's dtype, the next residual.

    Raises:
        ShapeError: If sizes do not fit each other, or x has no dimension.
        DtypeError: If dtypes are not supported, or x and residual differ.
        DeviceError: If the tensors lie on different devices.
        OptionError: If eps or config is out of range.
        UnknownOptionError: If there is no such option.
        GradientError: If a gradient of the gradient, or a forward-mode derivative, is asked for.
        ConfigError: If `config` cannot run the problem; it lists the reasons.

    Memory: the outputs; for gradients one float32 a row more. The backward allocates the gradients
        and at most some 20 MB of partial sums for the weight's, whatever the size.
    Determinism: bitwise repeatable, forward and backward; no atomics.
    Gradients: of x, weight and residual; not twice (the reference has any order).
    Autocast: leaves it alone: sums are in float32 anyhow, and the output has x's dtype.
    Hardware: Triton from sm_80 on; the CPU by the reference.
    Source: Zhang, Sennrich: Root Mean Square Layer Normalization (arXiv 1910.07467).

    Example:
        >>> x, weight = torch.randn(2, 3, 64), torch.ones(64)
        >>> rms_norm(x, weight, eps=1e-6).shape
        torch.Size([2, 3, 64])
        >>> out, stream = rms_norm(x, weight, residual=torch.randn(2, 3, 64))
    """
    if unknown:
        raise unknown_option("rms_norm", next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    if eps is None:
        eps = default_eps(x.dtype) if isinstance(x, torch.Tensor) else 0.0
    return call("rms_norm", _operator, x, weight, None, residual, eps, config)
