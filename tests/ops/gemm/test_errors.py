"""Wrong arguments: one sentence each, before any launch."""

import pytest
import torch
from torch.nn.functional import gelu

from tileloom import emulator, errors
from tileloom.launch.layout import Layout
from tileloom.ops.gemm import async_input, async_input_matmul, matmul
from tileloom.ops.gemm.async_input import check_queues
from tileloom.ops.gemm.config import GluonSm90Config, TritonConfig
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.target import H100

A, B = torch.randn(6, 4), torch.randn(4, 5)
FLAGS = torch.ones(2, dtype=torch.int32).view(torch.uint32)
NARROW = torch.randn(6, 4).bfloat16()


@pytest.mark.parametrize(
    ("args", "options", "kind", "text"),
    [
        ((A, A), {}, errors.ShapeError, "a's last size (K) must be b's last but one. Try: b.mT"),
        ((A, torch.randn(3, 5)), {}, errors.ShapeError, "Try: a b of 4 rows, or an a of 3 columns"),
        ((A, torch.randn(6, 5)), {}, errors.ShapeError, "Try: a.mT."),
        ((A[0], B), {}, errors.ShapeError, "a has 1 dimensions; it must have 2, or 3"),
        ((A[None, None], B), {}, errors.ShapeError, "Try: a.flatten(0, 1)"),
        ((A.expand(2, 6, 4), B.expand(3, 4, 5)), {}, errors.ShapeError, "a has 2 batches, b has 3"),
        ((A.int(), B), {}, errors.DtypeError, "a has dtype torch.int32; supported:"),
        ((A, B.bfloat16()), {}, errors.DtypeError, "b has dtype torch.bfloat16, a has torch.float"),
        ((A, B.to("meta")), {}, errors.DeviceError, "b is on meta, a on cpu"),
        (([1.0], B), {}, errors.DtypeError, "a is a list; it must be a torch.Tensor"),
        ((A.to_sparse(), B), {}, errors.DtypeError, "a is a torch.sparse_coo tensor"),
        ((A, B), dict(bias=torch.randn(4)), errors.ShapeError, "bias has shape (4,); it must be"),
        ((A, B), dict(bias=torch.randn(1, 5)), errors.ShapeError, "Try: bias.flatten()"),
        ((A, B), dict(bias=3), errors.DtypeError, "bias is a int"),
        ((A, B), dict(residual=A), errors.ShapeError, "residual has shape (6, 4); it must"),
        ((A, B), dict(activation="tanh"), errors.OptionError, "activation is 'tanh'; it must be"),
        ((A, B), dict(activation="swish"), errors.OptionError, "None. Try: activation='silu'."),
        ((A, B), dict(activation="rlu"), errors.OptionError, ", or None. Try: activation='relu'."),
        ((A, B), dict(activation=gelu), errors.OptionError, ", or None. Try: activation='gelu'."),
        ((A, B), dict(activation=torch.nn.SiLU()), errors.OptionError, "Try: activation='silu'."),
        ((A, B), dict(activation=torch.nn.GELU(approximate="tanh")), errors.OptionError,
         "Try: activation='gelu_tanh'."),
        ((A, B), dict(activation=torch.sqrt), errors.OptionError,
         "Try: activation=None, and yours afterwards."),
        ((A, B), dict(activation=3), errors.OptionError, ", or None. Try: one of these."),
        ((A, B), dict(activation=""), errors.OptionError, "activation is ''; it must be one of"),
        ((A, B), dict(out_dtype=torch.int8), errors.DtypeError, "out_dtype is torch.int8; supp"),
        ((A, B), dict(config=3), errors.OptionError, "config is a int; it must be one of"),
        ((A, B), dict(out=A), errors.ShapeError, "out has shape (6, 4), and the product (6, 5)"),
        ((A, B), dict(out=torch.empty(6, 5), out_dtype=torch.float16), errors.DtypeError,
         "out has dtype torch.float32, and out_dtype is torch.float16"),
        ((A, B), dict(out=torch.empty(1, 5).expand(6, 5)), errors.OptionError,
         "out has shape (6, 5) and strides (0, 1): elements share memory. Try: out.clone()."),
        ((A, B), dict(out=torch.empty(30).as_strided((6, 5), (4, 1))), errors.OptionError,
         "out has shape (6, 5) and strides (4, 1): elements share memory. Try: out.clone()."),
        ((A, B), dict(out=torch.empty(6, 5, dtype=torch.complex64).conj().imag), errors.OptionError,
         "out is a view of a conjugated tensor, whose values are the negatives of what lies"),
        ((A, B), dict(config=GluonSm90Config()), errors.ConfigError, "the tensors are on the CPU"),
        ((A, B), dict(config=TritonConfig(num_stages=0)), errors.ConfigError, "num_stages is 0, n"),
        ((A, B), dict(transpose_b=True), errors.UnknownOptionError, "Try: b.mT, which copies"),
        ((A, B), dict(actvation="relu"), errors.UnknownOptionError, "Try: activation=."),
    ],
)  # fmt: skip
def test_matmul(args, options, kind, text):
    with pytest.raises(kind) as caught:
        matmul(*args, **options)
    assert text in str(caught.value)
    assert str(caught.value).startswith("matmul: ")
    assert "\n" not in str(caught.value)


def test_out_may_not_share_memory_that_is_read():
    whole = torch.randn(8, 8)
    for name, a, b in (("a", whole[:, :4], B), ("b", A, whole[:4, :5])):
        with pytest.raises(errors.OptionError, match=f"out shares memory with {name}"):
            matmul(a, b, out=whole[: a.shape[0], : b.shape[1]])
    with pytest.raises(errors.OptionError, match="out shares memory with residual"):
        matmul(A, B, residual=whole[1:7, :5], out=whole[:6, :5])
    residual = whole[:6, :5]
    expected = A @ B + residual
    torch.testing.assert_close(matmul(A, B, residual=residual, out=residual), expected)


def test_a_residual_of_another_dtype_is_not_out_itself():
    """A tile of out would cover residuals of the tiles beside it."""
    memory = torch.zeros(6, 10, dtype=torch.float16)
    residual, out = memory.as_strided((6, 5), (5, 1)), memory.view(torch.float32)
    assert residual.data_ptr() == out.data_ptr()
    with pytest.raises(errors.OptionError, match="out shares memory with residual"):
        matmul(A.half(), B.half(), residual=residual, out=out)


def test_out_may_be_columns_beside_an_operand():
    memory = torch.randn(3, 6, 12)
    a, out = memory[..., :4], memory[..., 7:]
    expected = a @ B
    assert matmul(a, B, out=out) is out
    torch.testing.assert_close(out, expected)
    for first in (0, 3):
        with pytest.raises(errors.OptionError, match="out shares memory with a"):
            matmul(a, B, out=memory[..., first : first + 5])


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ((A, A, None, None, "", None, ""), errors.ShapeError, "b's last but one. Try: b.mT"),
        ((A, B, None, None, "tanh", None, ""), errors.OptionError, "activation is 'tanh'; it must"),
        ((A, B, torch.ones(4), None, "", None, ""), errors.ShapeError, "bias has shape (4,); it"),
        ((A, B, torch.ones(10)[::2], None, "", None, ""), errors.ShapeError, "a stride of 2; the"),
        ((A, B, None, A, "", None, ""), errors.ShapeError, "residual has shape (6, 4); it must"),
    ],
)
def test_the_registered_operator_checks_too(args, kind, text):
    with pytest.raises(kind) as caught:
        torch.ops.tileloom.matmul_fwd(*args)
    assert str(caught.value).startswith("matmul: ")
    assert text in str(caught.value)


@pytest.mark.parametrize("text", [
    "x", "reference:1", "matvec:a,b", "matvec:", "matvec:1,2,3,4", "triton:64,b",
    "gluon_sm90:1,2,3,4,static,1,64,True,9",
])  # fmt: skip
def test_a_text_that_no_config_writes(text):
    with pytest.raises(errors.ConfigError) as caught:
        torch.ops.tileloom.matmul_fwd(A, B, None, None, "", None, text)
    assert str(caught.value).startswith(f"matmul: config is {text!r}, which no config writes")


@pytest.mark.parametrize(
    ("pivot", "offsets", "activation", "kind", "text"),
    [
        (2, [0, 2, 6], "", errors.OptionError, "chunk_pivot is 2; it must be in 0 .. 1"),
        (0, [0, 2, 60], "", errors.ShapeError, "from 0 to 60; it must run from 0 to M = 6"),
        (0, [0, 2, 6], "tanh", errors.OptionError, "activation is 'tanh'; it must be one of"),
    ],
)
def test_the_registered_async_operator_checks_too(pivot, offsets, activation, kind, text):
    with pytest.raises(kind) as caught:
        torch.ops.tileloom.async_input_matmul(
            A, B, FLAGS, pivot, offsets, 1, 1000, None, None, activation, None, ""
        )
    assert str(caught.value).startswith("async_input_matmul: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TritonConfig(block_m="x"), "TritonConfig: block_m is 'x'; it must be of type int"),
        (lambda: TritonConfig(num_warps=4.0), "TritonConfig: num_warps is 4.0; it must be of type"),
        (lambda: GluonSm90Config(swap_ab="yes"), "GluonSm90Config: swap_ab is 'yes'; it must be of "
         "type bool. Try: swap_ab=False."),
        (lambda: GluonSm90Config(splits=True), "GluonSm90Config: splits is True; it must be of"),
    ],
)  # fmt: skip
def test_a_config_of_wrong_types(make, text):
    with pytest.raises(errors.OptionError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_no_gradient_into_out():
    with pytest.raises(errors.GradientError, match="out= is given and a gradient is asked for"):
        matmul(A.clone().requires_grad_(), B, out=torch.empty(6, 5))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_no_forward_derivative():
    import torch.autograd.forward_ad as forward

    with forward.dual_level(), pytest.raises(errors.GradientError, match="forward-mode"):
        matmul(forward.make_dual(A, A), B)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (dict(chunk_signals=FLAGS.view(torch.int32)), errors.DtypeError,
         "chunk_signals has dtype torch.int32; it must be torch.uint32. Try: "
         "chunk_signals.view(torch.uint32)."),
        (dict(chunk_signals=FLAGS.to(torch.int64)), errors.DtypeError,
         "chunk_signals has dtype torch.int64; it must be torch.uint32. Try: flags of "
         "torch.zeros(chunks, dtype=torch.uint32), which the sender writes too."),
        (dict(chunk_signals=[1, 1]), errors.DtypeError, "chunk_signals is a list"),
        (dict(chunk_signals=FLAGS.to("meta")), errors.DeviceError, "chunk_signals is on meta, a"),
        (dict(chunk_signals=FLAGS[:0]), errors.ShapeError, "with a flag for each chunk"),
        (dict(chunk_signals=FLAGS.expand(2, 2)), errors.ShapeError, "of one dimension"),
        (dict(chunk_pivot=2), errors.OptionError, "chunk_pivot is 2; it must be in 0 .. 1"),
        (dict(chunk_pivot=-1), errors.OptionError, "chunk_pivot is -1; it must be in 0 .. 1"),
        (dict(chunk_pivot=0.5), errors.OptionError, "chunk_pivot is 0.5; it must be"),
        (dict(chunk_offsets=(0, 6)), errors.ShapeError, "chunk_offsets has 2 entries, and chunk"),
        (dict(chunk_offsets=(0, 3, 5)), errors.ShapeError, "from 0 to 5; it must run from 0 to"),
        (dict(chunk_offsets=(0, 7, 6)), errors.ShapeError, "falls from 7 to 6 at entry 2"),
        (dict(chunk_offsets=(0, 2.0, 6)), errors.OptionError, "a tuple of Python ints"),
        (dict(epoch=-1), errors.OptionError, "epoch is -1; it must be an int in 0 .. 2^32 - 1"),
        (dict(epoch=2**32), errors.OptionError, "epoch is 4294967296; it must be"),
        (dict(timeout_s=-1), errors.OptionError, "timeout_s is -1; it must be seconds in"),
        (dict(timeout_s=float("nan")), errors.OptionError, "timeout_s is nan; it must be"),
        (dict(b=torch.randn(3, 5)), errors.ShapeError, "a's last size (K) must be"),
        (dict(a=A[None]), errors.ShapeError, "chunks are rows of one matrix"),
        (dict(config=TritonConfig()), errors.ConfigError, "waits for no chunk; only Gluon"),
        (dict(timeout=3), errors.UnknownOptionError, "Try: timeout_s=."),
    ],
)  # fmt: skip
def test_async_input_matmul(change, kind, text):
    given = dict(a=A, b=B, chunk_signals=FLAGS) | change
    operands = [given.pop(name) for name in ("a", "b", "chunk_signals")]
    with pytest.raises(kind) as caught:
        async_input_matmul(*operands, **given)
    assert text in str(caught.value)
    assert str(caught.value).startswith("async_input_matmul: ")
    assert "\n" not in str(caught.value)


def test_no_gradient_through_async_input():
    with pytest.raises(errors.GradientError, match="a gradient is asked for, and there is none"):
        async_input_matmul(A.clone().requires_grad_(), B, FLAGS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CUDA_LAUNCH_BLOCKING", "a launch returns only when its kernel has ended"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "all streams share one queue"),
    ],
)
def test_nothing_waits_for_ever_for_a_copy_that_cannot_start(monkeypatch, name, reason):
    for other in ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(async_input, "blocked_by", async_input.blocked_by.__wrapped__)
    check_queues("async_input_matmul")
    monkeypatch.setenv(name, "8")
    check_queues("async_input_matmul")
    monkeypatch.setenv(name, "1")
    with pytest.raises(errors.UnsupportedError) as caught:
        check_queues("async_input_matmul")
    text = str(caught.value)
    assert text.startswith(f"async_input_matmul: {name} is 1, so that {reason}")
    assert text.endswith(f"queued before this call, or unset {name}.")


def test_async_input_says_why_no_kernel_takes_the_tensors():
    for a, b, reason in (
        (NARROW, NARROW.mT, "gluon_sm90: a has a stride of 4 elements, not a multiple of 16 bytes"),
        (torch.randn(64, 64), torch.randn(64, 64), "gluon_sm90: dtype torch.float32 is not float"),
    ):
        with emulator.run() as run, pytest.raises(errors.UnsupportedError) as caught:
            async_input_matmul(a, b, FLAGS)
        assert reason in str(caught.value)
        assert str(caught.value).startswith(
            "async_input_matmul: no backend takes this problem. Try: waiting for all chunks, then "
            "tileloom.matmul."
        )
        assert not run.launches


def test_a_config_says_all_that_is_wrong_with_it():
    config = GluonSm90Config(100, 256, 1, 0)
    with emulator.run(), pytest.raises(errors.ConfigError) as caught:
        matmul(NARROW, NARROW.mT, config=config)
    text = str(caught.value)
    for part in ("a has a stride of 4 elements", "the tile is 100x256", "stages is 1, not 0 or at",
                 "swizzle_size is 0"):  # fmt: skip
        assert part in text
    wide = torch.randn(64, 64).bfloat16()
    for splits, text in ((17, "splits is 17, not in 1..16"), (2, "and k has 1 steps of 64 to sha")):
        with emulator.run(), pytest.raises(errors.ConfigError) as caught:
            matmul(wide, wide, config=GluonSm90Config(splits=splits))
        assert text in str(caught.value)
    swapped = (
        (
            GluonSm90Config(64, 256, swap_ab=True),
            "the tile is 64x256, not one of 128x256, 192x128, 128x128,",
        ),
        (GluonSm90Config(64, 16), "the tile is 64x16, not one of 128x256,"),
    )
    for config, text in swapped:
        with emulator.run(), pytest.raises(errors.ConfigError, match=text):
            matmul(wide, wide, config=config)
    config = GluonSm90Config(64, 16, swap_ab=True)
    with emulator.run(), pytest.raises(errors.ConfigError, match="warpgroup would load 8, fewer"):
        matmul(wide.mT, wide, config=config)
    for flags in (FLAGS, FLAGS[:1]):
        with emulator.run(), pytest.raises(errors.ConfigError, match="and chunks are rows of a"):
            async_input_matmul(wide, wide, flags, config=config)
    with emulator.run(), pytest.raises(errors.ConfigError, match="9 stages take "):
        matmul(wide, wide, config=GluonSm90Config(stages=9))


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        (TritonConfig(16, 16, 16), {}, "there are 4294967296 tiles of 16 x 16"),
        (TritonConfig(64, 64, 16), {}, None),
        (GluonSm90Config(splits=16), {"m": 2**22, "n": 2**22}, "8589934592 tiles of 128 x 256"),
        (GluonSm90Config(), {"chunks": 2**29, "n": 64}, "there are 536870912 chunks"),
        (GluonSm90Config(swizzle_size=2**17), {}, None),
        (GluonSm90Config(swizzle_size=2**19), {}, "swizzle_size is 524288: a group has 4294967296"),
        (TritonConfig(swizzle_size=2**40), {}, "swizzle_size is 1099511627776: a group has 900719"),
        (GluonSm90Config(), {"m": 64, "n": 2**31 - 8}, "N is 2147483640"),
        (TritonConfig(), {"k": 2**31 - 8}, "K is 2147483640"),
    ],
)
def test_sizes_that_32_bits_do_not_count(config, sizes, reason):
    """The proof of the kernels' 32-bit numbers: `PROVED_32BIT` of `kernels.py`."""
    size = {"m": 2**20, "n": 2**20, "k": 2**12, "l": 1} | sizes
    lies = Layout((0, 2**31, 1), True)
    types = dict(dtype=torch.bfloat16, out_dtype=torch.bfloat16)
    problem = MatmulProblem(**size, **types, a=lies, b=lies, out=lies)
    found = [r for r in config.reasons_against(problem, H100) if ", more than " in r]
    assert [reason in text for text in found] == ([] if reason is None else [True])


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (None, "b is a NoneType; it must be a torch.Tensor, or a list of them"),
        ("x", "b is a str; it must be a torch.Tensor, or a list of them"),
        (3, "b is a int; it must be a torch.Tensor, or a list of them"),
        ([B, None], "entry 1 of b is a NoneType; each must be a torch.Tensor"),
        ([[1.0]], "entry 0 of b is a list; each must be a torch.Tensor"),
    ],
)
def test_b_is_a_matrix_or_a_list_of_them(b, said):
    with pytest.raises(errors.DtypeError) as caught:
        async_input_matmul(A, b, FLAGS)
    assert str(caught.value).startswith(f"async_input_matmul: {said}")
    with pytest.raises(errors.OptionError, match="chunk_offsets is 3; it must be a tuple"):
        async_input_matmul(A, B, FLAGS, chunk_offsets=3)
