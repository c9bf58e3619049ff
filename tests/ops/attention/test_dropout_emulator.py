"""Dropout in the portable kernels on the emulator: to the bit, forward and backward."""

from __future__ import annotations

import pytest
import torch
from tests.ops.attention import gradients
from tests.ops.attention.dropout import (
    FORMS,
    check,
    check_gradients,
    drawn_at,
    portable,
    recovered,
    recovered_backward,
)

import tileloom
from tileloom import emulator
from tileloom.ops import record_choices
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig
from tileloom.testing import dropout_mask, poisoned_memory

_P = 0.3
_CONFIGS = {
    "config": TritonConfig(32, 32),
    "backward_config": TritonBackwardConfig(Tile(32, 32), Tile(32, 32)),
}


_LONG = ("plain", "causal", "odd-keys")  # what the others have too
_CASES = [
    pytest.param(case, id=case.id, marks=[pytest.mark.full] if case.name in _LONG else [])
    for case in FORMS
]


@pytest.mark.parametrize("case", _CASES)
def test_outputs_and_gradients(case):
    inputs = case.inputs()
    torch.manual_seed(2)
    state = drawn_at(inputs)
    given = gradients.upstream(inputs)
    with emulator.run() as run, poisoned_memory(), record_choices() as made:
        leaves, options = gradients._leaves(inputs)
        out, lse = tileloom.attention(
            *leaves[:3], **options, dropout_p=_P, return_lse=True, **portable(inputs)
        )
        results = gradients._differentiate(leaves, out, lse, given)
    assert [choice.backend for choice in made] == ["triton", "triton"]
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    check(inputs, out.detach(), lse.detach(), _P, state)
    check_gradients(inputs, given, results, _P, state)


@pytest.mark.parametrize("size", [(2, 3, 40, 64), (1, 2, 33, 71)])
def test_forward_and_backward_have_the_hosts_mask(size):
    torch.manual_seed(11)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    right = dropout_mask(_P, seed=seed, offset=0, size=size)
    for shown in (recovered, recovered_backward):
        torch.manual_seed(11)
        with emulator.run():
            assert torch.equal(shown(size, _P, **_CONFIGS), right)


@pytest.mark.parametrize(("seed", "offset"), [(-3, 6), (2**62, 2**34 - 1), (5, 2**33 + 4)])
@pytest.mark.parametrize("len_k", [64, 61])
def test_any_seed_and_offset(seed, offset, len_k):
    """The operators themselves, with offsets that are no multiple of 4 and beyond 32 bits."""
    q, k = torch.zeros(1, 2, 20, 16).half(), torch.zeros(1, 2, len_k, 16).half()
    v = torch.eye(len_k).half().expand(1, 2, -1, -1).contiguous()
    state = (torch.tensor(seed), torch.tensor(offset))
    options = (None, None, None, None, 0.25, _P, *state)
    dout = torch.eye(20).half().expand(1, 2, -1, -1).contiguous()
    values = torch.zeros(1, 2, len_k, 20).half()
    with emulator.run():
        config = _CONFIGS["config"].encode()
        out, lse = torch.ops.tileloom.attention_fwd(q, k, v, None, None, None, *options, config, "")
        of_values, _ = torch.ops.tileloom.attention_fwd(
            q, k, values, None, None, None, *options, config, ""
        )
        _, _, dv, _ = torch.ops.tileloom.attention_bwd(
            dout, None, q, k, values, of_values, lse, None, None, None, *options,
            False, True, False, _CONFIGS["backward_config"].encode(),
        )  # fmt: skip
    right = dropout_mask(_P, seed=seed, offset=offset, size=(1, 2, 20, len_k))
    assert torch.equal(out != 0, right)
    assert torch.equal(dv.transpose(2, 3) != 0, right)


@pytest.mark.parametrize("offset", [2**34 + 8, 2**34 - 4 * 64 * 5, 6])
@pytest.mark.parametrize("len_k", [64, 61])
def test_the_hopper_forward_with_any_seed_and_offset(offset, len_k):
    """Counters of more than 32 bits, or whose low word turns over; four keys of two of them."""
    seed = 2**62 - 3
    q, k, v = (torch.zeros(1, 2, n, 64).half() for n in (20, len_k, len_k))
    v[..., :len_k, :len_k] = torch.eye(len_k)
    state = (torch.tensor(seed), torch.tensor(offset))
    options = (None, None, None, None, 0.25, _P, *state)
    config = GluonSm90Config(2, 64, 2).encode()
    with emulator.run() as run:
        out, _ = torch.ops.tileloom.attention_fwd(q, k, v, None, None, None, *options, config, "")
    assert len(run.launches) == 1
    right = dropout_mask(_P, seed=seed, offset=offset, size=(1, 2, 20, len_k))
    assert torch.equal(out[..., :len_k] != 0, right)
