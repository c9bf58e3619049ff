"""Filters of candidates: TMA's minimums, determinism, and blocks that a kernel needs."""

from __future__ import annotations

import re

import pytest

from tileloom.errors import OptionError
from tileloom.tuning import Config, Facts, configs
from tileloom.tuning.filters import (
    filter_for_determinism,
    filter_for_tma,
    raise_to_minimums,
)


def block(x, r, warps=4, **more):
    return Config({"XBLOCK": x, "R0_BLOCK": r, **more}, warps, 1)


def blocks(listed):
    return [(c.kwargs["XBLOCK"], c.kwargs["R0_BLOCK"]) for c in listed]


def test_tma_keeps_what_it_can_load_after_one_that_is_sure_to_run():
    facts = Facts(tma_min_block_sizes={"XBLOCK": 4, "R0_BLOCK": 16})
    listed = [block(8, 64), block(1, 2048), block(16, 16)]
    assert blocks(filter_for_tma(listed, facts)) == [(4, 16), (8, 64), (16, 16)]
    assert filter_for_tma(listed, Facts()) == listed


def test_where_tma_can_load_none_the_default_is_raised():
    """The original takes the minimums alone: rows of 2048 elements in blocks of 16."""
    facts = Facts(tma_min_block_sizes={"XBLOCK": 4, "R0_BLOCK": 16})
    assert blocks(filter_for_tma([block(1, 2048)], facts)) == [(4, 2048)]


def test_persistent_kernels_have_no_reduction_blocks_to_raise():
    facts = Facts(tma_min_block_sizes={"XBLOCK": 8, "R0_BLOCK": 16}, persistent=True)
    listed = [Config({"XBLOCK": 1}, 4, 1), Config({"XBLOCK": 32}, 4, 1)]
    assert [c.kwargs for c in filter_for_tma(listed, facts)] == [{"XBLOCK": 8}, {"XBLOCK": 32}]


EXACTLY = Facts(deterministic=True)


def test_without_determinism_all_distinct_configs_stay():
    listed = [block(1, 64), block(2, 64), block(1, 64)]
    assert filter_for_determinism(listed, Facts()) == listed[:2]


@pytest.mark.parametrize(
    ("listed", "facts", "chosen"),
    [
        ([block(1, 64), block(1, 256), block(1, 1024)], EXACTLY, block(1, 256)),
        ([block(8, 4), block(1, 64)], EXACTLY, block(1, 64)),
        ([block(8, 4), block(8, 2)], EXACTLY, block(8, 2)),
        ([block(1, 64, 2), block(1, 64, 8), block(2, 64, 4)], EXACTLY, block(2, 64, 4)),
        ([block(1, 64), block(2, 64), block(8, 64)], EXACTLY, block(2, 64)),
        (
            [block(1, 64), block(8, 64), block(4, 64), block(1, 256)],
            Facts(deterministic=True, contiguous_r=False),
            block(4, 64),
        ),
        ([block(1, 64)], Facts(deterministic=True, contiguous_r=False), block(1, 64)),
    ],
    ids=["rows", "small rows drop", "unless all are", "warps", "x", "x = 1 drops", "alone"],
)
def test_determinism_chooses_without_measuring(listed, facts, chosen):
    assert filter_for_determinism(listed, facts) == [chosen]
    assert filter_for_determinism([listed[-1], *listed], facts) == [chosen]


def test_minimums_raise_one_block_and_shrink_the_other():
    facts = Facts(min_xblock=8, min_rblock=64)
    listed = [block(1, 2048), block(64, 4), block(1, 128), block(16, 128, RSPLIT=4)]
    raised = raise_to_minimums(listed, facts)
    assert blocks(raised) == [(8, 256), (8, 64), (8, 64), (16, 128)]
    assert raised[3] == listed[3]
    assert raise_to_minimums(listed, Facts()) == listed


def test_minimums_of_a_block_that_is_a_constant_are_not_asked_for():
    facts = Facts(min_xblock=8, min_rblock=64)
    (raised,) = raise_to_minimums([Config({"XBLOCK": 2}, 4, 1)], facts)
    assert raised.kwargs == {"XBLOCK": 8}


def test_the_lists_are_filtered():
    """Of R0_BLOCK 2048, 512, 64, 32 and 4 determinism takes 512, with XBLOCK 8; then it is 16."""
    sizes = {"x": 4096, "r0_": 4096}
    assert blocks(configs("reduction", sizes, EXACTLY)) == [(8, 512)]
    both = Facts(min_xblock=16, deterministic=True)
    assert blocks(configs("reduction", sizes, both)) == [(16, 256)]


WRONG = {
    "a block that the kernel does not have": (
        lambda: filter_for_tma([block(1, 64)], Facts(tma_min_block_sizes={"YBLOCK": 4})),
        "tma_min_block_sizes: YBLOCK is no block of the kernel; its configs have XBLOCK, "
        "R0_BLOCK. Try: name one of these.",
    ),
    "minimums of tiles": (
        lambda: raise_to_minimums([block(1, 64, YBLOCK=4)], Facts(min_xblock=4)),
        "min_xblock and min_rblock: the configs also have YBLOCK; minimums are for kernels with "
        "XBLOCK and R0_BLOCK alone. Try: leave the minimums out.",
    ),
    "a minimum larger than any block": (
        lambda: raise_to_minimums([block(1, 64)], Facts(min_xblock=8192)),
        "XBLOCK is 8192; it must be a divisor of 4096. Try: XBLOCK=1.",
    ),
}


@pytest.mark.parametrize(("make", "text"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_filtered_is_said(make, text):
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        make()
