"""Grids: the numbers of programs, their expressions, and what is said where one does not fit."""

from __future__ import annotations

import math
import random
import re

import pytest

from tileloom.errors import ArgumentError, OptionError
from tileloom.tuning import Config
from tileloom.tuning.grids import (
    GRIDS,
    FixedGrid,
    GridExpr,
    ceildiv,
    maximum,
    product,
    summation,
)

BLOCKS = Config({"XBLOCK": 64, "YBLOCK": 4, "ZBLOCK": 2, "R0_BLOCK": 256, "RSPLIT": 8})
SIZES = {"xnumel": 1000, "ynumel": 9, "znumel": 5, "r0_numel": 1025}


def combo(*sizes, default=None, min_blocks=None, **more):
    """Facts of kernels in one launch: their x, or (x, y), None where not known when compiling."""
    meta = {"num_kernels": len(sizes), "default_config": default, "min_blocks": min_blocks}
    for i, size in enumerate(sizes):
        x, *y = size if isinstance(size, tuple) else (size,)
        meta |= {f"xnumel_{i}": x, f"no_x_dim_{i}": False, **{f"ynumel_{i}": v for v in y}}
    return {**meta, **more}


def grid(kind, config=BLOCKS, **meta):
    return GridExpr.from_meta({"grid_type": kind, **meta}, config)


@pytest.mark.parametrize(
    ("kind", "config", "programs"),
    [
        ("Grid1D", BLOCKS, (16, 1, 1)),
        ("Grid1D", Config({}), (1000, 1, 1)),
        ("Grid2D", BLOCKS, (16, 3, 1)),
        ("Grid3D", BLOCKS, (16, 3, 3)),
        ("BatchMatmulGrid3D", BLOCKS, (3, 3, 16)),
        ("Grid2DWithYZOverflow", BLOCKS, (16, 3, 1)),
        ("MixOrderReductionGrid", Config({"RSPLIT_SIZE": 128, "XBLOCK": 16}), (8, 1, 1)),
        ("CooperativeReductionGrid", BLOCKS, (8, 16, 1)),
        ("SplitScanGrid", Config({"XBLOCK": 1, "R0_BLOCK": 256}), (5, 1000, 1)),
    ],
)
def test_programs(kind, config, programs):
    made = grid(kind, config)
    assert made.evaluate(SIZES) == programs
    assert made.function(list(SIZES))(*SIZES.values()) == programs


def test_constants_are_folded_in():
    assert (ceildiv(10, 4), ceildiv("n", 4), ceildiv("n", 1), ceildiv("n", None)) == (
        3,
        "-(n // -4)",
        "n",
        "n",
    )
    assert ceildiv("a + b", "c + 1") == "-((a + b) // -(c + 1))"
    assert maximum([3, "n", 7, "m"]) == "max(n, m, 7)"
    assert (maximum([3, 7]), summation([3, 7]), product([3, 7])) == (7, 10, 21)
    assert summation(["n", 3, "m", 4]) == "n + m + 7"
    assert (product(["n + 1", 1, "m"]), product(["n", 2, 3]), product([1])) == (
        "(n + 1) * m",
        "n * 6",
        1,
    )


def test_blocks_of_y_overflow_into_z():
    """Inductor's own test has 16 777 472 x 8; here any height is covered, and nothing twice."""
    rng = random.Random(1)
    heights = [
        1,
        65535,
        65536,
        16_777_472,
        2**31 - 1,
        *(rng.randrange(1, 2**31) for _ in range(99)),
    ]
    for height in heights:
        made = grid("Grid2DWithYZOverflow", Config({"XBLOCK": 8, "YBLOCK": 1}))
        x, y, z = made.evaluate({"xnumel": 8, "ynumel": height})
        assert x == 1
        assert y <= 65535
        assert z <= 65535
        assert y * z >= height > y * (z - 1)
    assert made.evaluate({"xnumel": 8, "ynumel": 0}) == (1, 0, 0), "nothing to do"


def test_a_fixed_grid_is_part_of_each_launch():
    meta = FixedGrid.setup_grid_as_args()
    made = GridExpr.from_meta(meta, BLOCKS)
    values = dict(zip(meta["extra_launcher_args"], (4, 5, 6)))
    assert made.evaluate(values) == (4, 5, 6)
    assert grid("FixedGrid", fixed_grid=[3, "xnumel // 2", 1]).evaluate(SIZES) == (3, 500, 1)


def test_precomputed_grids_are_chosen_by_config():
    table = [
        {"config": {"BLOCK": 64, "num_warps": 4}, "python": ["-(n // -64)", "1", "1"]},
        {"config": {"BLOCK": 64, "num_warps": 8}, "python": ["math.ceil(n / 64)", "2", "1"]},
    ]
    for warps, y in ((4, 1), (8, 2)):
        made = grid("PrecomputedGrid", Config({"BLOCK": 64}, warps), precomputed_grids=table)
        assert made.names == {"n"}
        assert made.evaluate({"n": 130}) == (3, y, 1)


def test_kernels_in_one_launch():
    static = {"combo_grid_meta": combo(1000, 64, None)}
    made = grid("SequentialComboKernelGrid", **static)
    assert made.x_grid == "-(xnumel_2 // -64) + 17"
    assert made.evaluate({"xnumel_2": 65}) == (19, 1, 1)
    made = grid("RoundRobinComboKernelGrid", **static)
    assert made.evaluate({"xnumel_2": 65}) == (48, 1, 1), "each has as many as the largest, 16"
    single = {"combo_grid_meta": combo(1000, 64, no_x_dim_1=True)}
    assert grid("SequentialComboKernelGrid", **single).x_grid == 16 + 64
    assert grid("RoundRobinComboKernelGrid", **single).x_grid == 64 * 2
    least = {"combo_grid_meta": combo(10, 20, min_blocks=7, default={"XBLOCK": 16})}
    assert grid("SequentialComboKernelGrid", Config({}), **least).x_grid == 7
    least["combo_grid_meta"]["min_blocks"] = 2
    assert grid("SequentialComboKernelGrid", Config({}), **least).x_grid == 3


def test_kernels_in_one_launch_with_two_dimensions():
    meta = {"combo_grid_meta": combo((100, 70000), (64, None))}
    config = Config({"XBLOCK": 32, "YBLOCK": 1})
    made = grid("SequentialComboKernelGrid", config, **meta)
    assert made.evaluate({"ynumel_1": 8}) == (6, 35000, 2)
    assert made.evaluate({"ynumel_1": 140_000}) == (6, 46667, 3)


def test_kernels_in_one_launch_with_blocks_of_their_own():
    meta = {"combo_grid_meta": combo((100, 50), 64, (None, None), 9, no_x_dim_3=True)}
    blocks = {"XBLOCK_0": 32, "YBLOCK_0": 16, "XBLOCK_1": 8, "XBLOCK_2": 4, "YBLOCK_2": 2}
    made = grid("SequentialFlattenComboKernelGrid", Config(blocks), **meta)
    tiles = 4 * 4 + 8 + math.ceil(10 / 4) * math.ceil(7 / 2) + 9
    assert made.evaluate({"xnumel_2": 10, "ynumel_2": 7}) == (tiles, 1, 1)


def test_sizes_may_have_other_names():
    made = grid("Grid2D", numels={"x": "rows", "y": "heads"})
    assert made.names == {"rows", "heads"}
    assert made.evaluate({"rows": 65, "heads": 4}) == (2, 1, 1)
    made = grid("SplitScanGrid", Config({"R0_BLOCK": 256}), numels={"x": "rows", "r0_": "cols"})
    assert made.evaluate({"rows": 65, "cols": 257}) == (2, 65, 1)


def test_a_grid_reads_only_arguments():
    assert grid("Grid2DWithYZOverflow").names == {"xnumel", "ynumel"}
    assert grid("FixedGrid", fixed_grid=["max(math.floor(a / 2), b)", 1, 1]).names == {"a", "b"}


def test_every_kind_has_a_name():
    kinds = {"ComboKernelGrid": None, **GRIDS}
    todo = [GridExpr]
    while todo:
        todo += (made := todo.pop()).__subclasses__()
        assert made is GridExpr or made.__name__ in kinds


WRONG = {
    "unknown kind": (
        lambda: grid("Grid4D"),
        OptionError,
        f"inductor_meta: grid_type is 'Grid4D'; it must be one of {', '.join(GRIDS)}. Try: "
        "grid_type='Grid1D' for a kernel that has xnumel and XBLOCK.",
    ),
    "a size missing": (
        lambda: grid("Grid2D").evaluate({"xnumel": 4, "n": 5}),
        ArgumentError,
        "Grid2D: the grid reads ynumel, but the launch has xnumel, n. Try: give the kernel such "
        "an argument, or another grid_type.",
    ),
    "a parameter missing": (
        lambda: grid("Grid1D").function([]),
        ArgumentError,
        "Grid1D: the grid reads xnumel, but the launch has no arguments. Try: give the kernel "
        "such an argument, or another grid_type.",
    ),
    "rows that blocks do not divide": (
        lambda: grid("MixOrderReductionGrid", Config({"RSPLIT_SIZE": 24, "XBLOCK": 16})),
        OptionError,
        "MixOrderReductionGrid: RSPLIT_SIZE is 24 and XBLOCK 16; RSPLIT_SIZE must be a multiple "
        "of XBLOCK. Try: XBLOCK=1.",
    ),
    "no split": (
        lambda: grid("CooperativeReductionGrid", Config({"XBLOCK": 1})),
        OptionError,
        "CooperativeReductionGrid: RSPLIT is None; it must be the number of programs that share "
        "a row. Try: cooperative_reduction, which sets it.",
    ),
    "rows of a split scan": (
        lambda: grid("SplitScanGrid"),
        OptionError,
        "SplitScanGrid: XBLOCK is 64; a split scan takes one row a program. Try: "
        "inductor_meta={..., 'no_x_dim': True}, which makes it 1.",
    ),
    "no precomputed grid": (
        lambda: grid(
            "PrecomputedGrid",
            Config({"B": 2}, 4, 3),
            precomputed_grids=[{"config": {"B": 1}, "python": [1, 1, 1]}],
        ),
        OptionError,
        "PrecomputedGrid: the config is {'B': 2, 'num_warps': 4, 'num_stages': 3}, and none of "
        "the configs with a grid: {'B': 1}. Try: one of these.",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), WRONG.values(), ids=WRONG)
def test_grids_that_do_not_fit_get_a_sentence(make, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        make()
