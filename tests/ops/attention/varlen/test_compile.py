"""`tileloom::attention_varlen_fwd` and `_bwd` under PyTorch's compiler stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.attention.cases import BF16, FP32
from tests.ops.attention.varlen.cases import VarlenCase, added, visible
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileloom
from tileloom import masks

_LENS = ((5, 0, 4), (7, 2, 4))
_SIZES = (4, 2, 16, 8)


def _arguments(layout: str, *, with_extras: bool) -> tuple[Any, ...]:
    """The forward operator's own arguments, by position."""
    case = VarlenCase(
        "opcheck", *_LENS, sizes=_SIZES, dtype=FP32, layout=layout, mask=visible("S", "K"),
        bias=added("H", "Q", "K"),
    )  # fmt: skip
    inputs = case.inputs()
    extras: tuple[Any, ...] = (None, None, None)
    dropout: tuple[Any, ...] = (0.0, None, None)
    if with_extras:
        lengths = torch.tensor([6, 1, 4])
        extras = (inputs.options["mask"], inputs.options["bias"], lengths)
        dropout = (0.25, torch.tensor(7), torch.tensor(3))
    return (*inputs.arguments(), *extras, 3, None, None, 2, 0.25, *dropout, "", "")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "last_strided"])
@pytest.mark.parametrize("with_extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "gradient"])
def test_opcheck(layout, with_extras, needs_grad):
    arguments = list(_arguments(layout, with_extras=with_extras))
    if needs_grad:
        arguments[:3] = [t.detach().requires_grad_() for t in arguments[:3]]
    torch.library.opcheck(torch.ops.tileloom.attention_varlen_fwd.default, tuple(arguments))


def test_opcheck_of_the_backward():
    q, k, v, *rest = _arguments("contiguous", with_extras=True)
    out, lse = torch.ops.tileloom.attention_varlen_fwd(q, k, v, *rest)
    arguments = (
        torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest[:-2],
        True, True, True, "",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.tileloom.attention_varlen_bwd.default, arguments)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped"])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_a_fake_has_the_strides_of_the_real_result(layout, dtype):
    inputs = VarlenCase("fake", *_LENS, sizes=_SIZES, dtype=dtype, layout=layout).inputs()
    real = tileloom.attention_varlen(*inputs.arguments(), return_lse=True)
    with FakeTensorMode() as mode:
        q, k, v, a, b = (mode.from_tensor(t) for t in (*inputs.tensors, *inputs.offsets))
        fake = tileloom.attention_varlen(q, k, v, a, b, *inputs.bounds, return_lse=True)
    for ours, theirs in zip(fake, real):
        assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.device,
        )


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    most_q: Any, most_k: Any,
) -> torch.Tensor:  # fmt: skip
    mask = masks.window(5, None, anchor="bottom_right")
    out, lse = tileloom.attention_varlen(
        q * 2, k, v, a, b, most_q, most_k, mask=mask, is_causal=True, return_lse=True
    )
    return out.flatten(1) + lse.exp().sum()


def _gradients(function: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in arguments[:3]]
    out = function(*leaves, *arguments[3:])
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_to_one_graph_with_its_gradient(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lens in ((5, 4), (9, 2), (3, 8)) if dynamic else ((5, 4),):
        inputs = VarlenCase("compile", lens, lens, _SIZES, FP32).inputs()
        expected = _gradients(_block, inputs.arguments())
        for ours, theirs in zip(_gradients(compiled, inputs.arguments()), expected):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("as_tensors", [False, True], ids=["int", "tensor"])
def test_other_lengths_and_bounds_do_not_recompile(as_tensors):
    """A19 of the reported inputs, among others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counts = []
    compiled = torch.compile(_block, fullgraph=True, dynamic=True, backend=counter)
    for lens in ((5, 4, 6), (9, 2, 5), (3, 8, 20), (17, 12, 2)):
        inputs = VarlenCase("compile", lens, lens, _SIZES, FP32).inputs()
        bounds = [torch.tensor(n) if as_tensors else n for n in inputs.bounds]
        with torch.no_grad():
            compiled(*inputs.tensors, *inputs.offsets, *bounds)
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_it_exports():
    class Model(torch.nn.Module):
        def forward(self, q, k, v, a, b):
            return _block(q, k, v, a, b, 9, 9)

    inputs = VarlenCase("export", (9, 4), (9, 4), _SIZES, FP32).inputs()
    arguments = (*inputs.tensors, *inputs.offsets)
    with torch.no_grad():
        program = torch.export.export(Model(), arguments)
        expected = _block(*arguments, 9, 9)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "tileloom.attention_varlen_fwd.default" in targets
    torch.testing.assert_close(program.module()(*arguments), expected)
