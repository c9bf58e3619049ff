"""Which backward takes its rows through a ring, why not, and the order of its second kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import NormCase

from tileloom import emulator
from tileloom.errors import ConfigError
from tileloom.launch.aot import compile_aot
from tileloom.ops.rowwise.norm.config import rule
from tileloom.ops.rowwise.norm.kernels import problem, shipped
from tileloom.target import H100

LAYER = problem(16384, torch.bfloat16, is_centred=True)


def ring_of(asked, target=H100):
    tile = rule(asked, target).backward
    return tile if tile.ring else None


@pytest.mark.parametrize("width", [4104, 5120, 6144, 8200, 12288, 16384])
def test_wide_layer_norms_take_a_ring(width):
    tile = ring_of(problem(width, torch.float16, is_centred=True))
    assert tile is not None
    assert tile.block * (6 if width <= 6144 else 4) >= width


@pytest.mark.parametrize(
    ("what", "target"),
    [
        (problem(4096, torch.bfloat16, is_centred=True), H100),
        (problem(8192, torch.bfloat16, is_centred=True), H100),
        (problem(16392, torch.bfloat16, is_centred=True), H100),
        (problem(16384, torch.bfloat16, is_centred=False), H100),
        (problem(16384, torch.float32, is_centred=True), H100),
        (problem(16380, torch.bfloat16, is_centred=True), H100),  # no multiple of 16 bytes
        (problem(16384, torch.bfloat16, is_centred=True, has_residual=True), H100),  # too large
        (replace(LAYER, is_aligned=False), H100),
        (replace(LAYER, rows=replace(LAYER.rows, count=256)), H100),  # few rows: one launch
        (LAYER, replace(H100, capability=(8, 0))),
        (LAYER, replace(H100, capability=(10, 0))),
    ],
)
def test_others_do_not(what, target):
    assert ring_of(what, target) is None


def test_a_ring_that_cannot_be_says_why():
    case = NormCase("layer", (3, 520), cases.FP32, ("weight",), config=cases.RING)
    with emulator.run(sms=8), pytest.raises(ConfigError) as caught:
        cases.run(case.inputs())
    assert "- triton: backward.ring takes float16 and bfloat16, and rows are torch.float32" in str(
        caught.value
    )
    tile = replace(cases.RING.backward, block=512)
    wrong = replace(case, dtype=cases.BF16, config=replace(cases.RING, backward=tile))
    with emulator.run(sms=8), pytest.raises(ConfigError) as caught:
        cases.run(wrong.inputs())
    assert (
        "- triton: backward.ring takes blocks of 256 columns for each warp, 1 row and 2 stages or "
        "more, and they are 512 for 1 warps, 1 and 3"
    ) in str(caught.value)


def test_rows_that_do_not_begin_at_16_bytes_are_refused():
    case = NormCase("layer", (5, 520), cases.BF16, ("weight",), ("unaligned", ""))
    with emulator.run(sms=8), pytest.raises(ConfigError, match="do not begin at multiples of 16"):
        cases.run(replace(case, config=cases.RING).inputs())


def test_the_shares_are_read_when_all_are_written():
    """On Hopper the kernel that adds them up starts early; it waits before it reads anything."""
    (spec,) = [s for s in shipped() if s.name == "norm_vectors[fp32-overlapped]"]
    made = compile_aot(spec, "sm_90")
    assert made.launch.pdl
    assert 0 < made.ptx.index("griddepcontrol.wait") < made.ptx.index("ld.global")
