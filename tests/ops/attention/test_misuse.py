"""What an attack on the operator found, each with its right answer."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.ops.attention import cases
from torch.autograd import forward_ad

import tileloom
from tileloom import emulator, masks
from tileloom.errors import (
    ConfigError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from tileloom.ops.attention.config import GluonSm90Config
from tileloom.ops.attention.reference import attention_reference
from tileloom.target import H100


def some(dtype=torch.float32, length=10, d=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 2, length, d, generator=generator).to(dtype).unbind(0)


@pytest.mark.parametrize(
    "lengths", [torch.tensor([5, 60, 9, 1])[::2], torch.tensor([7]).expand(2)], ids=["step", "same"]
)
def test_strided_lengths_reach_the_hopper_kernel(lengths):
    q, k, v = some(torch.float16, 64)
    mask = masks.key_lengths(lengths)
    with emulator.run():
        out = tileloom.attention(q, k, v, mask=mask)
    want = attention_reference(q, k, v, mask=mask, compute_dtype=torch.float64)
    assert (out - want).abs().max() < 2e-3


def test_a_tiny_scale_gives_the_mean_on_hopper():
    q, k, v = some(torch.float16, 64)
    with emulator.run():
        out = tileloom.attention(q, k, v, scale=1e-46, is_causal=True)
    assert (out[:, :, -1] - v.mean(2)).abs().max() < 2e-3


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_is_refused():
    q, k, v = some()
    call = lambda a: tileloom.attention(a, k, v)  # noqa: E731
    with pytest.raises(GradientError):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))
    with pytest.raises(GradientError), forward_ad.dual_level():
        call(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"bias": torch.ones(1, 2, 1, 1)}])
def test_vmap_is_refused(options):
    q = torch.randn(3, 1, 2, 8, 16)
    call = lambda a: tileloom.attention(a, a, a, **options)  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"torch\.vmap.*q\.flatten\(0, 1\)"):
        torch.vmap(call, randomness="different")(q)


def test_vmap_of_its_gradient_is_refused():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = tileloom.attention(q, q, q)
    call = lambda dout: torch.autograd.grad(out, q, dout)  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"torch\.vmap"):
        torch.vmap(call)(torch.ones(3, *out.shape))


def test_vmap_over_packed_sequences_is_refused():
    q, cu = torch.randn(3, 8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    call = lambda a: tileloom.attention_varlen(a, a, a, cu, cu, 5, 5)  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"torch\.vmap.*one behind the other"):
        torch.vmap(call)(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_casts_as_scaled_dot_product_attention_does(dtype):
    q, k, v = some(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tileloom.attention(q, k, v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == theirs.dtype
    half = [t.to(out.dtype) for t in (q, k, v)]
    assert torch.equal(out, tileloom.attention(*half))


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            OptionError,
            "is_causal is 'no'",
            lambda q, k, v: tileloom.attention(q, k, v, is_causal="no"),
        ),
        (
            DtypeError,
            "bias is a ndarray",
            lambda q, k, v: tileloom.attention(q, k, v, bias=np.ones(10)),
        ),
        (
            DtypeError,
            "float8",
            lambda q, k, v: tileloom.attention(q, k, v, bias=torch.zeros(10).to(torch.float8_e5m2)),
        ),
        (OptionError, "scale is 'x'", lambda q, k, v: tileloom.attention(q, k, v, scale="x")),
        (OptionError, "scale is True", lambda q, k, v: tileloom.attention(q, k, v, scale=True)),
        (OptionError, "scale is 1j", lambda q, k, v: tileloom.attention(q, k, v, scale=1j)),
        (OptionError, "scale is 1000", lambda q, k, v: tileloom.attention(q, k, v, scale=10**400)),
        (
            OptionError,
            "scale is tensor",
            lambda q, k, v: tileloom.attention(q, k, v, scale=torch.tensor(0.1)),
        ),
        (
            OptionError,
            "dropout_p is None",
            lambda q, k, v: tileloom.attention(q, k, v, dropout_p=None),
        ),
        (
            OptionError,
            "return_lse is 1; it must be True or False",
            lambda q, k, v: tileloom.attention(q, k, v, return_lse=1),
        ),
        (
            OptionError,
            "return_lse is a tensor; it must be True or False",
            lambda q, k, v: tileloom.attention(q, k, v, return_lse=torch.ones(2)),
        ),
        (DtypeError, "lengths is a list", lambda q, k, v: masks.key_lengths([1, 2])),
        (DtypeError, "visible is a NoneType", lambda q, k, v: masks.dense(None)),
        (DtypeError, "sparse", lambda q, k, v: tileloom.attention(q.to_sparse(), k, v)),
        (
            ShapeError,
            r"mask\[:, None, None\]",
            lambda q, k, v: tileloom.attention(
                q[:, :, :3], k, v, mask=torch.ones(2, 10, dtype=torch.bool)
            ),
        ),
    ],
)
def test_a_wrong_value_gets_a_sentence(error, words, call):
    with pytest.raises(error, match=words):
        call(*some())


def test_a_mask_and_nonsense_do_not_combine():
    with pytest.raises(TypeError, match="unsupported operand"):
        masks.causal() & 3


def test_a_bound_beyond_int64_is_no_bound():
    q, k, v = some()
    assert torch.equal(
        tileloom.attention(q, k, v, mask=masks.window(2**70, None)), tileloom.attention(q, k, v)
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GluonSm90Config(consumers=1), "consumers is 1"),
        (GluonSm90Config(block_n=48), "block_n is 48"),
        (GluonSm90Config(stages=0), "stages is 0"),
        (GluonSm90Config(registers=500), "registers is 500"),
        (GluonSm90Config(consumers=3, registers=240), "registers is 240"),
        (GluonSm90Config(store="bogus"), "store is 'bogus'"),
        (GluonSm90Config(held=48), "held is 48"),
        (GluonSm90Config(2, 64, 2, "registers", 240), "needs 32 columns"),
    ],
)
def test_a_config_that_cannot_be_says_why(config, words):
    q, k, v = some(torch.float16)
    problem = cases.problem_of(cases.Inputs(q, k, v, {}))
    assert any(words in reason for reason in config.reasons_against(problem, H100))


def test_a_store_that_nobody_has_is_a_config_error():
    with pytest.raises(ConfigError, match="has store 'bogus'"):
        tileloom.attention(*some(torch.float16), config=GluonSm90Config(store="bogus"))


def test_a_scale_may_change_under_compile():
    torch._dynamo.reset()
    q, k, v = some()
    call = torch.compile(
        lambda q, k, v, scale: tileloom.attention(q, k, v, scale=scale),
        fullgraph=True, dynamic=True, backend="eager",
    )  # fmt: skip
    for scale in (0.3, 0.4, 0.5):
        assert torch.equal(call(q, k, v, scale), tileloom.attention(q, k, v, scale=scale))


def test_scripts_obey_the_log_variable():
    code = "import torch, tileloom; q = torch.ones(1, 1, 2, 8); tileloom.attention(q, q, q)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"TILELOOM_LOGS": "dispatch", "PYTHONPATH": "src", "PATH": "/usr/bin"},
    )  # fmt: skip
    assert "[tileloom.dispatch] attention: reference by rule" in done.stderr
