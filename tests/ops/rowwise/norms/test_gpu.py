"""Both norms on a real GPU: every dtype and size, judged by the accuracy rule, run twice.

Outputs are allocated full of NaN between canaries; the second run must give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import FUNCTIONS, NormCase

from tileloom.ops import record_choices
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.norm.config import rule
from tileloom.ops.rowwise.norm.kernels import walked
from tileloom.target import H100
from tileloom.testing import assert_accurate, poisoned_memory

pytestmark = pytest.mark.gpu

both = pytest.mark.parametrize("op", ["rms", "layer"])
DTYPES = (cases.FP16, cases.BF16, cases.FP32)


def judged(case: NormCase) -> None:
    inputs = case.inputs("cuda")
    runs: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            runs.append(cases.run(inputs))
            torch.cuda.synchronize()
        assert [choice.backend for choice in made] == ["triton"] * 2
    for name, first in runs[0].items():
        assert torch.equal(first, runs[1][name]), name
    cases.check(inputs, runs[0])


CASES = [
    *(*cases.WHOLE, *cases.WALKED, *cases.LONG_ROWS, *cases.RINGS, *cases.CLUSTERS),
    *cases.WALKS,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_shared_cases_are_right(case):
    judged(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 1000, 4096, 8192, 12288, 16384, 40000, 2**20])
@both
def test_every_width_and_dtype_is_right(op, width, dtype):
    rows = max(3, min(3000, 2**21 // width))
    # The baseline's sums of squares are fp16 as well, and must stay below 65504.
    scale = 1 / 8 if dtype == cases.FP16 and width > 2**14 else 1.0
    judged(NormCase(op, (rows, width), dtype, cases.everything(op), input_scale=scale))


@pytest.mark.parametrize(
    ("width", "vectors"),
    [(n, cases.BF16) for n in (16384, 32768, 65536, 131072)] + [(16384, cases.FP32)],
    ids=str,
)
@both
def test_clusters_walk_over_many_rows(op, width, vectors):
    """The rule's tiles: each place of the rows and each box of the sums is used many times."""
    asked = walked(width, vectors.itemsize, is_centred=op == "layer")
    forward = rule(asked, H100).forward
    config = TritonConfig(forward, rule(replace(asked, is_backward=True), H100).backward)
    has = ("weight", "bias")[: 1 + (op == "layer")]
    for rows in (1, 7, 401):
        judged(NormCase(op, (rows, width), cases.BF16, has, vectors=vectors, config=config))


@pytest.mark.parametrize("width", [4104, 5120, 8192, 12296, 16384])
@both
def test_rings_of_every_width_are_right(op, width):
    """More rows than programs, so that each place of the ring is used again."""
    warps = 8 if width <= 8192 else 16
    ring = TritonConfig(backward=Tile(256 * warps, 1, warps, 1, 2, ring=True))
    has = cases.everything(op)
    if width > 8192:  # rows of three tensors are too large for its shared memory
        has = tuple(name for name in has if name != "residual")
    for rows in (1, 131, 700):
        judged(NormCase(op, (rows, width), cases.BF16, has, config=ring))


@pytest.mark.parametrize("vectors", [cases.FP16, cases.BF16, cases.FP32, torch.float64])
@both
def test_weights_of_any_dtype_are_right(op, vectors):
    judged(NormCase(op, (300, 768), cases.BF16, cases.everything(op), vectors=vectors))


@both
def test_rows_of_one_and_of_no_element(op):
    function, reference = FUNCTIONS[op]
    x = torch.randn(50, 1, device="cuda", requires_grad=True)
    weight = torch.full((1,), 2.0, device="cuda")
    out = function(x, weight)
    if op == "layer":
        assert not out.any()
    else:
        answers = (reference(x, weight, compute_dtype=t) for t in (torch.float64, cases.FP32))
        assert_accurate(out, *answers)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for shape in ((0,), (3, 0), (0, 5)):
        empty = torch.randn(shape, device="cuda", requires_grad=True)
        weight = torch.randn(shape[-1], device="cuda", requires_grad=True)
        function(empty, weight).sum().backward()
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.parametrize(
    "layout", ["transposed", "expanded", "gapped", "unaligned", "last_strided"]
)
@both
def test_layouts_are_right(op, layout):
    judged(NormCase(op, (6, 50, 777), cases.BF16, cases.everything(op), (layout, "contiguous")))
    judged(NormCase(op, (6, 50, 512), cases.BF16, cases.everything(op), (layout, layout)))


@pytest.mark.parametrize("width", [4096, 2**17])
@both
def test_more_than_2_to_the_31_elements(op, width):
    """Rows beyond 2^31 elements are the same as the same rows alone."""
    rows = 2**31 // width + 64
    x = torch.empty(rows, width, device="cuda", dtype=cases.BF16)
    x[:64].normal_()
    x[64:-64].zero_()
    x[-64:] = x[:64]
    x.requires_grad_()
    weight = torch.ones(width, device="cuda", dtype=cases.BF16)
    out = FUNCTIONS[op][0](x, weight)
    assert torch.equal(out[-64:], out[:64])
    assert out[:64].float().square().mean() > 0.9
    assert not out[64:-64].any()
    grad = torch.zeros_like(out)
    grad[:64].normal_()
    grad[-64:] = grad[:64]
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(dx[-64:], dx[:64])
    assert dx[:64].any(1).all()
    assert not dx[64:-64].any()


@pytest.mark.parametrize("width", [512, 40000])
@both
def test_calls_without_gradients_are_captured_in_a_graph(op, width):
    x, residual = torch.randn(2, 64, width, device="cuda", dtype=cases.BF16).unbind(0)
    weight = torch.randn(width, device="cuda", dtype=cases.BF16)
    function = FUNCTIONS[op][0]
    for _ in range(3):  # compiled, and prepared by the launcher
        expected = function(x, weight, residual=residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(x, weight, residual=residual)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, expected):
        assert torch.equal(ours, theirs)


@both
def test_training_is_captured_in_a_graph(op):
    inputs = NormCase(op, (300, 1024), cases.BF16, cases.everything(op)).inputs("cuda")
    for _ in range(3):
        expected = cases.run(inputs)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        captured = cases.run(inputs)
    for tensor in captured.values():
        tensor.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for name, tensor in captured.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@both
def test_it_compiles_with_its_gradients(op, dynamic):
    torch._dynamo.reset()
    function = FUNCTIONS[op][0]

    def block(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return function(x.sin(), weight) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (64, 100) if dynamic else (64,):
        x = torch.randn(rows, 256, device="cuda", requires_grad=True)
        weight = torch.randn(256, device="cuda", requires_grad=True)
        results = []
        for each in (block, compiled):
            out = each(x, weight)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
        torch.testing.assert_close(results[0], results[1])


@both
def test_a_repeated_call_goes_by_its_plan_and_a_changed_one_does_not(op):
    function, reference = FUNCTIONS[op]
    weight = torch.randn(256, device="cuda")
    for shape in ((8, 256), (8, 256), (4, 256), (2, 4, 256)):
        for dtype in (cases.FP32, cases.BF16):
            for eps in (1e-5, 1.0):
                x = torch.randn(shape, device="cuda").to(dtype)
                out = function(x, weight, eps=eps)
                expected = (
                    reference(x, weight, eps=eps, compute_dtype=torch.float64),
                    reference(x, weight, eps=eps, compute_dtype=dtype),
                )
                assert out.shape == x.shape
                assert_accurate(out, *expected)
    with pytest.raises(ValueError, match="weight has shape"):
        function(torch.randn(8, 128, device="cuda"), weight)


@pytest.mark.parametrize("rows", [1, 4, 16, 32])
@both
def test_any_number_of_rows_a_program_is_right(op, rows):
    config = TritonConfig(Tile(128, rows, 4), Tile(128, rows, 4, 2, 3))
    judged(NormCase(op, (1001, 96), cases.BF16, cases.everything(op), config=config))
