"""The kernels on packed sequences, on the emulator: forward and all gradients, no report."""

from __future__ import annotations

import pytest
import torch
from tests.ops.attention.cases import BF16
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase
from tests.ops.attention.varlen.emulated import Play, hopper_plays

import tileloom
from tileloom import emulator
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.varlen import backward

LEVELS = ("ttgir", "machine")
_PORTABLE = (TritonConfig(32, 16), TritonBackwardConfig(Tile(16, 32, 4), Tile(32, 16, 4)))
CASES = [
    case
    for group in ("reported", "plain", "shown", "biased", "dropped")
    for case in cases.GROUPS[group]
    if case.lens_q
]
HOPPER = [
    case
    for case in CASES
    if case.dtype != cases.FP32
    and case.layout in ("contiguous", "gapped")
    and case.options.get("scale", 1.0) > 0
    and not case.options.get("dropout_p")
]


def _hopper(case: VarlenCase) -> Play:
    """The play on small tiles."""
    store = "tma" if case.sizes[2] == case.sizes[3] else "registers"
    return Play(case, GluonSm90Config(2, 32, 2, store), GluonSm90BackwardConfig(64, 2))


named = {"ids": lambda value: getattr(value, "name", None) or getattr(value, "id", None)}


@pytest.mark.parametrize("case", CASES, **named)
def test_the_portable_kernels(case):
    Play(case, *_PORTABLE, arch="sm_90").run("ttgir", [("late", 0)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("play", hopper_plays(), **named)
def test_every_shipped_hopper_kernel(play, level):
    play.run(level)


@pytest.mark.parametrize("case", HOPPER, **named)
def test_the_hopper_kernels_on_every_case(case):
    _hopper(case).run("machine", [("late", 0), ("random", 1)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", cases.DROPPED, **named)
def test_dropout_in_the_hopper_kernels(case, level):
    _hopper(case).run(level, [("late", 0), ("random", 1)])


@pytest.mark.parametrize("offsets", [[0, -50, 900, 300], [500, 100, 700, 0], [3, 5, 4000, 2]])
def test_wrong_offsets_end_in_a_fixed_order_too(offsets, monkeypatch):
    """On a GPU nobody looks at them: programs that wait for one another must not wait for ever."""
    monkeypatch.setattr(backward, "check_values", lambda *args: None)
    q, k, v, dout, out = (torch.randn(700, 1, 128, dtype=BF16) for _ in range(5))
    cu = torch.tensor(offsets, dtype=torch.int32)
    config = GluonSm90BackwardConfig(64, 2, ordered=True).encode()
    with emulator.run(level="ttgir", sms=3) as run:
        backward.attention_varlen_bwd(
            dout, None, q, k, v, out, torch.zeros(1, 700), cu, cu, 700, 700, None, None, None,
            None, None, None, None, 0.1, 0.0, None, None, True, True, False, config,
        )  # fmt: skip
    assert [r.text() for r in run.reports if r.severity != "info"] == []


@pytest.mark.parametrize("dim", [64, 136])
def test_rows_with_a_large_lse_have_the_gradients_of_the_batch(dim):
    """Sequences of whole blocks: the same products in the same order, to the bit."""
    draw = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, 2, 128, dim, generator=draw).bfloat16() for _ in range(4))
    bias = torch.randn(2, 2, 128, 128, generator=draw).bfloat16()
    bias[:, :, 7:30] = -1e9
    cu = torch.tensor([0, 128, 256], dtype=torch.int32)
    options = {"config": GluonSm90Config(2, 32, 2), "backward_config": GluonSm90BackwardConfig()}
    results = []
    for is_packed in (False, True):
        own = [t.transpose(1, 2).flatten(0, 1) if is_packed else t for t in (q, k, v, dout)]
        leaves = [t.detach().requires_grad_() for t in (*own[:3], bias)]
        with emulator.run() as run:
            if is_packed:
                out = tileloom.attention_varlen(
                    *leaves[:3], cu, cu, 128, 128, bias=leaves[3], **options
                )
            else:
                out = tileloom.attention(*leaves[:3], bias=leaves[3], **options)
            found = torch.autograd.grad(out, leaves, own[3])
        assert [r.text() for r in run.reports if r.severity != "info"] == []
        if is_packed:
            found = [t.unflatten(0, (2, 128)).transpose(1, 2) for t in found[:3]] + [found[3]]
        results.append(found)
    for whole, packed in zip(*results):
        assert torch.equal(whole, packed)
