"""What `swiglu` promises besides its values: errors, dispatch, autocast, compilers; its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.ops.rowwise.swiglu import cases
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
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.swiglu import swiglu, swiglu_reference
from tileloom.ops.rowwise.swiglu.reference import swiglu_backward_reference

X = torch.zeros(2, 8)


def test_the_reference_is_pytorch_s_formula():
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64).unbind(0)
    torch.testing.assert_close(swiglu_reference(gate, up), F.silu(gate) * up)


def test_the_formula_of_the_gradients_is_that_of_autograd():
    gate, up, grad = torch.randn(3, 4, 5, dtype=torch.float64).unbind(0)
    leaves = [t.requires_grad_() for t in (gate, up)]
    expected = torch.autograd.grad(swiglu_reference(*leaves), leaves, grad)
    with torch.no_grad():
        found = swiglu_backward_reference(grad, gate, up)
    torch.testing.assert_close(found, expected)


def test_gradcheck():
    leaves = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(swiglu, leaves)
    assert torch.autograd.gradgradcheck(swiglu_reference, leaves)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: swiglu(1.0, X), DtypeError,
         "swiglu: gate is a float; it must be a torch.Tensor. Try: torch.as_tensor(gate)."),
        (lambda: swiglu(X, 1.0), DtypeError,
         "swiglu: up is a float; it must be a torch.Tensor. Try: torch.as_tensor(up)."),
        (lambda: swiglu(torch.tensor(1.0), torch.tensor(1.0)), ShapeError,
         "swiglu: gate has no dimension; it must have shape [..., n]. Try: gate.reshape(1)."),
        (lambda: swiglu(X.int(), X), DtypeError,
         "swiglu: gate has dtype torch.int32; supported: torch.float16, torch.bfloat16, "
         "torch.float32, torch.float64. Try: gate.to(torch.bfloat16)."),
        (lambda: swiglu(X, X[:1]), ShapeError,
         "swiglu: up has shape (1, 8), gate has (2, 8); they must be the same. Try: "
         "up.expand_as(gate) where it broadcasts."),
        (lambda: swiglu(X, X.half()), DtypeError,
         "swiglu: up has dtype torch.float16, gate has torch.float32; they must be the same. Try: "
         "up.to(gate.dtype)."),
        (lambda: swiglu(X, X.to("meta")), DeviceError,
         "swiglu: up is on meta, gate on cpu; they must be on the same device. Try: "
         "up.to(gate.device)."),
        (lambda: swiglu(X, X, config=3), OptionError,
         "swiglu: config is a int; it must be one of ReferenceConfig, TritonConfig, or None."),
        (lambda: swiglu(X, X, conf=3), UnknownOptionError,
         "swiglu: there is no option 'conf'; options: config. Try: config=."),
    ],
)  # fmt: skip
def test_a_wrong_call_gets_a_sentence(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_a_config_that_cannot_run_says_why():
    with pytest.raises(ConfigError, match=r"(?s)swiglu: config=.*are on the CPU"):
        swiglu(X, X, config=TritonConfig())
    with emulator.run(), pytest.raises(ConfigError, match=r"forward\.num_warps is 3, not a power"):
        swiglu(X, X, config=TritonConfig(Tile(64, 1, 3)))


def test_the_cpu_takes_the_reference():
    case = cases.SwigluCase((3, 40), cases.BF16, ("halves", ""))
    inputs = case.inputs()
    with record_choices() as made:
        results = cases.run(case, inputs)
    assert [choice.backend for choice in made] == ["reference"] * 2
    cases.check(inputs, results)


def test_a_second_gradient_is_refused():
    x = torch.randn(3, 7, requires_grad=True)
    with pytest.raises(GradientError, match="swiglu: the gradient of its gradient"):
        torch.autograd.grad(swiglu(x, x).square().sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("place", [0, 1])
def test_a_forward_mode_derivative_is_refused(place):
    given = [torch.randn(3, 7), torch.randn(3, 7)]
    with forward_ad.dual_level():
        swiglu(*given)
        given[place] = forward_ad.make_dual(given[place], torch.randn(3, 7))
        with pytest.raises(GradientError, match="swiglu: a forward-mode derivative is asked for"):
            swiglu(*given)


def test_autocast_leaves_it_alone():
    x = torch.randn(3, 70)
    expected = swiglu(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = swiglu(x, x)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", ["contiguous", "halves", "transposed"])
def test_opcheck_and_fakes(layout):
    gate, up, grad = cases.SwigluCase((2, 3, 8), layouts=(layout, "gapped")).inputs()
    real = swiglu(gate, up)
    with FakeTensorMode() as mode:
        fake = swiglu(mode.from_tensor(gate), mode.from_tensor(up))
    assert fake.stride() == real.stride() == torch.empty_like(gate).stride()
    torch.library.opcheck(torch.ops.tileloom.swiglu_bwd.default, (grad, gate, up, ""))
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    torch.library.opcheck(torch.ops.tileloom.swiglu_fwd.default, (*leaves, ""))


def _block(x: torch.Tensor) -> torch.Tensor:
    gate, up = (x * 2).chunk(2, -1)
    return swiglu(gate, up)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_to_one_graph_with_its_gradient(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, width in ((3, 10), (5, 14)) if dynamic else ((3, 10),):
        x = torch.randn(rows, width, requires_grad=True)
        results = []
        for function in (_block, compiled):
            out = function(x)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        torch.testing.assert_close(results[0], results[1])


def test_it_exports():
    class Model(torch.nn.Module):
        def forward(self, x):
            return _block(x)

    x = torch.randn(3, 10)
    program = torch.export.export(Model(), (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "tileloom.swiglu_fwd.default" in targets
    torch.testing.assert_close(program.module()(x), _block(x))
