"""The public function `layer_norm`."""

from __future__ import annotations

import torch

from tileloom.errors import unknown_option
from tileloom.ops.rowwise.config import RowConfig
from tileloom.ops.rowwise.layer_norm.autograd import layer_norm_fwd
from tileloom.ops.rowwise.norm.calls import call

_OPTIONS = ("eps", "residual", "config")
_ELSEWHERE = {  # what other libraries call it
    "normalized_shape": "leaving it out: the last dimension is normalised",
    "epsilon": "eps=",
    "variance_epsilon": "eps=",
    "gamma": "weight=",
    "beta": "bias=",
    "prenorm": "residual=, which returns the new residual stream as well",
}


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    config: RowConfig | None = None,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the rows of a tensor by their mean and standard deviation.

    Math: `out = (h - mean) / sqrt(variance + eps) * weight + bias` with `h = x`, or
    `h = x + residual`; `variance = sum (h - mean)^2 / n`, and the sums are in float32.
    Equivalent: `torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)`; with a
    residual `h = x + residual` first, rounded to x's dtype.

    Args:
        x: `[..., n]`, float16, bfloat16 or float32 (float64 by the reference), any leading shape
            and strides; n may be 0.
        weight: `[n]`, any floating dtype: a float32 weight with bfloat16 rows costs no cast.
        bias: `[n]`, any floating dtype, with or without a weight.
        eps: Added to the variance: a finite number >= 0.
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

    Memory: the outputs; for gradients two float32 a row more. The backward allocates the gradients
        and at most some 20 MB of partial sums for weight and bias, whatever the size.
    Determinism: bitwise repeatable, forward and backward; no atomics.
    Gradients: of x, weight, bias and residual; not twice (the reference has any order).
    Autocast: leaves it alone: sums are in float32 anyhow, and the output has x's dtype.
    Hardware: Triton from sm_80 on; the CPU by the reference.
    Source: Ba, Kiros, Hinton: Layer Normalization (arXiv 1607.06450).

    Example:
        >>> x, weight, bias = torch.randn(2, 3, 64), torch.ones(64), torch.zeros(64)
        >>> layer_norm(x, weight, bias).shape
        torch.Size([2, 3, 64])
        >>> out, stream = layer_norm(x, weight, bias, residual=torch.randn(2, 3, 64))
    """
    if unknown:
        raise unknown_option("layer_norm", next(iter(unknown)), _OPTIONS, _ELSEWHERE)
    return call("layer_norm", layer_norm_fwd, x, weight, bias, residual, eps, config)
