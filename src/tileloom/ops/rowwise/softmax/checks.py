"""The check of softmax's mask; what it shares with the others is in `rowwise/checks.py`."""

from __future__ import annotations

import torch

from tileloom.errors import DtypeError, ShapeError
from tileloom.ops.rowwise.checks import check_device


def check_mask(mask: object, x: torch.Tensor) -> None:
    """Refuse what is no bool tensor that broadcasts to x; None passes."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise DtypeError(
            f"softmax: mask is a {type(mask).__name__}; it must be a bool tensor or None. "
            "Try: torch.as_tensor(mask)."
        )
    if mask.dtype is not torch.bool:
        hint = "x + mask, for numbers that are added" if mask.is_floating_point() else "mask != 0"
        raise DtypeError(
            f"softmax: mask has dtype {mask.dtype}; it must be torch.bool, True where an element "
            f"is visible. Try: {hint}."
        )
    pairs = zip(reversed(mask.shape), reversed(x.shape))
    # Not `m in (1, n)`, which torch.compile answers with no where n is a symbol.
    if mask.dim() > x.dim() or any(m != 1 and m != n for m, n in pairs):
        raise ShapeError(
            f"softmax: mask has shape {tuple(mask.shape)}, which does not broadcast to x's "
            f"{tuple(x.shape)}. Try: give mask x's dimensions, of size 1 where it is the same for "
            "all."
        )
    check_device("softmax", "mask", mask, x, "x")
