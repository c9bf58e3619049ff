"""Softmax on a real GPU, judged by the accuracy rule; every call twice, with the same bits."""

from __future__ import annotations

import pytest
import torch
from tests.ops.rowwise.softmax import cases
from tests.ops.rowwise.softmax.cases import BF16, FP16, FP32, SoftmaxCase

from tileloom.ops import record_choices
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.softmax import softmax, softmax_reference
from tileloom.testing import assert_accurate, poisoned_memory

pytestmark = pytest.mark.gpu

INF = float("inf")
SPLIT = TritonConfig(Tile(1024, 1, 4, split=True), Tile(1024, 1, 4, split=True))


def judge(case: SoftmaxCase, config: TritonConfig | None = None) -> None:
    inputs = case.inputs("cuda")
    results = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            results.append(cases.run(inputs, config or case.config))
            torch.cuda.synchronize()
        assert [choice.backend for choice in made] == ["triton"] * 2
    assert all(torch.equal(*pair) for pair in zip(*results))
    cases.check(inputs, *results[0])


@pytest.mark.parametrize(
    "case", cases.WHOLE + cases.WALKED + cases.SHARED + cases.CLUSTERS, ids=lambda case: case.id
)
def test_the_shared_cases_are_right(case):
    judge(case)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "width", [1, 7, 8, 1000, 1024, 4096, 4100, 16384, 20001, 32768, 50257, 131072, 2**20]
)
def test_every_width_is_right(width, dtype):
    rows = max(3, min(200, 2**21 // width))
    judge(SoftmaxCase("width", (rows, width), dtype))


@pytest.mark.parametrize("config", [None, cases.WALK, SPLIT], ids=["rule", "walk", "split"])
@pytest.mark.parametrize("layout", ["transposed", "gapped", "unaligned", "last_strided"])
def test_layouts_and_masks_are_right(layout, config):
    mask = (2, 1, 6, 5000)
    judge(SoftmaxCase(layout, (2, 3, 6, 5000), FP16, layout, mask=mask, spoil=True), config)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
def test_huge_values_and_rows_of_minus_infinity_are_right(dtype):
    rows = ((3, -INF), (4, torch.finfo(dtype).max), (5, torch.finfo(dtype).min))
    for width in (300, 40000):
        case = SoftmaxCase("huge", (7, width), dtype, rows=rows, input_scale=1e4)
        judge(case)
        y, dx = cases.run(case.inputs("cuda"))
        assert not y[3].any()
        assert not dx[3].any()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty(shape):
    x = torch.randn(shape, device="cuda", requires_grad=True)
    y = softmax(x)
    y.sum().backward()
    assert y.shape == x.shape


@pytest.mark.parametrize("width", [1000, 40000])
def test_more_than_two_to_the_31_elements(width):
    """Judged on the first and the last rows; the gradient of the last as well."""
    count = 2**31 // width + 10
    x = torch.empty((count, width), dtype=BF16, device="cuda").normal_()
    y = softmax(x)
    dy = x.clone().normal_()
    dx = torch.ops.tileloom.softmax_bwd(y, dy, "")
    for rows in (slice(0, 4), slice(count - 4, count)):
        inputs = cases.Inputs(x[rows], None, dy[rows])
        exact = softmax_reference(inputs.x, compute_dtype=torch.float64)
        assert_accurate(y[rows], exact, softmax_reference(inputs.x, compute_dtype=BF16))
        cases.check(inputs, y[rows], dx[rows])


@pytest.mark.parametrize("width", [500, 40000, 131072])
def test_a_cuda_graph_replays_it(width):
    inputs = SoftmaxCase("graph", (50, width), FP32, mask=(1, width)).inputs("cuda")
    cases.run(inputs)
    graph = torch.cuda.CUDAGraph()
    x = inputs.x.requires_grad_()
    with torch.cuda.graph(graph):
        y = softmax(x, mask=inputs.mask)
        (dx,) = torch.autograd.grad(y, x, inputs.dy)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        cases.check(inputs, y.detach(), dx)


def test_shared_rows_on_several_streams_do_not_wait_for_each_other_for_ever():
    xs = [torch.randn(64, 131072, device="cuda", dtype=BF16) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    expected = [softmax(x) for x in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for x, stream in zip(xs, streams):
            with torch.cuda.stream(stream):
                results.append(softmax(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i % 4]) for i, y in enumerate(results))


def test_the_plan_is_found_again():
    """The short way gives what the operator gives, gradients asked for or not."""
    x = torch.randn(6, 700, device="cuda", dtype=BF16)
    mask = torch.rand(700, device="cuda") > 0.3
    with record_choices():
        expected = softmax(x, mask=mask)
    assert all(torch.equal(softmax(x, mask=mask), expected) for _ in range(3))
    assert torch.equal(softmax(x.clone().requires_grad_(), mask=mask), expected)


def test_it_compiles():
    torch._dynamo.reset()
    x = torch.randn(33, 5000, device="cuda", dtype=BF16, requires_grad=True)

    def block(x):
        return softmax(x * 2).float().square().sum()

    expected = torch.autograd.grad(block(x), x)
    found = torch.autograd.grad(torch.compile(block, fullgraph=True)(x), x)
    torch.testing.assert_close(found, expected)
