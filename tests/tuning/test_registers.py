"""One more candidate where registers keep programs off the SMs."""

from __future__ import annotations

import pytest

from tileloom.tuning import Config, Facts
from tileloom.tuning.grids import GridExpr
from tileloom.tuning.hints import DeviceProperties, HeuristicType
from tileloom.tuning.registers import may_scale, programs_of, scaled_config

H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
WIDE = Config({"XBLOCK": 1, "R0_BLOCK": 2048}, num_warps=16, num_stages=1)


def scaled(registers=64, programs=4096, config=WIDE, **more):
    found = scaled_config(config, registers, programs, H100, **more)
    return found and found.kwargs["R0_BLOCK"]


def test_a_block_is_halved_if_its_registers_keep_programs_waiting():
    assert scaled() == 1024
    assert scaled_config(WIDE, 64, 4096, H100) == WIDE.with_kwargs(R0_BLOCK=1024)


def test_registers_that_let_all_threads_run_change_nothing():
    assert (scaled(registers=32), scaled(registers=33)) == (None, 1024)
    assert scaled(registers=None) is None, "the compiler did not say"


def test_a_grid_that_runs_at_once_changes_nothing():
    # 65536 // (64 * 32 * 16) = 2 programs an SM, 264 on 132 SMs.
    assert (scaled(programs=264), scaled(programs=265)) == (None, 1024)
    # 255 registers let one program of 16 warps on an SM: no less is counted.
    assert (scaled(registers=255, programs=132), scaled(registers=255, programs=133)) == (
        None,
        1024,
    )


def test_small_blocks_and_those_that_a_kernel_needs_stay():
    assert scaled(config=WIDE.with_kwargs(R0_BLOCK=64)) is None
    assert scaled(config=WIDE.with_kwargs(R0_BLOCK=128)) == 64
    assert (scaled(min_rblock=1024), scaled(min_rblock=2048)) == (1024, None)
    flagged = Config(WIDE.kwargs, 16, 1, is_scalable=False)
    assert scaled(config=flagged) is None, "the original does not look at the flag"


def test_the_largest_reduction_block_is_halved_and_a_split_is_none():
    config = Config({"XBLOCK": 1, "R0_BLOCK": 4, "R1_BLOCK": 32, "RSPLIT": 64}, 4, 1)
    found = scaled_config(config, 128, 10**6, H100)
    assert found is not None
    assert found.kwargs == {**config.kwargs, "R1_BLOCK": 16}
    whole = Config({"XBLOCK": 1, "RSPLIT_SIZE": 512}, 4, 1)
    assert scaled_config(whole, 128, 10**6, H100) is None


def test_all_programs_count():
    sizes = {"x": 64, "y": 128, "r0_": 4096}
    config = Config({"XBLOCK": 2, "YBLOCK": 4, "R0_BLOCK": 64, "RSPLIT": 8})
    made = {
        kind: programs_of(GridExpr.from_meta({"grid_type": kind}, config), sizes)
        for kind in ("Grid1D", "Grid2D", "CooperativeReductionGrid")
    }
    assert made == {"Grid1D": 32, "Grid2D": 32 * 32, "CooperativeReductionGrid": 8 * 32}


@pytest.mark.parametrize(
    ("kind", "facts", "device", "may"),
    [
        (HeuristicType.REDUCTION, Facts(), H100, True),
        (HeuristicType.REDUCTION, Facts(persistent=True), H100, False),
        (HeuristicType.REDUCTION, Facts(deterministic=True), H100, False),
        (HeuristicType.POINTWISE, Facts(), H100, False),
        (HeuristicType.REDUCTION, Facts(), H100._replace(major=7), False),
        (HeuristicType.REDUCTION, Facts(), H100._replace(regs_per_multiprocessor=None), False),
    ],
)
def test_which_kernels_may_scale(kind, facts, device, may):
    assert may_scale(kind, facts, device) is may
