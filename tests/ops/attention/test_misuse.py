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
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
    UnsupportedError,
)
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.reference import attention_reference
from tileloom.target import H100
from tileloom.testing import dropout_mask


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


def test_batched_gradients_are_those_of_each_entry():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = tileloom.attention(q, q, q)
    douts = torch.randn(3, *out.shape)
    grads = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)[0]
    for dout, grad in zip(douts, grads):
        assert torch.equal(grad, torch.autograd.grad(out, q, dout, retain_graph=True)[0])


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
        (
            OptionError,
            r"000\.\.\.; it",
            lambda q, k, v: tileloom.attention(q, k, v, scale=10**400),
        ),
        (
            OptionError,
            "scale is a int of too many digits",
            lambda q, k, v: tileloom.attention(q, k, v, scale=10**5000),
        ),
        (
            OptionError,
            "scale is a tensor of torch.float32 and shape",
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
            r"return_lse is a tensor of torch.float32 and shape \(2,\); it must be True or False",
            lambda q, k, v: tileloom.attention(q, k, v, return_lse=torch.ones(2)),
        ),
        (
            OptionError,
            r"dropout_p is np.float32\(0.5\).*Try: float\(dropout_p\)",
            lambda q, k, v: tileloom.attention(q, k, v, dropout_p=np.float32(0.5)),
        ),
        (
            DtypeError,
            r"bias is a torch.sparse_coo tensor.*bias.to_dense\(\)",
            lambda q, k, v: tileloom.attention(q, k, v, bias=torch.zeros(10, 10).to_sparse()),
        ),
        (
            DtypeError,
            r"mask is a torch.sparse_coo tensor.*mask.to_dense\(\)",
            lambda q, k, v: tileloom.attention(q, k, v, mask=(torch.eye(10) > 0).to_sparse()),
        ),
        (
            DtypeError,
            r"q is a nested tensor.*Try: q.to_padded_tensor\(0.0\) and masks.key_lengths",
            lambda q, k, v: tileloom.attention(
                torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged), k, v
            ),
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


def operator(q, k, v, mask=None, bias=None, lengths=None, band=(None,) * 4, scale=0.3, config=""):
    given = (q, k, v, mask, bias, lengths, *band, scale, 0.0, None, None, config, "")
    return torch.ops.tileloom.attention_fwd(*given)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ShapeError, "k has 1 batch|k has batch 1", lambda q, k, v: operator(q, k[:1], v)),
        (ShapeError, "k has 3 keys, v has 10", lambda q, k, v: operator(q, k[:, :, :3], v)),
        (DtypeError, "k has dtype torch.float16", lambda q, k, v: operator(q, k.half(), v)),
        (DtypeError, "mask has dtype", lambda q, k, v: operator(q, k, v, torch.zeros(10, 10))),
        (ShapeError, "does not broadcast", lambda q, k, v: operator(q, k, v, bias=torch.ones(7))),
        (
            ShapeError,
            "key_lengths has 3 entries",
            lambda q, k, v: operator(q, k, v, lengths=torch.ones(3, dtype=torch.int64)),
        ),
        (OptionError, "-3", lambda q, k, v: operator(q, k, v, band=(None, -3, None, None))),
        (OptionError, "scale is nan", lambda q, k, v: operator(q, k, v, scale=float("nan"))),
        (ConfigError, "which no config writes", lambda q, k, v: operator(q, k, v, config="triton")),
        (
            ConfigError,
            "which no config writes",
            lambda q, k, v: tileloom.attention(q, k, v, config=TritonConfig(64.5)),
        ),
    ],
)
def test_the_operator_by_itself_refuses_what_no_kernel_may_see(error, words, call):
    with pytest.raises(error, match=words):
        call(*some())


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ShapeError, r"dout has shape \(2, 2, 3, 16\)", {0: lambda t: t[:, :, :3]}),
        (ShapeError, r"dlse has shape \(2, 2\); it must be \(2, 2, 10\)", {1: lambda t: t[..., 0]}),
        (
            DtypeError,
            "dout has dtype torch.float16; it must be torch.float32",
            {0: torch.Tensor.half},
        ),
        (DtypeError, "lse has dtype torch.float64", {6: torch.Tensor.double}),
        (ShapeError, "out has shape", {5: lambda t: t[:1]}),
        (ConfigError, "backward_config is 'x'", {21: lambda t: "x"}),
    ],
)
def test_the_backward_by_itself_refuses_what_is_no_forwards(error, words, change):
    q, k, v = some()
    out, lse = operator(q, k, v)
    given = [torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, *(None,) * 7]
    given += [0.3, 0.0, None, None, True, True, False, ""]
    for place, make in change.items():
        given[place] = make(given[place])
    with pytest.raises(error, match=words):
        torch.ops.tileloom.attention_bwd(*given)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ShapeError, "lengths of one mask", lambda: lengths_of(1, 2) & lengths_of(1, 2, 3)),
        (
            ShapeError,
            r"visible of one mask has shape \(2, 3\), of the other \(4, 5\)",
            lambda: masks.dense(torch.ones(2, 3) > 0) & (torch.ones(4, 5) > 0),
        ),
        (
            DeviceError,
            "lengths of one mask is on cpu, of the other on meta",
            lambda: lengths_of(1) & masks.key_lengths(torch.ones(1, dtype=int, device="meta")),
        ),
        (OptionError, "len_q is -1", lambda: masks.causal().materialize(1, -1, 2)),
        (OptionError, "batch is 'a'", lambda: masks.causal().materialize("a", 1, 2)),
        (ShapeError, "batch is 3.*Try: batch=2", lambda: lengths_of(1, 2).materialize(3, 1, 2)),
        (
            ShapeError,
            "len_k is 4, and the mask's tensor has shape .7,.*Try: len_k=7",
            lambda: masks.dense(torch.ones(7) > 0).materialize(1, 3, 4),
        ),
        (OptionError, "seed is 0.5", lambda: dropout_mask(0.5, seed=0.5, offset=0, size=(1,) * 4)),
        (OptionError, "size is .2, 3.", lambda: dropout_mask(0.5, seed=0, offset=0, size=(2, 3))),
        (
            OptionError,
            "dropout_p is 1.0",
            lambda: dropout_mask(1.0, seed=0, offset=0, size=(1,) * 4),
        ),
        (UnknownOptionError, "'sead'.*seed=", lambda: dropout_mask(0.5, sead=0, offset=0, size=1)),
    ],
)
def test_masks_and_dropouts_mask_refuse_in_words(error, words, call):
    with pytest.raises(error, match=words):
        call()


def lengths_of(*lengths):
    return masks.key_lengths(torch.tensor(lengths))


def test_a_mask_of_fixed_size_compiles_where_lengths_vary():
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v, **options: tileloom.attention(q, k, v, **options),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    q, k, v = some()
    torch._dynamo.maybe_mark_dynamic(q, 2)
    for options in ({"mask": torch.eye(10) > 0}, {"bias": torch.eye(10)}):
        assert torch.equal(call(q, k, v, **options), tileloom.attention(q, k, v, **options))


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
