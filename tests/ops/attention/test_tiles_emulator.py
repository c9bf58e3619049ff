"""How the Hopper forward deals out rows and key blocks to warpgroups, and tiles to programs.

On the emulator, in poisoned memory: what a warpgroup without rows leaves behind would be seen.
"""

import pytest
import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import AttentionCase
from tests.ops.attention.emulated import play

from tileloom import masks
from tileloom.ops.attention.config import GluonSm90Config, gluon_rule
from tileloom.ops.attention.launch_gluon_sm90_fwd import (
    constants,
    is_cut_once,
    is_dynamic,
    is_late,
    is_spread,
)

WIDE = GluonSm90Config(3, 32, 2, "tma", 160)
CAUSAL = cases.shown_by(masks.causal())
BOTTOM = cases.shown_by(masks.causal("bottom_right"))
LENGTHS = cases.lengths(160, dtype=torch.int32, then=masks.causal())


def right(reach):
    return cases.shown_by(masks.window(None, reach))


def case(len_q, len_k, mask=None, *, head_dim=32, batch=1, **options):
    sizes = (batch, 2, 1, len_q, len_k, head_dim, head_dim)
    return AttentionCase("tiles", sizes, torch.float16, mask=mask, options=options)


@pytest.mark.parametrize(
    ("len_q", "len_k", "mask"),
    [
        (40, 70, None),  # one tile, one warpgroup with rows
        (256, 100, None),  # two tiles of two warpgroups
        (577, 64, CAUSAL),  # 2, 2, 3 and 3 warpgroups; the last one has one row
        (300, 230, BOTTOM),
        (256, 200, right(40)),
    ],
)
def test_rows_that_do_not_fill_three_warpgroups(len_q, len_k, mask):
    given = case(len_q, len_k, mask, batch=2).inputs()
    assert is_spread(cases.problem_of(given), WIDE)
    play(given, WIDE, "ttgir")


@pytest.mark.parametrize(
    ("len_q", "len_k", "mask"),
    [
        (384, 384, CAUSAL),
        (200, 317, BOTTOM),
        (384, 100, CAUSAL),  # rows behind the last key leave out nothing
        (200, 90, BOTTOM),  # rows without keys
        (256, 300, right(9)),
    ],
)
def test_blocks_behind_a_warpgroups_diagonal_are_left_out(len_q, len_k, mask):
    config = GluonSm90Config(2, 32, 2, "registers", pin=True, lazy=True)
    given = case(len_q, len_k, mask, head_dim=256).inputs()
    assert is_late(cases.problem_of(given), config)
    play(given, config, "ttgir")


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(
    ("len_q", "len_k", "mask"),
    [
        (320, 320, CAUSAL),
        (192, 256, BOTTOM),
        (320, 128, CAUSAL),
        (320, 256, BOTTOM),  # the first warpgroup sees no key
        (256, 384, right(64)),
    ],
)
def test_diagonals_that_only_first_blocks_meet_are_looked_for_there_alone(
    len_q, len_k, mask, consumers
):
    head_dim, store = (256, "registers") if consumers == 2 else (32, "tma")
    config = GluonSm90Config(consumers, 64, 2, store, 160, lazy=True)
    given = case(len_q, len_k, mask, head_dim=head_dim).inputs()
    assert is_cut_once(cases.problem_of(given), config)
    play(given, config, "ttgir")


@pytest.mark.parametrize(
    ("len_q", "len_k", "reach", "block_n"),
    [(100, 128, 0, 64), (128, 100, 0, 64), (128, 128, 9, 64), (128, 128, 0, 32)],
)
def test_other_diagonals_are_looked_for_everywhere(len_q, len_k, reach, block_n):
    problem = cases.problem_of(case(len_q, len_k, right(reach), head_dim=256).inputs())
    config = GluonSm90Config(2, block_n, 2)
    assert is_late(problem, config)
    assert not is_cut_once(problem, config)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        (GluonSm90Config(2, 32, 3, "registers", turns=False), 256),
        (GluonSm90Config(3, 32, 3, "tma", 160), 32),
    ],
)
def test_slots_and_turns_of_every_kind_are_handed_on(config, head_dim):
    play(case(200, 317, BOTTOM, head_dim=head_dim).inputs(), config, "machine")


@pytest.mark.parametrize(
    ("length", "mask", "spread", "dynamic"),
    [(4096, None, True, True), (4032, None, False, False), (16384, CAUSAL, True, True)],
)
def test_only_rows_that_do_not_fit_are_spread(length, mask, spread, dynamic):
    problem = cases.problem_of(case(length, length, mask, head_dim=64).inputs())
    config = gluon_rule(problem)
    assert config.consumers == 3
    assert (is_spread(problem, config), is_dynamic(problem, config)) == (spread, dynamic)
    assert constants(problem, config)["SPREAD"] == spread


@pytest.mark.parametrize(
    ("length", "head_dim", "head_dim_v", "late", "once"),
    [
        (1024, 64, 64, False, False),
        (4096, 64, 64, False, False),
        (16384, 64, 64, True, True),
        (16000, 64, 64, True, True),
        (15990, 64, 64, True, False),
        (1024, 128, 128, False, False),
        (2048, 128, 128, True, True),
        (4000, 128, 128, False, False),
        (1024, 192, 128, True, True),
        (1000, 192, 128, False, False),
        (512, 256, 256, True, True),
        (1000, 256, 256, True, False),
    ],
)
def test_tiles_under_a_diagonal_are_drawn_late_where_that_was_faster(
    length, head_dim, head_dim_v, late, once
):
    sizes = (1, 1, 1, length, length, head_dim, head_dim_v)
    problem = cases.problem_of(AttentionCase("late", sizes, mask=CAUSAL).inputs())
    fixed = constants(problem, gluon_rule(problem))
    assert (fixed["LATE"], fixed["ONCE"]) == (late, once)


@pytest.mark.parametrize(
    "given",
    [
        case(160, 160, cases.shown_by(masks.window(90, 0))),
        case(160, 160, LENGTHS),
        case(160, 160, CAUSAL, dropout_p=0.3),
        AttentionCase("bias", (1, 2, 1, 160, 160, 32, 32), bias=cases.added((160, 160))),
        AttentionCase("values", (1, 2, 1, 160, 160, 256, 128), mask=CAUSAL),
    ],
    ids=["window", "lengths", "dropout", "bias", "values"],
)
def test_tiles_of_other_problems_are_dealt_as_before(given):
    fixed = constants(cases.problem_of(given.inputs()), WIDE)
    assert not any(fixed[name] for name in ("SPREAD", "LATE", "ONCE"))
