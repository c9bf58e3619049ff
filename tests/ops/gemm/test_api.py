"""`matmul` and `async_input_matmul` as their users see them, on the CPU."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tests.ops.gemm.cases import MatmulCase, check
from torch._subclasses.fake_tensor import FakeTensorMode

from tileloom import emulator, errors
from tileloom.ops import record_choices
from tileloom.ops._plans import Plans
from tileloom.ops.gemm import (
    api,
    async_api,
    async_input,
    async_input_matmul,
    matmul,
    matmul_reference,
)
from tileloom.ops.gemm.config import (
    BACKENDS,
    SWAP_TILES,
    TILES,
    GluonSm90Config,
    MatvecConfig,
    ReferenceConfig,
    TritonConfig,
    decode,
)
from tileloom.ops.gemm.plans import plan_of

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
FLAGS = torch.ones(2, dtype=torch.int32).view(torch.uint32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_the_cpu_it_is_the_formula(dtype, activation):
    case = MatmulCase(33, 20, 17, l=2, dtype=dtype, activation=activation, has_bias=True,
                      has_residual=True)  # fmt: skip
    a, b, options = case.inputs()
    check(matmul(a, b, **options), a, b, options)


@pytest.mark.parametrize(
    ("a", "b", "shape"),
    [
        ((0, 4), (4, 5), (0, 5)),
        ((3, 4), (4, 0), (3, 0)),
        ((3, 0), (0, 5), (3, 5)),
        ((2, 3, 4), (4, 5), (2, 3, 5)),
        ((3, 4), (2, 4, 5), (2, 3, 5)),
        ((0, 3, 4), (4, 5), (0, 3, 5)),
        ((1, 1), (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("on_the_emulator", [False, True])
def test_sizes_of_zero_and_batches(a, b, shape, on_the_emulator):
    x, y, bias = torch.randn(a), torch.randn(b), torch.randn(shape[-1])
    if on_the_emulator:
        with emulator.run():
            out = matmul(x, y, bias=bias, activation="relu")
    else:
        out = matmul(x, y, bias=bias, activation="relu")
    assert out.shape == shape
    torch.testing.assert_close(out, torch.relu(torch.matmul(x, y) + bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batches", [((), ()), ((2,), ()), ((), (2,)), ((2,), (2,))])
def test_gradients_of_both_orders(activation, batches):
    one, two = batches
    a = torch.randn(*one, 3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(*two, 5, 4, dtype=torch.float64).mT.requires_grad_()
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(*(one or two), 3, 5, dtype=torch.float64, requires_grad=True)

    def f(a, b, bias, residual):
        return matmul(a, b, bias=bias, activation=activation, residual=residual)

    assert torch.autograd.gradcheck(f, (a, b, bias, residual))
    if activation != "gelu_tanh":
        assert torch.autograd.gradgradcheck(f, (a, b, bias, residual))


def test_gradients_keep_their_dtypes():
    a, b = torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(4, 5).bfloat16()
    bias = torch.randn(5, requires_grad=True)
    matmul(a, b.requires_grad_(), bias=bias, out_dtype=torch.float32).sum().backward()
    assert (a.grad.dtype, b.grad.dtype, bias.grad.dtype) == (
        torch.bfloat16, torch.bfloat16, torch.float32
    )  # fmt: skip


def test_opcheck_compile_and_export():
    a, b, options = MatmulCase(5, 6, 7, dtype=torch.float32, has_bias=True).inputs()
    bias = options["bias"]
    args = (a.requires_grad_(), b, bias, None, "gelu", None, "")
    torch.library.opcheck(torch.ops.tileloom.matmul_fwd.default, args)
    out = torch.empty(5, 6)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.tileloom.matmul_out.default, (a.detach(), b, None, None, out, "", "")
        )

    def f(a, b):
        return matmul(a, b, bias=bias, activation="silu") * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(compiled(x, b), f(x, b))

    class Layer(torch.nn.Module):
        def forward(self, a, b):
            return f(a, b)

    exported = torch.export.export(Layer(), (a.detach(), b))
    torch.testing.assert_close(exported.module()(a.detach(), b), f(a.detach(), b))


def test_async_opcheck():
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    args = (a, b, FLAGS, 1, [0, 2, 6], 1, 1000, None, None, "", None, "")
    torch.library.opcheck(torch.ops.tileloom.async_input_matmul.default, args)
    torch.library.opcheck(torch.ops.tileloom.async_input_mm.default, (a, b, FLAGS, 1))


def test_autocast_lowers_the_operands():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out = matmul(a, b)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, matmul(a.bfloat16(), b.bfloat16()))


def test_out_is_written_and_may_be_the_residual():
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    expected = matmul_reference(a, b, residual=out)
    assert matmul(a, b, residual=out, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_out_without_memory(kind):
    mode = FakeTensorMode() if kind == "fake" else torch.device("meta")
    with mode:
        a, b, out = torch.empty(3, 4), torch.empty(4, 5), torch.empty(3, 5)
        assert matmul(a, b, residual=out, out=out) is out


def test_a_bias_with_a_stride_is_packed_in_every_call(monkeypatch):
    """A plan is made for the packed one: a call with the strided one must never find it."""
    monkeypatch.setattr(api, "is_eager", lambda tensors: True)
    monkeypatch.setattr(api, "_short", Plans())
    a, b, spread = torch.randn(3, 4), torch.randn(4, 5), torch.randn(10)[::2]

    def made(key):
        out = torch.empty(3, 5)
        plan = plan_of(a, b, torch.randn(5), None, out, "", "", is_given=False)
        return SimpleNamespace(call=lambda *tensors: plan.run(*tensors, torch.empty(3, 5)))

    monkeypatch.setattr(api, "plans", SimpleNamespace(get=made))
    torch.testing.assert_close(matmul(a, b, bias=spread), a @ b + spread)
    assert not len(api._short)
    torch.testing.assert_close(matmul(a, b, bias=spread.clone()), a @ b + spread)
    assert len(api._short) == 1


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_under_a_checkpoint(activation):
    """Its saved tensors can be asked for once."""
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)

    def layer(a):
        return matmul(a, b, bias=b[0], activation=activation).sum()

    again = torch.utils.checkpoint.checkpoint(layer, a, use_reentrant=False)
    for mine, right in zip(*(torch.autograd.grad(y, (a, b)) for y in (again, layer(a)))):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("on_the_emulator", [False, True])
def test_the_imaginary_part_of_a_conjugate(on_the_emulator):
    """A view whose memory holds the negatives of its values."""
    a, b = torch.randn(5, 6, dtype=torch.complex64).conj().imag, torch.randn(6, 7)
    assert a.is_neg()
    with emulator.run() if on_the_emulator else contextlib.nullcontext():
        out = matmul(a, b)
    torch.testing.assert_close(out, a.clone() @ b)


@pytest.mark.parametrize("config", [ReferenceConfig(), TritonConfig(32, 64, 32, 4, 1, 2),
                                    MatvecConfig(2, 512, 1),
                                    GluonSm90Config(64, 128, 4, 2, "dynamic", 3, 128),
                                    GluonSm90Config(64, 16, swap_ab=True)])  # fmt: skip
def test_a_config_survives_its_text(config):
    assert decode(config.encode()) == config
    assert config.backend in BACKENDS


def test_dispatch_says_why():
    a, b, _ = MatmulCase(64, 63, 64).inputs()
    with emulator.run(), record_choices() as made, pytest.warns(UserWarning, match="stride of 63"):
        matmul(a, b)
    assert made[0].backend == "triton"
    assert made[0].refused["gluon_sm90"] == (
        "out has a stride of 63 elements, not a multiple of 16 bytes",
    )


def test_every_tile_fits_with_and_without_a_residual():
    from tileloom.ops.gemm.kernels import shipped

    names = {spec.name for spec in shipped()}
    for m, n in TILES:
        assert f"matmul_gluon_sm90[{m}x{n}-linear]" in names
        assert f"matmul_gluon_sm90[{m}x{n}-fused]" in names
    for m, n in SWAP_TILES:
        assert f"matmul_gluon_sm90[{m}x{n}-swap]" in names
        assert f"matmul_gluon_sm90[{m}x{n}-swap-fused]" in names
    assert all(spec.constexprs["STAGES"] >= 3 for spec in shipped() if spec.gluon)


def test_on_the_cpu_the_reference_waits_for_another_thread():
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    here, flags = torch.zeros(6, 4), torch.zeros(3, dtype=torch.int32)

    def bring():
        for chunk in (2, 0, 1):
            time.sleep(0.01)
            here[2 * chunk : 2 * chunk + 2] = a[2 * chunk : 2 * chunk + 2]
            flags[chunk] = 4

    thread = threading.Thread(target=bring)
    thread.start()
    out = async_input_matmul(here, b, flags.view(torch.uint32), chunk_pivot=2, epoch=4)
    thread.join()
    torch.testing.assert_close(out, a @ b)


def test_a_call_like_one_that_was_right_goes_straight_to_its_plan(monkeypatch):
    """As on a GPU, where plans are kept; only the epoch and the time are looked at again."""
    monkeypatch.setattr(async_api, "is_short", lambda tensors: True)
    monkeypatch.setattr(async_api, "_short", Plans())
    a, b, bias = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)

    def plan_found(a, b, signals, bias, residual, out, offsets, pivot, activation):
        return async_input._plan_of(
            a, b, signals, bias, residual, out, offsets, pivot, activation, "", any_value=False
        )

    monkeypatch.setattr(async_api, "plan_found", plan_found)
    given = dict(bias=bias, activation="relu", chunk_offsets=(0, 2, 6), chunk_pivot=1)
    right = async_input_matmul(a, b, FLAGS, **given)
    long_way = []
    check = async_api.check_async
    monkeypatch.setattr(async_api, "check_async", lambda *args: long_way.append(check(*args)))
    assert torch.equal(async_input_matmul(a, b, FLAGS, **given), right)
    assert torch.equal(async_input_matmul(a, b, FLAGS, **given, out_dtype=None), right)
    assert not long_way
    with pytest.raises(errors.OptionError, match="epoch is -1"):
        async_input_matmul(a, b, FLAGS, epoch=-1, **given)
    late = FLAGS.view(torch.int32).clone().zero_().view(torch.uint32)
    with pytest.raises(errors.SignalTimeoutError):
        async_input_matmul(a, b, late, timeout_s=0.0, **given)
    assert not long_way
    for change in ({"chunk_pivot": True}, {"chunk_offsets": (0, 2.0, 6)}):
        with pytest.raises(errors.OptionError):
            async_input_matmul(a, b, FLAGS, **{**given, **change})
    with pytest.raises(errors.DtypeError, match="bias is a int"):
        async_input_matmul(a, b, FLAGS, bias=3)
    with pytest.raises(errors.DtypeError, match="chunk_signals is a list"):
        async_input_matmul(a, b, [1, 1], **given)
    spread = torch.randn(10)[::2]
    given["bias"] = spread
    for _ in range(2):  # is packed in every call, and so never goes the short way
        long_way.clear()
        out = async_input_matmul(a, b, FLAGS, **given)
        torch.testing.assert_close(out, torch.relu(a @ b + spread))
        assert long_way


def test_several_bs_share_one_a():
    a, bs = torch.randn(6, 4), [torch.randn(4, 5), torch.randn(4, 3)]
    outs = async_input_matmul(a, bs, FLAGS)
    for out, b in zip(outs, bs):
        torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("m", [0, 1, 768, 2304])
def test_the_seeds_schema_takes_what_the_original_refuses(m):
    """B1, B6: M = 768 with two chunks hangs there, 2304 with eight is refused."""
    a, b = torch.randn(m, 4), torch.randn(4, 3)
    flags = torch.full((8,), 3, dtype=torch.int32).view(torch.uint32)
    torch.testing.assert_close(torch.ops.tileloom.async_input_mm(a, b, flags, 5), a @ b)


def test_a_flag_that_stays_behind_times_out_on_the_cpu():
    flags = torch.tensor([1, 0], dtype=torch.int32).view(torch.uint32)
    with pytest.raises(errors.SignalTimeoutError, match="chunk 1 did not arrive in time"):
        async_input_matmul(torch.randn(6, 4), torch.randn(4, 5), flags, timeout_s=0.01)
