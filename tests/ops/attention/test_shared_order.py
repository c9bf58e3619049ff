"""Batches that share a bias or mask follow each other; on the emulator, forward and backward."""

from dataclasses import replace

import pytest
import torch
from tests.ops.attention import cases, emulated, emulated_backward
from tests.ops.attention.cases import BF16, AttentionCase

from tileloom import emulator
from tileloom.ops.attention.config import GluonSm90Config
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.launch_gluon_sm90_fwd import section_of
from tileloom.ops.attention.strides import is_shared


def _inputs(len_q: int, *, is_causal: bool, kind: str) -> cases.Inputs:
    """Three batches of two heads, a bias or mask `[1, 2, Lq, Lk]`."""
    bias = mask = None
    if kind == "bias":
        bias = cases.added((1, 2, len_q, 144), layout=cases.rows_of_16_bytes)
    else:
        mask = cases.visible((1, 2, len_q, 144))
    sizes = (3, 2, 1, len_q, 144, 64, 64)
    options = {"is_causal": True} if is_causal else {}
    return AttentionCase("shared", sizes, BF16, mask=mask, bias=bias, options=options).inputs()


@pytest.mark.parametrize(("is_causal", "kind"), [(False, "bias"), (True, "mask")])
def test_the_forward_is_right(is_causal: bool, kind: str):
    inputs = _inputs(270, is_causal=is_causal, kind=kind)
    mask, bias = inputs.options.get("mask"), inputs.options.get("bias")
    assert is_shared(cases.problem_of(inputs), mask, bias)
    config = GluonSm90Config(2, 64, 2, ride_stages=1)
    emulated.play(inputs, config, "ttgir", [("random", 0)])


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_backward_is_right(is_causal: bool):
    inputs = _inputs(135, is_causal=is_causal, kind="bias")
    config = GluonSm90BackwardConfig(64, 2)
    assert emulated_backward.modes_of(inputs, config).is_shared
    with emulator.run(schedule="random", sms=2):
        emulated_backward.checked(inputs, config)


def test_only_tensors_with_rows_that_batches_share_count():
    problem = cases.problem_of(_inputs(64, is_causal=False, kind="bias"))
    shared = torch.zeros(1, 2, 64, 144)
    own = torch.zeros(3, 1, 64, 144)
    keys = torch.zeros(1, 2, 1, 144)
    assert not is_shared(problem, None, None)
    assert not is_shared(problem, own, keys)
    assert is_shared(problem, own, shared)


@pytest.mark.parametrize(
    ("batch", "is_causal", "section"),
    [(4, False, 4), (4, True, 16), (64, False, 16), (2, True, 16)],
)
def test_no_more_batches_go_side_by_side_than_the_cache_holds(batch, is_causal, section):
    problem = cases.problem_of(_inputs(64, is_causal=is_causal, kind="bias"))
    problem = replace(problem, batch=batch, heads_q=16, len_k=4096, head_dim=128, head_dim_v=128)
    assert section_of(problem, 2, batch * 16) == section
