"""What configs of the Hopper forward choose between: held columns of Q, turns, lazy maxima, masks.

On the emulator; rows of q grow, so that maxima grow by little and by much.
"""

from types import SimpleNamespace

import pytest
import torch
from tests.ops.attention import cases

import tileloom
from tileloom import emulator, masks
from tileloom.ops.attention.config import GluonSm90Config, gluon_rule
from tileloom.ops.attention.launch_gluon_sm90_fwd import constants, is_aligned, is_apart
from tileloom.ops.attention.masks import Band, Mask
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import H100

F16 = torch.float16


def judged(head_dim, len_q, len_k, config, mask=None, dtype=F16, **options):
    q, k, v = (torch.randn(1, 1, n, head_dim, dtype=dtype) for n in (len_q, len_k, len_k))
    q *= torch.linspace(0.2, 12, len_q, dtype=dtype)[:, None]
    with emulator.run():
        out, lse = tileloom.attention(q, k, v, mask=mask, config=config, return_lse=True, **options)
    inputs = SimpleNamespace(q=q, k=k, v=v, options={"mask": mask, **options})
    cases.check(inputs, out, lse)


def problem(len_q, len_k, head_dim=64, mask=None, dropout_p=0.0):
    mask = mask or Mask(Band(), None, None)
    q, k = (torch.empty(1, 1, n, head_dim, dtype=F16) for n in (len_q, len_k))
    return AttentionProblem.of(q, k, k, None, None, mask.lengths, mask.band, 0.1, dropout_p)


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        (64, GluonSm90Config(2, 64, 2, held=64, lazy=True)),
        (64, GluonSm90Config(3, 32, 3, "tma", 160, turns=False)),
        (128, GluonSm90Config(2, 32, 2, held=128, lazy=True)),
        (128, GluonSm90Config(2, 32, 4, turns=False, held=64)),
        (256, GluonSm90Config(2, 32, 2, "registers", pin=True, held=64, lazy=True)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_forms_are_right(head_dim, config, is_causal):
    judged(head_dim, 140, 170, config, is_causal=is_causal)


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
def test_a_bias_with_lazy_maxima_is_right(dtype):
    bias = torch.linspace(-300, 40, 200, dtype=dtype).flip(0)[None, :] * torch.ones(150, 1)
    config = GluonSm90Config(2, 64, 2, ride_stages=2, lazy=True)
    judged(64, 150, 200, config, bias=bias.to(dtype), dtype=dtype)


@pytest.mark.parametrize(
    ("len_q", "len_k", "left", "bits"),
    [
        (256, 256, 95, (True, True)),
        (256, 256, 94, (False, True)),
        (256, 250, 100, (False, False)),
        (288, 128, 100, (False, False)),  # the last tile sees no key
        (256, 96, 150, (False, False)),  # the last rows see no key
        (128, 256, 130, (True, True)),
    ],
)
def test_windows_are_cut_where_they_must_be(len_q, len_k, left, bits):
    config = GluonSm90Config(2, 32, 2)
    given = problem(len_q, len_k, mask=masks.window(left, 0))
    assert (is_apart(given, config), is_aligned(given, config)) == bits
    judged(64, len_q, len_k, config, masks.window(left, 0))


def test_bounds_that_only_the_device_knows_are_all_looked_at():
    lengths = masks.key_lengths(torch.tensor([30])) & masks.window(100, 0)
    given = problem(256, 256, mask=lengths)
    chosen = constants(given, GluonSm90Config(2, 32, 2))
    assert not chosen["APART"]
    assert not chosen["ALIGNED"]


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("length", [512, 16384])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(512, 0)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_what_the_rule_takes_can_run(head_dim, length, mask, dropout_p):
    given = problem(length, length, head_dim, mask, dropout_p)
    assert gluon_rule(given).reasons_against(given, H100) == ()
