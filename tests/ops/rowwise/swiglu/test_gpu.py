"""SwiGLU on a real GPU: judged by the accuracy rule, run twice, poisoned memory, long offsets."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.swiglu import cases

from tileloom.ops import record_choices
from tileloom.ops.rowwise.swiglu import swiglu
from tileloom.testing import poisoned_memory

pytestmark = pytest.mark.gpu


def judged(case: cases.SwigluCase) -> None:
    inputs = case.inputs("cuda")
    runs: list[list[torch.Tensor]] = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            runs.append(cases.run(case, inputs))
            torch.cuda.synchronize()
        assert [choice.backend for choice in made] == ["triton"] * 2
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    cases.check(inputs, runs[0])


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_the_shared_cases_are_right(case):
    judged(case)


@pytest.mark.parametrize("dtype", [cases.FP16, cases.BF16, cases.FP32])
@pytest.mark.parametrize("layout", ["contiguous", "halves", "gapped", "last_strided"])
@pytest.mark.parametrize("width", [1, 7, 1000, 11008, 2**20])
def test_every_width_and_dtype_is_right(width, layout, dtype):
    rows = max(2, min(2000, 2**21 // width))
    judged(cases.SwigluCase((rows, width), dtype, (layout, layout)))


@pytest.mark.parametrize("halves", [False, True])
def test_more_than_2_to_the_31_elements(halves):
    rows, width = 2**31 // 4096 + 64, 4096
    gate = torch.zeros(rows, width * (2 if halves else 1), device="cuda", dtype=cases.BF16)
    gate[:64].normal_()
    gate[-64:] = gate[:64]
    gate, up = gate.chunk(2, -1) if halves else (gate, gate)
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    out = swiglu(*leaves)
    grads = torch.autograd.grad(out, leaves, out.detach())
    for result in (out, *grads):
        assert torch.equal(result[-64:], result[:64])
        assert result[:64].any(1).all()
        assert not result[64:-64].any()


def test_it_is_captured_in_a_graph():
    gate, up = torch.randn(64, 2048, device="cuda").chunk(2, -1)
    for _ in range(3):
        expected = swiglu(gate, up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = swiglu(gate, up)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
