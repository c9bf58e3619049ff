"""Rows joined for the accuracy rule, where the error of one is a single rounding and not a mean."""

from __future__ import annotations

import torch

TOGETHER = 16


def joined(tensor: torch.Tensor) -> torch.Tensor:
    """Join 16 rows to one, over all leading dimensions; the last takes its 16 again if need be.

    A row that sees two keys, or one that a single label dominates, has the error of one element:
    the baseline's may be small by luck, and its RMS says nothing about another's.
    """
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor.reshape(1, -1)
    flat = tensor.flatten(0, -2)
    if flat.shape[0] <= TOGETHER:
        return flat.reshape(1, -1)
    whole = flat.shape[0] // TOGETHER * TOGETHER
    if whole < flat.shape[0]:
        flat = torch.cat((flat[:whole], flat[-TOGETHER:]))
    return flat.reshape(-1, TOGETHER * flat.shape[1])
