"""What stands between Q K^T and softmax in the benchmark's own formula: bias, masks, dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileloom.bench.case import AttentionCase

Kept = Callable[[AttentionCase, int, slice, torch.device], torch.Tensor]
"""`kept(case, head, rows, device)`: what dropout keeps, bool `[rows, Lk]`, of head b * Hq + h."""


def none_kept(case: AttentionCase, head: int, rows: slice, device: torch.device) -> torch.Tensor:
    """Stand in where nobody can say what dropout keeps.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(f"case {case.name!r} has dropout, and nobody knows its mask")


def bias_of(bias: torch.Tensor, batch: int, head: int, rows: slice) -> torch.Tensor:
    """Give the part of a bias that one head's rows see, `[rows or 1, Lk]`.

    Args:
        bias: `[B or 1, Hq or 1, Lq or 1, Lk]`.
        batch: Which sequence.
        head: Which head.
        rows: Which rows.
    """
    own = bias[min(batch, bias.shape[0] - 1), min(head, bias.shape[1] - 1)]
    return own if own.shape[0] == 1 else own[rows]


def hide(scores: torch.Tensor, case: AttentionCase, rows: slice) -> None:
    """Set what the case's mask hides to -inf, in place.

    Args:
        scores: `[..., rows, keys]`, of the keys from the first on.
        case: What is hidden.
        rows: Which rows.
    """
    if not case.is_causal:
        return
    row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    key = torch.arange(scores.shape[-1], device=scores.device)[None]
    hidden = key > row
    if case.window:
        hidden |= key < row - case.window
    scores.masked_fill_(hidden, float("-inf"))
