"""Combo kernels: blocks of each kernel, chosen in turn."""

from __future__ import annotations

import re

import pytest

from tileloom.errors import OptionError
from tileloom.tuning import Config
from tileloom.tuning.combo import combo_plan
from tileloom.tuning.hints import DeviceProperties

H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)


def meta_of(*kernels, **more):
    """Facts of a combo kernel; a kernel is its kind, its sizes and what else is known."""
    combo = {"num_kernels": len(kernels), "autotune_grouping": True, **more}
    for i, (kind, sizes, facts) in enumerate(kernels):
        combo |= {f"heuristic_{i}": kind, f"size_hints_{i}": sizes}
        combo |= {f"{name}_{i}": value for name, value in facts.items()}
    names = ["XBLOCK", "YBLOCK", "R0_BLOCK"]
    signature = {f"{name}_{i}": "constexpr" for i in range(len(kernels)) for name in names}
    return {"combo_grid_meta": combo}, {"device": H100, "signature": signature}


LARGE = ("pointwise", {"x": 1 << 20}, {"tile_hint": "TileHint.DEFAULT"})
ROWS = ("persistent_reduction", {"x": 512, "r0_": 64}, {"reduction_hint": "INNER"})
LONG = ("reduction", {"x": 8, "r0_": 4096}, {"reduction_hint": "INNER"})


def test_kernels_with_the_same_list_form_a_group_and_the_largest_comes_first():
    plan = combo_plan(*meta_of(ROWS, LARGE, ROWS, LONG))
    assert [group.members for group in plan.groups] == [(1,), (0, 2), (3,)]
    alone = combo_plan(*meta_of(ROWS, LARGE, ROWS, autotune_grouping=False))
    assert sorted(group.members for group in alone.groups) == [(0,), (1,), (2,)]
    other = ("persistent_reduction", {"x": 512, "r0_": 64}, {**ROWS[2], "inductor_meta": {}})
    loads = (*other[:2], {**ROWS[2], "inductor_meta": {"num_load": 3}})
    plan = combo_plan(*meta_of(ROWS, other, loads))
    assert [group.members for group in plan.groups] == [(0, 1), (2,)]


def test_the_base_has_each_kernels_first_blocks_and_the_most_warps():
    plan = combo_plan(*meta_of(ROWS, LARGE, LONG))
    assert plan.base == Config(
        {"XBLOCK_0": 1, "XBLOCK_1": 1024, "XBLOCK_2": 1, "R0_BLOCK_2": 2048}, 16, 1
    )
    assert (16, 1) in plan.pairs
    assert len(plan.pairs) == len(set(plan.pairs))
    assert plan.fields == {"XBLOCK_1": 4096, "XBLOCK_0": 512, "XBLOCK_2": 8, "R0_BLOCK_2": 4096}


def test_a_block_that_has_no_number_in_the_signature_keeps_its_name():
    inductor, triton = meta_of(LARGE)
    plan = combo_plan(inductor, {**triton, "signature": {"XBLOCK": "constexpr"}})
    assert plan.base.kwargs == {"XBLOCK": 1024}


def test_blocks_are_chosen_in_turn_and_warps_last():
    plan = combo_plan(*meta_of(ROWS, LARGE, ROWS))
    asked = []

    def measure(tried):
        asked.append(tried)
        wanted = {"XBLOCK_0": 32, "XBLOCK_1": 512, "XBLOCK_2": 32}
        return [
            10 * sum(config.kwargs[name] != value for name, value in wanted.items())
            + abs(config.num_warps - 2)
            for config in tried
        ]

    best = plan.tune(measure)
    assert best.kwargs == {"XBLOCK_0": 32, "XBLOCK_1": 512, "XBLOCK_2": 32}
    assert best.num_warps == 2
    assert len(asked) == 3, "two groups, and the warps"
    assert {c.kwargs["XBLOCK_0"] for c in asked[0]} == {1}, "the large kernel comes first"
    assert {c.kwargs["XBLOCK_1"] for c in asked[1]} == {512}, "from what was chosen before"
    for tried in asked:
        assert len(tried) == len(set(tried))
    assert [tried[0].num_warps for tried in asked] == [plan.base.num_warps] * 3


def test_failures_never_win():
    plan = combo_plan(*meta_of(LARGE))
    assert plan.tune(lambda tried: [1.0] + [float("inf")] * (len(tried) - 1)) == plan.base


def test_what_was_chosen_when_the_kernel_was_written_is_not_tuned():
    inductor, triton = meta_of(
        LARGE, stitched_num_warps=4, stitched_num_stages=2, stitched_backend_kwargs={}
    )
    plan = combo_plan(inductor, triton)
    assert (plan.base, plan.groups, plan.pairs) == (Config({}, 4, 2), (), ())
    assert plan.tune(lambda tried: pytest.fail("measured")) == plan.base


def test_other_kernels_have_no_plan():
    assert combo_plan({}, {}) is None
    assert combo_plan({"combo_grid_meta": {"num_kernels": 2}}, {}) is None


def test_kinds_that_a_combo_kernel_does_not_hold():
    text = (
        "combo_grid_meta: heuristic_0 is 'split_scan'; it must be one of pointwise, reduction, "
        "persistent_reduction. Try: a launch of its own for that kernel."
    )
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        combo_plan(*meta_of(("split_scan", {"x": 8, "r0_": 8}, {})))
