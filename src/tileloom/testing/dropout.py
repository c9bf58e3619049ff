"""The mask of attention's dropout, on the host: what a kernel has to keep for a seed and offset.

>>> from tileloom.testing import dropout_mask
>>> dropout_mask(0.5, seed=0, offset=6, size=(1, 1, 2, 3))[0, 0]
tensor([[ True, False, False],
        [False, False, False]])
"""

from __future__ import annotations

import torch

from tileloom.errors import known_keywords
from tileloom.ops.attention.reference import check_probability, dropout_uniforms


@known_keywords
def dropout_mask(
    dropout_p: float,
    *,
    seed: int | torch.Tensor,
    offset: int | torch.Tensor,
    size: tuple[int, int, int, int],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Give the scores that dropout keeps; `dropout_uniforms` has the layout.

    Args:
        dropout_p: Probability that a score is dropped; float32 decides.
        seed: The generator's seed.
        offset: The generator's offset when the forward was called.
        size: `(B, Hq, Lq, Lk)`; of packed sequences `(S, Hq, max_q, max_k)`.
        device: Where to compute.

    Returns:
        Bool, of that shape: True where a score is kept.

    Raises:
        OptionError: If the probability is out of range, seed or offset is no integer, or a size
            none from 0.
    """
    check_probability("dropout_mask", dropout_p)
    uniforms = dropout_uniforms(seed, offset, size, device=device)
    return uniforms > torch.tensor(dropout_p, dtype=torch.float32, device=device)
