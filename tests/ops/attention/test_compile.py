"""`tileloom::attention_fwd` under PyTorch's compiler stack: opcheck, compile, export, fakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.attention import cases
from tests.ops.attention.cases import BF16, FP32, AttentionCase
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tileloom
from tileloom import masks

_SIZES = (2, 4, 2, 9, 13, 16, 8)


def _arguments(inputs: cases.Inputs, *, with_extras: bool) -> tuple[Any, ...]:
    """The operator's own arguments, by position."""
    q, k, v = inputs.q, inputs.k, inputs.v
    extras: tuple[Any, ...] = (None, None, None)
    if with_extras:
        visible = torch.ones(2, 1, 9, 13, dtype=torch.bool)
        extras = (visible, torch.randn(4, 9, 13), torch.tensor([13, 4]))
    return (q, k, v, *extras, 3, None, None, 2, 0.25, 0.0, None, None, "", "")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "last_strided"])
@pytest.mark.parametrize("with_extras", [False, True], ids=["plain", "extras"])
def test_opcheck(layout, with_extras):
    inputs = AttentionCase("opcheck", _SIZES, FP32, (layout,) * 3).inputs()
    arguments = _arguments(inputs, with_extras=with_extras)
    torch.library.opcheck(torch.ops.tileloom.attention_fwd.default, arguments)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "gapped", "expanded"])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("sizes", [_SIZES, (1, 1, 1, 1, 1, 8, 8), (2, 3, 3, 0, 4, 8, 8)])
def test_a_fake_has_the_strides_of_the_real_result(layout, dtype, sizes):
    inputs = AttentionCase("fake", sizes, dtype, (layout,) * 3).inputs()
    real = tileloom.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in (inputs.q, inputs.k, inputs.v))
        fake = tileloom.attention(q, k, v, return_lse=True)
    for ours, theirs in zip(fake, real):
        assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.device,
        )


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    mask = masks.key_lengths(n) & masks.window(5, None, anchor="bottom_right")
    out, lse = tileloom.attention(q * 2, k, v, mask=mask, is_causal=True, return_lse=True)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + lse.exp().sum()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_compiles_to_one_graph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (9, 12, 17) if dynamic else (9,):
        inputs = AttentionCase("compile", (2, 4, 2, length, length, 16, 8), FP32).inputs()
        n = torch.tensor([length, 4])
        with torch.no_grad():
            expected = _block(inputs.q, inputs.k, inputs.v, n)
            out = compiled(inputs.q, inputs.k, inputs.v, n)
        torch.testing.assert_close(out, expected)


def test_a_new_length_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counts = []
    compiled = torch.compile(_block, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 12, 17, 30):
        inputs = AttentionCase("compile", (2, 4, 2, length, length, 16, 8), FP32).inputs()
        with torch.no_grad():
            compiled(inputs.q, inputs.k, inputs.v, torch.tensor([length, 4]))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_it_exports():
    class Model(torch.nn.Module):
        def forward(self, q, k, v, n):
            return _block(q, k, v, n)

    inputs = AttentionCase("export", (2, 4, 2, 9, 9, 16, 8), FP32).inputs()
    arguments = (inputs.q, inputs.k, inputs.v, torch.tensor([9, 4]))
    with torch.no_grad():
        program = torch.export.export(Model(), arguments)
        expected = _block(*arguments)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "tileloom.attention_fwd.default" in targets
    torch.testing.assert_close(program.module()(*arguments), expected)
