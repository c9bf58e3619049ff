"""Cross entropy under PyTorch's compiler stack: opcheck, compile, export, fakes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.ops.rowwise.cross_entropy import cases
from tests.ops.rowwise.cross_entropy.cases import CrossEntropyCase
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tileloom.errors import OptionError
from tileloom.ops.rowwise.cross_entropy import cross_entropy

_OPTIONS = [{}, cases.NONE, cases.ALL]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "last_strided"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(layout, reduction):
    inputs = CrossEntropyCase("opcheck", (2, 3, 4, 9), layout=layout).inputs()
    logits, labels = inputs.logits, inputs.labels
    rest = (0.1, -100, 2.0, reduction)
    forward = (logits.clone().requires_grad_(), labels, *rest, False, "")
    torch.library.opcheck(torch.ops.tileloom.cross_entropy_fwd.default, forward)
    loss, state = torch.ops.tileloom.cross_entropy_fwd(logits, labels, *rest, False, "")
    backward = (torch.ones_like(loss), logits, labels, state, *rest, "")
    torch.library.opcheck(torch.ops.tileloom.cross_entropy_bwd.default, backward)
    torch.library.opcheck(torch.ops.tileloom.cross_entropy_bwd_.default, backward)


@pytest.mark.parametrize("options", _OPTIONS, ids=["mean", "none", "all"])
@pytest.mark.parametrize("dtype", [cases.BF16, torch.float64], ids=["bf16", "fp64"])
def test_a_fake_is_like_the_real_result(options, dtype):
    inputs = CrossEntropyCase("fake", (2, 3, 9), dtype, options=options).inputs()
    real = cross_entropy(inputs.logits, inputs.labels, **options)
    with FakeTensorMode() as mode:
        logits, labels = mode.from_tensor(inputs.logits), mode.from_tensor(inputs.labels)
        fake = cross_entropy(logits, labels, **options)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def _model(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, inplace: bool):
    return cross_entropy(x @ weight, labels, soft_cap=5.0, inplace_backward=inplace) * 2


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_to_one_graph_with_its_gradient(dynamic, inplace):
    torch._dynamo.reset()
    compiled = torch.compile(_model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (9, 12) if dynamic else (9,):
        x = torch.randn(rows, 5, requires_grad=True)
        weight, labels = torch.randn(5, 11), torch.randint(11, (rows,))
        results = []
        for function in (_model, compiled):
            loss = function(x, weight, labels, inplace)
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
        torch.testing.assert_close(results[0], results[1])


def test_a_leaf_is_refused_while_it_is_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, y: cross_entropy(x, y, inplace_backward=True), backend="aot_eager"
    )
    with pytest.raises(OptionError, match="are a leaf that requires grad"):
        compiled(torch.randn(9, 5, requires_grad=True), torch.randint(5, (9,)))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: cross_entropy(x.exp(), y, inplace_backward=True),
        lambda x, y: (z := x * 2).square().sum() + cross_entropy(z, y, inplace_backward=True),
        lambda x, y: sum(cross_entropy(z, y, inplace_backward=True) for z in [x * 2] * 2),
    ],
    ids=["exp", "square", "twice"],
)
def test_who_else_needs_the_logits_is_told(model, compiles):
    """The layer before, a layer beside it, and a second loss; none gets a wrong gradient."""
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    x = torch.randn(9, 5, requires_grad=True)
    warns = pytest.warns(UserWarning, match="Error detected in") if compiles else nullcontext()
    with pytest.raises(Exception, match=r"modified by an inplace|have been changed"), warns:
        run(x, torch.randint(5, (9,))).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
@pytest.mark.parametrize("inside", [False, True], ids=["view", "view-inside"])
def test_a_view_of_a_leaf_is_not_written_over(inside):
    """While a function is compiled nobody sees whose view it is given, or makes of its argument."""
    torch._dynamo.reset()
    leaf, labels = torch.randn(9, 5, requires_grad=True), torch.randint(5, (8,))
    before = leaf.detach().clone()
    (right,) = torch.autograd.grad(cross_entropy(leaf[1:], labels), leaf)

    def model(x):
        return cross_entropy(x[1:] if inside else x, labels, inplace_backward=True)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(leaf if inside else leaf[1:]).backward()
    assert torch.equal(leaf, before)
    torch.testing.assert_close(leaf.grad, right)


def test_another_number_of_rows_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_model, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for rows in (9, 12, 30):
        compiled(torch.randn(rows, 5), torch.randn(5, 11), torch.randint(11, (rows,)), False)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_it_exports():
    class Model(torch.nn.Module):
        def forward(self, x, weight, labels):
            return _model(x, weight, labels, False)

    arguments = (torch.randn(9, 5), torch.randn(5, 11), torch.randint(11, (9,)))
    program = torch.export.export(Model(), arguments)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "tileloom.cross_entropy_fwd.default" in targets
    torch.testing.assert_close(program.module()(*arguments), _model(*arguments, False))
