"""The checks of cross entropy; what it shares with the others is in `rowwise/checks.py`."""

from __future__ import annotations

import math

import torch

from tileloom.errors import DtypeError, OptionError, ShapeError, shown_value
from tileloom.ops.rowwise.checks import check_device, check_rows
from tileloom.ops.rowwise.cross_entropy.problem import REDUCTIONS

_INT64 = torch.iinfo(torch.int64)


def check_tensors(logits: torch.Tensor, labels: object) -> None:
    """Refuse logits without classes, and labels that are not one integer a row."""
    check_rows("cross_entropy", "logits", logits)
    if not isinstance(labels, torch.Tensor):
        raise DtypeError(
            f"cross_entropy: labels is a {type(labels).__name__}; it must be a torch.Tensor. "
            "Try: torch.as_tensor(labels)."
        )
    if labels.dtype not in (torch.int32, torch.int64):
        remedy = "labels.to(torch.int64)"
        if labels.is_floating_point():
            remedy = "labels.argmax(-1); there are no labels of probabilities"
        raise DtypeError(
            f"cross_entropy: labels has dtype {labels.dtype}; supported: torch.int32, "
            f"torch.int64. Try: {remedy}."
        )
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"cross_entropy: labels has shape {tuple(labels.shape)}, logits have "
            f"{tuple(logits.shape)}; labels must have shape {tuple(logits.shape[:-1])}, and the "
            f"classes lie in the last dimension. Try: {_remedy(logits, labels)}."
        )
    check_device("cross_entropy", "labels", labels, logits, "logits")


def _remedy(logits: torch.Tensor, labels: torch.Tensor) -> str:
    if labels.shape == (*logits.shape[:1], *logits.shape[2:]):
        return "logits.movedim(1, -1), as torch.nn.functional.cross_entropy has them second"
    if labels.numel() == math.prod(logits.shape[:-1]):
        return "labels.reshape(logits.shape[:-1])"
    return "slice both alike: logits[:, :-1] goes with labels[:, 1:]"


def check_options(
    label_smoothing: float, ignore_index: int, soft_cap: float | None, reduction: str
) -> None:
    """Refuse an option that is out of range."""
    if not isinstance(label_smoothing, torch.SymFloat) and (
        isinstance(label_smoothing, bool)
        or not isinstance(label_smoothing, (int, float))  # pyright: ignore[reportUnnecessaryIsInstance]
        or not 0.0 <= label_smoothing <= 1.0
    ):
        raise OptionError(
            f"cross_entropy: label_smoothing is {shown_value(label_smoothing)}; it must be a "
            "number in 0.0 .. 1.0. Try: label_smoothing=0.1."
        )
    is_int = isinstance(ignore_index, (int, torch.SymInt)) and not isinstance(ignore_index, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_int or not _INT64.min <= ignore_index <= _INT64.max:
        raise OptionError(
            f"cross_entropy: ignore_index is {shown_value(ignore_index)}; it must be an integer of "
            "64 bits. Try: ignore_index=-100."
        )
    if (
        soft_cap is not None
        and not isinstance(soft_cap, torch.SymFloat)
        and (
            isinstance(soft_cap, bool)
            or not isinstance(soft_cap, (int, float))  # pyright: ignore[reportUnnecessaryIsInstance]
            or not 1e-6 <= soft_cap <= 1e6
        )
    ):
        raise OptionError(
            f"cross_entropy: soft_cap is {shown_value(soft_cap)}; it must be None or a number in "
            "1e-6 .. 1e6. Try: soft_cap=None for none, or 30.0."
        )
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"cross_entropy: reduction is {shown_value(reduction)}; it must be one of "
            f"{', '.join(map(repr, REDUCTIONS))}. Try: reduction='mean'."
        )
