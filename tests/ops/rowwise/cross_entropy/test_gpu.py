"""Cross entropy on a real GPU, judged by the accuracy rule; a second run gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.rowwise.cross_entropy import cases
from tests.ops.rowwise.cross_entropy.cases import BF16, FP16, FP32, CrossEntropyCase

from tileloom.ops import record_choices
from tileloom.ops.rowwise.cross_entropy import cross_entropy
from tileloom.testing import poisoned_memory

pytestmark = pytest.mark.gpu

NAN = float("nan")


def judge(case: CrossEntropyCase, *, inplace: bool = False) -> None:
    inputs = case.inputs("cuda")
    results = []
    for _ in range(2):
        with record_choices() as made, poisoned_memory():
            results.append(cases.run(inputs, case.config, inplace=inplace))
            torch.cuda.synchronize()
        assert [choice.backend for choice in made] == ["triton"] * 2
    assert all(torch.equal(*pair) for pair in zip(*results))
    cases.check(inputs, *results[0])


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
@pytest.mark.parametrize("case", cases.ONE_BLOCK + cases.WALKED, ids=lambda case: case.id)
def test_the_shared_cases_are_right(case, inplace):
    if inplace and case.layout != "contiguous":
        case = replace(case, layout="contiguous")
    judge(case, inplace=inplace)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, cases.ALL], ids=["mean", "all"])
@pytest.mark.parametrize("width", [4, 7, 1000, 4096, 32000, 50257, 128256, 2**20])
def test_every_width_is_right(width, options, dtype):
    rows = max(7, min(200, 2**21 // width))
    judge(CrossEntropyCase("width", (rows, width), dtype, options=options))


@pytest.mark.parametrize("layout", ["transposed", "gapped", "unaligned", "last_strided"])
def test_layouts_are_right(layout):
    judge(CrossEntropyCase(layout, (2, 3, 6, 9000), FP16, layout, options=cases.ALL))


def test_one_class():
    logits = torch.randn(300, 1, device="cuda", requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(300, dtype=torch.long, device="cuda"))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
def test_huge_logits_are_right(dtype):
    scale = 1e4 if dtype == FP32 else 1.5e4
    rows = ((3, torch.finfo(dtype).max), (4, torch.finfo(dtype).min))
    for options in (cases.NONE, {"reduction": "none", "label_smoothing": 0.1}):
        judge(CrossEntropyCase("huge", (7, 3000), dtype, options=options, input_scale=scale))
        judge(CrossEntropyCase("even", (7, 3000), dtype, options=options, rows=rows))


def test_ignored_rows_only():
    logits = torch.full((5000, 3000), NAN, device="cuda", requires_grad=True)
    labels = torch.full((5000,), -100, device="cuda")
    loss = cross_entropy(logits, labels)
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert not logits.grad.any()
    assert cross_entropy(logits, labels, reduction="sum") == 0


def test_labels_out_of_range_give_nan():
    logits = torch.randn(4, 1000, device="cuda", requires_grad=True)
    labels = torch.tensor([5, 1000, -(2**62), 2**62], device="cuda")
    loss = cross_entropy(logits, labels, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, True, True]
    assert grad.isnan().all(1).tolist() == [False, True, True, True]


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
def test_more_than_two_to_the_31_elements(inplace):
    """Judged on the first and the last rows."""
    size = 50000
    count = 2**31 // size + 10
    logits = torch.empty((count, size), dtype=BF16, device="cuda").normal_()
    labels = torch.randint(size, (count,), device="cuda")
    parts = [slice(0, 7), slice(count - 7, count)]
    kept = [logits[rows].clone() for rows in parts]
    logits.requires_grad_()
    if inplace:
        logits = logits * 1
    loss = cross_entropy(logits, labels, reduction="none", inplace_backward=inplace)
    weights = torch.ones(count, device="cuda")
    given = [cases.Inputs(x, labels[rows], dict(cases.NONE)) for x, rows in zip(kept, parts)]
    for inputs, rows in zip(given, parts):
        weights[rows] = inputs.loss_gradient
    (grad,) = torch.autograd.grad(loss, logits, weights)
    for inputs, rows in zip(given, parts):
        cases.check(inputs, loss[rows].detach(), grad[rows])


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
def test_no_second_copy_of_the_logits_is_made(inplace):
    labels = torch.randint(32000, (2048,), device="cuda")
    for _ in range(4):  # a process's first launches of a kernel allocate what their self-test needs
        logits = torch.randn(2048, 32000, device="cuda", dtype=BF16, requires_grad=True) * 1
        torch.autograd.grad(cross_entropy(logits, labels, inplace_backward=inplace), logits)
    logits = torch.randn(2048, 32000, device="cuda", dtype=BF16, requires_grad=True) * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = cross_entropy(logits, labels, inplace_backward=inplace)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    torch.autograd.grad(loss, logits)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2**20 + (0 if inplace else logits.nbytes)


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
def test_a_cuda_graph_replays_the_mean(inplace):
    """Captured, so that it cannot wait for the device."""
    inputs = CrossEntropyCase("graph", (57, 5000), FP32).inputs("cuda")
    cases.run(inputs, inplace=inplace)
    graph = torch.cuda.CUDAGraph()
    gradient = inputs.loss_gradient
    with torch.cuda.graph(graph):
        logits = inputs.logits.detach().requires_grad_() * 1
        loss = cross_entropy(logits, inputs.labels, inplace_backward=inplace)
        (grad,) = torch.autograd.grad(loss, logits, gradient)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inputs.logits.copy_(torch.randn(inputs.logits.shape, generator=generator))
        inputs.labels.copy_(torch.randint(5000, inputs.labels.shape, generator=generator))
        inputs.labels[seed] = -100
        graph.replay()
        torch.cuda.synchronize()
        cases.check(inputs, loss.detach(), grad)


def test_the_plan_is_found_again():
    """The short way gives what the operator gives, gradients asked for or not."""
    inputs = CrossEntropyCase("plan", (60, 700), BF16, options={"soft_cap": 5.0}).inputs("cuda")
    call = (inputs.logits, inputs.labels)
    with record_choices():
        expected = cross_entropy(*call, **inputs.options)
    assert all(torch.equal(cross_entropy(*call, **inputs.options), expected) for _ in range(3))
    leaf = inputs.logits.clone().requires_grad_()
    assert torch.equal(cross_entropy(leaf, inputs.labels, **inputs.options), expected)


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "inplace"])
def test_it_compiles(inplace):
    torch._dynamo.reset()
    x = torch.randn(33, 64, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(64, 5000, device="cuda", dtype=BF16)
    labels = torch.randint(5000, (33,), device="cuda")

    def block(x):
        return cross_entropy(x @ weight, labels, inplace_backward=inplace)

    expected = torch.autograd.grad(block(x), x)
    found = torch.autograd.grad(torch.compile(block, fullgraph=True)(x), x)
    torch.testing.assert_close(found, expected)
