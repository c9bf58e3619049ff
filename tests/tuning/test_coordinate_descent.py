"""Coordinate descent on recorded times: every table is the whole space, so the end is known."""

import itertools
import math
import random

import pytest

from tileloom.tuning.config import Config
from tileloom.tuning.coordinate_descent import CoordescTuner, field_of, with_field


def xblock(value, num_warps=4, **more):
    return Config({"XBLOCK": value, **more}, num_warps=num_warps, num_stages=1)


class Recorded:
    """Times of a space; a config that is not in it fails. Each is asked for at most once."""

    def __init__(self, times):
        self.times = times
        self.asked = []

    def __call__(self, config):
        assert config not in self.asked
        self.asked.append(config)
        return self.times[config]

    def together(self, configs):
        """Times relative to a clock that sinks from call to call."""
        self.asked.extend(configs[1:])
        slow = 1 + 0.05 * len(self.asked)
        return [slow * self.times.get(config, math.inf) for config in configs]


def test_it_ends_at_the_best_of_a_valley():
    """The case of PyTorch's own test: the cost is the distance of XBLOCK from 15."""
    found = CoordescTuner(size_hints={"x": 2**20}).autotune(
        lambda config: abs(config.kwargs["XBLOCK"] - 15), xblock(1)
    )
    assert found.kwargs["XBLOCK"] == 16


def test_no_config_is_measured_twice_and_a_known_time_not_at_all():
    space = {xblock(2**k, 2**w): 1 + abs(k - 6) / 10 + abs(w - 3) / 7
             for k in range(13) for w in range(6)}  # fmt: skip
    times = Recorded(space)
    start = xblock(8, 1)
    found = CoordescTuner(size_hints={"x": 2**20}).autotune(times, start, space[start])
    assert found == min(space, key=space.get) == xblock(64, 8)
    assert start not in times.asked
    assert len(times.asked) < len(space) / 3


def test_what_raises_counts_as_infinitely_slow():
    times = Recorded({xblock(32): 1.0, xblock(16): 0.5})
    assert CoordescTuner(size_hints={"x": 2**20}).autotune(times, xblock(32)) == xblock(16)
    assert xblock(64) in times.asked


def test_less_than_a_thousandth_is_no_improvement():
    tuner = CoordescTuner(size_hints={"x": 2**20}, frozen_fields=("num_warps",))
    times = {xblock(2**k): 1 - 0.0009 * k for k in range(13)}
    assert tuner.autotune(times.__getitem__, xblock(16)) == xblock(16)
    times = {xblock(2**k): (1 - 0.0011) ** k for k in range(13)}
    assert tuner.autotune(times.__getitem__, xblock(16)) == xblock(4096)


def test_neighbours_are_compared_with_where_they_start_from():
    """Times that only hold within one call: with a memory of older ones nothing would improve."""
    space = {xblock(2**k): 1 + abs(k - 9) / 50 for k in range(13)}
    times = Recorded(space)
    tuner = CoordescTuner(size_hints={"x": 2**20}, frozen_fields=("num_warps",))
    assert tuner.descend(times.together, xblock(16)) == xblock(512)
    assert len(times.asked) == len(set(times.asked))


def test_what_was_tried_before_is_not_measured_again():
    space = {xblock(2**k): 1 + abs(k - 6) / 50 for k in range(13)}
    times = Recorded(space)
    tuner = CoordescTuner(size_hints={"x": 2**20}, frozen_fields=("num_warps",))
    start = xblock(64)
    assert tuner.descend(times.together, start, tried=[xblock(32), xblock(128)]) == start
    assert times.asked == []


def test_a_config_with_none_of_the_fields_stays():
    start = Config({"OTHER": 3}, num_warps=4)
    tuner = CoordescTuner(frozen_fields=("num_warps",))
    assert tuner.autotune(lambda config: 1.0, start) == start
    assert tuner.get_all_tuning_directions(start) == [start]


def test_all_directions_leave_a_point_where_no_single_step_helps():
    space = {xblock(2**k, 2**w): 1.0 for k, w in itertools.product(range(13), range(6))}
    start, better = xblock(64, 4), xblock(128, 8)
    space[xblock(128, 4)] = space[xblock(64, 8)] = 1.1
    space[better] = 0.9
    alone = CoordescTuner(size_hints={"x": 2**20})
    assert alone.autotune(space.__getitem__, start) == start
    all_of_them = CoordescTuner(
        size_hints={"x": 2**20}, inductor_meta={"coordinate_descent_check_all_directions": True}
    )
    assert all_of_them.autotune(space.__getitem__, start) == better
    assert len(all_of_them.get_all_tuning_directions(start)) == 9
    wider = {"coordinate_descent_search_radius": 2}
    assert len(CoordescTuner(inductor_meta=wider).get_all_tuning_directions(start)) == 25


def test_neighbour_values():
    tuner = CoordescTuner(size_hints={"x": 2**20, "r0_": 16})
    assert tuner.get_neighbour_values("num_stages", 2, radius=2) == [3, 4, 1]
    assert tuner.get_neighbour_values("NUM_STAGES", 2) == [3, 4, 1]
    assert tuner.get_neighbour_values("XBLOCK", 2, radius=2) == [4, 8, 1]
    assert tuner.get_neighbour_values("XBLOCK", 4096) == [2048]
    assert tuner.get_neighbour_values("R0_BLOCK", 16) == [8]
    assert tuner.get_neighbour_values("XBLOCK", 1, include_self=True) == [2, 1]
    assert tuner.get_neighbour_values("BLOCK_M", 2**20) == [2**21, 2**19]
    assert tuner.get_neighbour_values("num_warps", 32) == [16]
    small = CoordescTuner(inductor_meta={"warp_size": 64, "max_threads_per_block": 512})
    assert small.get_neighbour_values("num_warps", 8) == [4]


def test_limits_of_special_kernels():
    product = CoordescTuner(
        is_native_matmul=True, size_hints={"x": 2**10, "y": 2**10, "r0_": 2**12}
    )
    assert product.get_neighbour_values("XBLOCK", 16) == [32]
    assert "ZBLOCK" not in product.tunable_fields
    assert product.tunable_fields[-1] == "num_stages"
    assert not product.is_valid_config(Config({"XBLOCK": 512, "YBLOCK": 1024, "R0_BLOCK": 16}))
    assert not product.is_valid_config(Config({"XBLOCK": 32, "YBLOCK": 16}))  # holds all of r0_
    mixed = CoordescTuner(is_mix_order_reduction=True)
    assert mixed.tunable_fields[-1] == "NUM_STAGES"
    assert not mixed.is_valid_config(Config({"XBLOCK": 64, "RSPLIT_SIZE": 32}))
    start = Config({"XBLOCK": 32, "RSPLIT_SIZE": 32, "NUM_STAGES": 1})
    found = mixed.autotune(
        lambda c: 1 / c.kwargs["XBLOCK"] + abs(c.kwargs["NUM_STAGES"] - 3), start
    )
    assert (found.kwargs["XBLOCK"], found.kwargs["NUM_STAGES"]) == (32, 3)
    least = CoordescTuner(inductor_meta={"min_xblock": 8, "min_rblock": 64})
    assert least.get_neighbour_values("XBLOCK", 8) == [16]
    assert least.get_neighbour_values("R0_BLOCK", 64) == [128]
    combo = CoordescTuner(
        inductor_meta={
            "combo_coordesc_field_order": ["XBLOCK_0", "XBLOCK_1"],
            "combo_coordesc_field_limits": {"XBLOCK_0": 64},
        }
    )
    assert combo.tunable_fields[:2] == ["XBLOCK_0", "XBLOCK_1"]
    assert combo.get_neighbour_values("XBLOCK_0", 64) == [32]


@pytest.mark.parametrize("name", ["num_warps", "num_stages", "XBLOCK"])
def test_fields(name):
    config = xblock(16)
    assert field_of(with_field(config, name, 8), name) == 8
    assert field_of(config, "YBLOCK") is None


@pytest.mark.parametrize("everywhere", [False, True])
def test_it_ends_where_inductors_own_ends(everywhere):
    """On random recorded spaces, with times apart by more than the threshold."""
    triton = pytest.importorskip("triton")
    original = pytest.importorskip("torch._inductor.runtime.coordinate_descent_tuner")
    meta = {
        "warp_size": 32,
        "max_threads_per_block": 1024,
        "coordinate_descent_check_all_directions": everywhere,
    }
    hints = {"x": 64, "r0_": 32}
    differs = 0
    for seed in range(40):
        times = random.Random(seed)
        space = {
            (x, r, w): times.randint(1000, 3000) / 1000
            for x, r, w in itertools.product(*[[2**i for i in range(7)]] * 3)
        }

        def time(config, space=space):
            block = config.kwargs["XBLOCK"], config.kwargs["R0_BLOCK"], config.num_warps
            return space[block]

        start = {"XBLOCK": 8, "R0_BLOCK": 8}
        theirs = original.CoordescTuner(size_hints=hints, inductor_meta=dict(meta)).autotune(
            time, triton.Config(dict(start), num_warps=4, num_stages=1)
        )
        tuner = CoordescTuner(size_hints=hints, inductor_meta=meta)
        ours = tuner.autotune(time, Config(start, num_warps=4, num_stages=1))
        assert ours == Config.of(theirs), seed
        differs += ours.kwargs != start
    assert differs > 30
