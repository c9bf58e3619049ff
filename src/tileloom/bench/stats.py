"""From samples to what may be said: medians, quantiles, and the interval of a ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

RESAMPLES = 2000
FEWEST_ROUNDS = 5

Verdict = Literal["faster", "slower", "unclear"]


@dataclass(frozen=True)
class Summary:
    """Samples of one contender in one case, in the unit of the samples."""

    median: float
    q20: float
    q80: float
    lowest: float
    highest: float
    rounds: int


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another contender, from pairs of samples of the same round.

    Attributes:
        to: The other contender.
        value: Median over the rounds of other time / own time: above 1 is faster.
        low: Lower end of its 95 % bootstrap interval.
        high: Upper end.
        verdict: ``"faster"`` or ``"slower"`` only if the interval excludes 1 and there are at least
            five rounds.
    """

    to: str
    value: float
    low: float
    high: float
    verdict: Verdict


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between neighbours.

    Args:
        values: At least one number.
        share: 0 for the smallest, 0.5 for the median, 1 for the largest.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(samples: Sequence[float]) -> Summary:
    """Sum up samples by their median and the 20 % and 80 % quantiles.

    Args:
        samples: At least one number.
    """
    return Summary(
        median=quantile(samples, 0.5),
        q20=quantile(samples, 0.2),
        q80=quantile(samples, 0.8),
        lowest=min(samples),
        highest=max(samples),
        rounds=len(samples),
    )


def ratio_of(own: Sequence[float], other: Sequence[float], to: str, *, seed: int = 0) -> Ratio:
    """Compare two contenders that ran in the same rounds.

    The pairs matter: clock and power drift from round to round, and within a round both contenders
    see nearly the same card. The rounds are resampled with replacement, and the interval is what
    the medians of 95 % of the resamples fall into.

    Args:
        own: Times of the contender, one a round.
        other: Times of the one it is compared with, in the same rounds.
        to: The other's name.
        seed: Seed of the resampling; the same samples give the same interval.

    Returns:
        The ratio with its interval and what may be said of it.

    Raises:
        ValueError: If the numbers of samples differ or there are none.
    """
    if len(own) != len(other) or not own:
        raise ValueError(f"ratio_of: {len(own)} and {len(other)} samples; they must be pairs.")
    pairs = torch.tensor([b / a for a, b in zip(own, other)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(own), (RESAMPLES, len(own)), generator=generator)
    ordered = pairs[drawn].sort(dim=1).values
    upper = len(own) // 2
    lower = (len(own) - 1) // 2
    medians = ((ordered[:, lower] + ordered[:, upper]) / 2).tolist()
    low, high = quantile(medians, 0.025), quantile(medians, 0.975)
    verdict: Verdict = "unclear"
    if len(own) >= FEWEST_ROUNDS and low > 1:
        verdict = "faster"
    elif len(own) >= FEWEST_ROUNDS and high < 1:
        verdict = "slower"
    return Ratio(to, quantile(pairs.tolist(), 0.5), low, high, verdict)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers; NaN if there are none."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(value) for value in values) / len(values))
