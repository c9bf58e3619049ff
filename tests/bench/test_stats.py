import math
import random

import pytest

from tileloom.bench import geometric_mean, ratio_of, summarise
from tileloom.bench.stats import quantile


def test_quantile_is_linear_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert quantile(values, 0.0) == 1.0
    assert quantile(values, 1.0) == 4.0
    assert quantile(values, 0.5) == 2.5
    assert quantile(values, 0.2) == pytest.approx(1.6)
    assert quantile([7.0], 0.8) == 7.0


def test_summary_holds_the_quantiles_and_the_ends():
    one = summarise([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (one.median, one.lowest, one.highest, one.rounds) == (3.0, 1.0, 5.0, 5)
    assert (one.q20, one.q80) == (pytest.approx(1.8), pytest.approx(4.2))


def test_ratio_is_other_over_own():
    assert ratio_of([1.0] * 5, [2.0] * 5, "other").value == 2.0


def test_drift_that_both_share_does_not_widen_the_interval():
    """The card slows down by half over the run; the contender stays 10 % ahead in every round."""
    base = [1.0 + 0.1 * i for i in range(6)]
    ratio = ratio_of([b / 1.1 for b in base], base, "base")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert ratio.verdict == "faster"


def test_one_round_the_other_way_of_five_leaves_it_unclear():
    ratio = ratio_of([1.0] * 5, [1.05, 1.05, 0.99, 1.05, 1.05], "base")
    assert ratio.value == 1.05
    assert ratio.low < 1 < ratio.high
    assert ratio.verdict == "unclear"


def test_slower_is_said_as_well():
    assert ratio_of([1.2] * 7, [1.0] * 7, "base").verdict == "slower"


def test_fewer_than_five_rounds_allow_no_verdict():
    assert ratio_of([1.0] * 4, [2.0] * 4, "base").verdict == "unclear"


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """200 runs of 9 rounds with 3 % of noise: at least 90 % of the intervals hold the true 1.02."""
    draw = random.Random(1)
    held = 0
    for _ in range(200):
        own = [draw.gauss(1.0, 0.02) for _ in range(9)]
        ratio = ratio_of(own, [1.02 * draw.gauss(1.0, 0.02) for _ in own], "base")
        held += ratio.low <= 1.02 <= ratio.high
    assert held >= 180


def test_equal_contenders_are_seldom_called_different():
    draw = random.Random(2)
    verdicts = [
        ratio_of(
            [draw.gauss(1.0, 0.02) for _ in range(9)],
            [draw.gauss(1.0, 0.02) for _ in range(9)],
            "base",
        ).verdict
        for _ in range(200)
    ]
    assert verdicts.count("unclear") >= 180


def test_the_same_samples_give_the_same_interval():
    own, other = [1.0, 1.1, 0.9, 1.05, 1.2], [1.1, 1.0, 1.0, 1.2, 1.1]
    assert ratio_of(own, other, "base") == ratio_of(own, other, "base")


@pytest.mark.parametrize("other", [[1.0], []])
def test_unpaired_samples_are_refused(other):
    with pytest.raises(ValueError, match="they must be pairs"):
        ratio_of([1.0] * len(other) + [1.0] * bool(other), other, "base")


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))
