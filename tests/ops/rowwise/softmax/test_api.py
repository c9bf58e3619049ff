"""What `softmax` promises besides its values: errors, dispatch, gradients, autocast, compilers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.rowwise.softmax import cases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tileloom import emulator
from tileloom.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
)
from tileloom.ops import record_choices
from tileloom.ops.rowwise.config import ReferenceConfig, Tile, TritonConfig
from tileloom.ops.rowwise.softmax import softmax, softmax_reference
from tileloom.ops.rowwise.softmax.config import choose, softmax_rule
from tileloom.ops.rowwise.softmax.problem import forward_problem
from tileloom.target import H100, SMEM_BYTES, Target

A100 = Target("cuda", (8, 0), 108, SMEM_BYTES[8, 0], "NVIDIA A100-SXM4-80GB")
X = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: softmax([1.0]), DtypeError,
         "softmax: x is a list; it must be a torch.Tensor. Try: torch.as_tensor(x)."),
        (lambda: softmax(torch.tensor(1.0)), ShapeError,
         "softmax: x has no dimension; it must have shape [..., n]. Try: x.reshape(1)."),
        (lambda: softmax(X.int()), DtypeError,
         "softmax: x has dtype torch.int32; supported: torch.float16, torch.bfloat16, "
         "torch.float32, torch.float64. Try: x.to(torch.bfloat16)."),
        (lambda: softmax(X, mask=True), DtypeError,
         "softmax: mask is a bool; it must be a bool tensor or None. Try: torch.as_tensor(mask)."),
        (lambda: softmax(X, mask=X), DtypeError,
         "softmax: mask has dtype torch.float32; it must be torch.bool, True where an element is "
         "visible. Try: x + mask, for numbers that are added."),
        (lambda: softmax(X, mask=X.int()), DtypeError,
         "softmax: mask has dtype torch.int32; it must be torch.bool, True where an element is "
         "visible. Try: mask != 0."),
        (lambda: softmax(X, mask=torch.ones(2, 8, dtype=torch.bool)), ShapeError,
         "softmax: mask has shape (2, 8), which does not broadcast to x's (2, 3, 8). Try: give "
         "mask x's dimensions, of size 1 where it is the same for all."),
        (lambda: softmax(X, mask=torch.ones(8, dtype=torch.bool, device="meta")), DeviceError,
         "softmax: mask is on meta, x on cpu; they must be on the same device. Try: "
         "mask.to(x.device)."),
        (lambda: softmax(X, config="triton"), OptionError,
         "softmax: config is a str; it must be one of ReferenceConfig, TritonConfig, or None."),
        (lambda: softmax(X, dim=1), UnknownOptionError,
         "softmax: there is no option 'dim'; options: mask, config. Try: softmax(x.transpose(dim, "
         "-1)).transpose(dim, -1), which copies nothing."),
        (lambda: softmax(X, msk=None), UnknownOptionError,
         "softmax: there is no option 'msk'; options: mask, config. Try: mask=."),
    ],
)  # fmt: skip
def test_a_wrong_call_gets_a_sentence(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_a_config_that_cannot_run_says_why():
    with pytest.raises(ConfigError, match=r"(?s)softmax: config=.*are on the CPU"):
        softmax(X, config=TritonConfig())
    with emulator.run(), pytest.raises(ConfigError, match=r"forward\.block is 48, not a power"):
        softmax(X, config=TritonConfig(Tile(48)))


@pytest.mark.parametrize("target", [H100, A100], ids=lambda target: target.arch)
@pytest.mark.parametrize("dtype", [cases.FP16, cases.BF16, cases.FP32])
@pytest.mark.parametrize("width", [0, 1, 7, 100, 4096, 16384, 40000, 2**20])
def test_the_rule_gives_tiles_that_run_for_every_width(width, dtype, target):
    problem = forward_problem(torch.empty((3, width), dtype=dtype, device="meta"), None)
    config = softmax_rule(problem, target)
    assert config.forward is not None
    assert config.backward is not None
    assert config.reasons_against(problem, target) == ()
    assert choose(problem, target).backend == "triton"


def test_more_programs_than_can_meet_are_refused_and_the_rule_knows():
    problem = forward_problem(torch.empty((3, 2**20), device="meta"), None)
    config = TritonConfig(Tile(8192, 1, 8, split=True))
    with pytest.raises(ConfigError, match=r"lets 128 programs wait .* half of the 132 multiproc"):
        choose(problem, H100, config)
    chosen = [choose(problem, replace(H100, sms=sms)).config.forward for sms in (132, 80, 20)]
    assert chosen == [
        Tile(16384, 1, 16, split=True), Tile(32768, 1, 32, split=True), Tile(8192, 1, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64 is not"),
        (torch.zeros(3, 4, 5, 6, 7).permute(3, 2, 1, 0, 4), "merge into 4 groups"),
    ],
)
def test_what_the_kernels_refuse_goes_to_the_reference_with_the_reason(x, reason):
    choice = choose(forward_problem(x, None), H100)
    assert choice.backend == "reference"
    assert reason in choice.refused["triton"][0]


def test_the_cpu_takes_the_reference():
    inputs = cases.SoftmaxCase("cpu", (3, 4, 10), cases.BF16, mask=(4, 10), spoil=True).inputs()
    with record_choices() as made:
        y, dx = cases.run(inputs)
    assert [choice.backend for choice in made] == ["reference"] * 2
    cases.check(inputs, y, dx)


def test_gradcheck():
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 7) > 0.4
    assert torch.autograd.gradcheck(lambda t: softmax(t, mask=mask), (x,))


def test_a_second_gradient_is_refused():
    x = torch.randn(3, 7, requires_grad=True)
    y = softmax(x)
    with pytest.raises(GradientError, match="softmax: a gradient of its gradient"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_forward_mode_derivative_is_refused():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(3, 7), torch.randn(3, 7))
        with pytest.raises(GradientError, match="softmax: a forward-mode derivative is asked for"):
            softmax(dual)


def test_autocast_leaves_it_alone():
    x = torch.randn(3, 70, requires_grad=True)
    expected = softmax_reference(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = softmax(x)
        half = softmax(x.detach().half(), config=ReferenceConfig())
    assert y.dtype == torch.float32
    assert half.dtype == torch.float16
    assert torch.equal(y, expected)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "last_strided"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["plain", "mask"])
def test_opcheck(layout, with_mask):
    case = cases.SoftmaxCase("opcheck", (2, 3, 4, 9), layout=layout, mask=(3, 1, 9))
    inputs = case.inputs()
    mask = inputs.mask if with_mask else None
    x = inputs.x.requires_grad_()
    torch.library.opcheck(torch.ops.tileloom.softmax_fwd.default, (x, mask, ""))
    y = softmax(inputs.x.detach())
    torch.library.opcheck(torch.ops.tileloom.softmax_bwd.default, (y, inputs.dy, ""))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "expanded"])
def test_a_fake_has_the_strides_of_the_real_result(layout):
    x = cases.SoftmaxCase("fake", (2, 3, 4, 9), cases.FP16, layout).inputs().x
    real = softmax(x)
    assert real.stride() == torch.empty_like(x).stride()
    with FakeTensorMode() as mode:
        fake = softmax(mode.from_tensor(x))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def _block(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return softmax(x * 2, mask=mask) + softmax(x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_to_one_graph_with_its_gradient(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 12) if dynamic else (9,):
        x = torch.randn(3, length, requires_grad=True)
        mask = torch.rand(3, length) > 0.3
        results = []
        for function in (_block, compiled):
            out = function(x, mask)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            results.append((out, grad))
        torch.testing.assert_close(results[0], results[1])


def test_it_exports():
    class Model(torch.nn.Module):
        def forward(self, x, mask):
            return _block(x, mask)

    arguments = (torch.randn(3, 9), torch.rand(3, 9) > 0.3)
    program = torch.export.export(Model(), arguments)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("tileloom.softmax_fwd.default") == 2
    torch.testing.assert_close(program.module()(*arguments), _block(*arguments))
