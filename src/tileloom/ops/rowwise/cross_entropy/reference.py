"""The specification of cross entropy, in plain torch: any precision, differentiable, on any device.

    z = logits, or c tanh(logits / c) with a soft cap c
    loss = log(sum_j exp(z_j)) - (1 - s) z_label - s mean_j z_j          for smoothing s

A row whose label is `ignore_index` gives loss 0 and gradient 0, whatever its logits. A row whose
label is out of range gives NaN, as loss and as gradient.
"""

from __future__ import annotations

import torch


def cross_entropy_reference(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    reduction: str = "mean",
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute cross entropy by its formula; the arguments are those of `tileloom.cross_entropy`.

    Args:
        logits: `[..., V]`, any floating dtype and strides.
        labels: `[...]`, int32 or int64: the right class of each row.
        label_smoothing: Share of the target that is spread over all V classes, 0 to 1.
        ignore_index: Rows with this label do not count.
        soft_cap: Bound of the logits, above 0, or None.
        reduction: ``"mean"`` over the rows that count (NaN if none does), ``"sum"`` or ``"none"``.
        compute_dtype: Precision of every step; default: that of logits, at least float32.
            `torch.float64` gives the reference of the accuracy tests.

    Returns:
        A scalar, or `[...]` for ``"none"``, in `compute_dtype` when that is given, else float32
        (float64 for float64 logits).

    Memory: a few tensors of the logits' shape in `compute_dtype`.
    Determinism: that of torch's sums.
    Gradients: by autograd, to any order.
    """
    dtype = compute_dtype or torch.promote_types(logits.dtype, torch.float32)
    size = logits.shape[-1]
    ignored = labels.to(torch.int64) == ignore_index  # int32 would take it modulo 2^32
    inside = (labels >= 0) & (labels < size)
    z = torch.where(ignored[..., None], 0.0, logits.to(dtype))
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    if size:
        peak = z.amax(-1, keepdim=True).detach()
        peak = torch.where(peak == float("-inf"), 0.0, peak)
        at = torch.where(inside, labels, 0).to(torch.int64)
        target = (z - peak).gather(-1, at[..., None])[..., 0]
        loss = (z - peak).exp().sum(-1).log() - (1.0 - label_smoothing) * target
        if label_smoothing:
            loss = loss - label_smoothing * (z - peak).mean(-1)
        loss = torch.where(inside, loss, float("nan"))
    else:
        loss = torch.full_like(labels, float("nan"), dtype=dtype)
    loss = torch.where(ignored, 0.0, loss)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (~ignored).sum()


def cross_entropy_backward_reference(
    grad: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute the gradient of the logits: `(softmax - target) * grad`, through the soft cap.

    Args:
        grad: Gradient of the loss: a scalar, or `[...]` for ``"none"``.
        logits: `[..., V]`, any floating dtype and strides.
        labels: `[...]`, int32 or int64.
        label_smoothing: As in `cross_entropy_reference`; so are the others.
        ignore_index: Rows with this label get 0.
        soft_cap: Bound of the logits, or None.
        reduction: What grad is the gradient of.

    Returns:
        `[..., V]` in the logits' dtype; computed at least in float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    size = logits.shape[-1]
    ignored = labels.to(torch.int64) == ignore_index
    if logits.numel() == 0:
        return torch.empty_like(logits)
    z = torch.where(ignored[..., None], 0.0, logits.to(dtype))
    slope = None
    if soft_cap is not None:
        bent = torch.tanh(z / soft_cap)
        z, slope = soft_cap * bent, 1.0 - bent * bent
    classes = torch.arange(size, device=labels.device)
    target = (1.0 - label_smoothing) * (labels[..., None] == classes) + label_smoothing / size
    scale = grad.to(dtype)
    if reduction == "mean":
        scale = scale / (~ignored).sum()
    scale = torch.where((labels >= 0) & (labels < size), scale, float("nan"))
    found = (torch.softmax(z, -1) - target) * scale[..., None]
    if slope is not None:
        found = found * slope
    return torch.where(ignored[..., None], 0.0, found).to(logits.dtype)
