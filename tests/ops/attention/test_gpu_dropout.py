"""Dropout on a GPU: masks to the bit, PyTorch's generator, gradients, graphs, compilation."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, FP16, FP32, AttentionCase
from tests.ops.attention.dropout import (
    FORMS,
    check,
    check_gradients,
    drawn_at,
    portable,
    recovered,
    recovered_backward,
)
from torch.utils.checkpoint import checkpoint

import tileloom
from tileloom.ops import record_choices
from tileloom.ops.attention.config import ReferenceConfig, TritonConfig
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig
from tileloom.testing import assert_accurate, dropout_mask, poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_products"),
    pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning"),
]


def _generator():
    torch.cuda.init()  # before it there are no generators
    return torch.cuda.default_generators[torch.cuda.current_device()]


@pytest.mark.parametrize("backend", ["fastest", "portable"])
@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.id)
def test_outputs_and_gradients(case, backend):
    inputs = case.inputs("cuda")
    configs = portable(inputs) if backend == "portable" else {}
    torch.manual_seed(3)
    state = drawn_at(inputs)
    given = gradients.upstream(inputs)
    with poisoned_memory(), record_choices() as made:
        results = gradients.of_attention(inputs, given, dropout_p=0.3, **configs)
        torch.manual_seed(3)
        out, lse = tileloom.attention(
            *(inputs.q, inputs.k, inputs.v), **inputs.options, **configs, dropout_p=0.3,
            return_lse=True,
        )  # fmt: skip
    assert "reference" not in {choice.backend for choice in made}
    check(inputs, out, lse, 0.3, state)
    check_gradients(inputs, given, results, 0.3, state)


@pytest.mark.parametrize("size", [(2, 3, 129, 257), (1, 2, 64, 256), (3, 1, 5, 1022)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_that_of_the_generator(size, p):
    """V = I shows the forward's mask; dO = I the backward's in dV."""
    torch.manual_seed(11)
    torch.rand(1000, device="cuda")
    generator = _generator()
    seed, offset = generator.initial_seed(), generator.get_offset()
    forward = recovered(size, p, device="cuda")
    count = size[0] * size[1] * size[2] * size[3]
    assert generator.get_offset() == offset + (count + 3) // 4 * 4
    right = dropout_mask(p, seed=seed, offset=offset, size=size, device="cuda")
    assert torch.equal(forward, right)
    generator.set_offset(offset)
    assert torch.equal(recovered_backward(size, p, device="cuda"), right)


def test_pytorchs_own_kernel_has_the_same_mask_and_leaves_the_same_generator():
    size = (2, 4, 96, 160)
    b, h, m, n = size
    q, k, v = (torch.randn(b, length, h, 64, device="cuda", dtype=FP16) for length in (m, n, n))
    generator = _generator()
    torch.manual_seed(5)
    torch.rand(77, device="cuda")
    before = generator.get_offset()
    out, _, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, 0.25, 1, True
    )
    after = generator.get_offset()
    uniforms = torch.empty(size, device="cuda")
    torch.ops.aten._fill_mem_eff_dropout_mask_(uniforms, 0.25, int(seed), int(offset))
    mask = dropout_mask(0.25, seed=int(seed), offset=int(offset), size=size, device="cuda")
    assert torch.equal(uniforms > 0.25, mask)
    generator.set_offset(before)
    qkv = [t.transpose(1, 2) for t in (q, k, v)]
    ours = tileloom.attention(*qkv, dropout_p=0.25, is_causal=True)
    assert generator.get_offset() == after
    state = (int(seed), int(offset))
    options = {"is_causal": True, "dropout_p": 0.25, "philox": state}
    reference = tileloom.ops.attention.attention_reference(
        *qkv, **options, compute_dtype=torch.float64
    )
    baseline = tileloom.ops.attention.attention_reference(*qkv, **options, compute_dtype=FP16)
    assert_accurate(ours, reference, baseline, name="ours")
    assert_accurate(out.transpose(1, 2), reference, baseline, name="theirs")


def _replayed(dtype, n):
    q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=dtype).requires_grad_() for _ in "qk")
    identity = torch.eye(n, device="cuda", dtype=dtype).expand(1, 2, n, n).contiguous()
    q.data.zero_()

    def step():
        out = tileloom.attention(q, k, identity.requires_grad_(), dropout_p=0.3)
        (dv,) = torch.autograd.grad(out, identity, torch.ones_like(out).copy_(identity))
        return out, dv

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    return graph, out, dv


def test_each_replay_of_a_graph_has_a_new_mask_and_the_backward_has_it_too():
    graph, out, dv = _replayed(FP16, 128)
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        forward = out != 0
        assert torch.equal(forward, dv.transpose(2, 3) != 0)
        assert abs(forward.double().mean().item() - 0.7) < 0.02
        masks.append(forward.clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_replays_are_repeated_by_manual_seed():
    graph, out, _ = _replayed(FP16, 128)
    found = []
    for _ in range(2):
        torch.manual_seed(21)
        graph.replay()
        torch.cuda.synchronize()
        found.append(out.clone())
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first, of Inductor's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_has_one_mask_for_both_directions(mode):
    torch._dynamo.reset()
    n = 64
    identity = torch.eye(n, device="cuda", dtype=FP16).expand(1, 2, n, n).contiguous()
    q = torch.zeros(1, 2, n, 64, device="cuda", dtype=FP16)

    @torch.compile(fullgraph=True, mode=mode)
    def run(q, v):
        return tileloom.attention(q, q, v, dropout_p=0.3)

    found = []
    for _ in range(4):
        v = identity.clone().requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        out = run(q, v)
        kept = (out.detach() != 0).clone()
        (dv,) = torch.autograd.grad(out, v, identity)
        assert torch.equal(kept, dv.transpose(2, 3) != 0)
        found.append(kept)
    assert not torch.equal(found[2], found[3])
    assert abs(found[3].double().mean().item() - 0.7) < 0.05


def test_checkpointing_repeats_the_mask():
    inputs = AttentionCase("again", (2, 4, 2, 130, 140, 64, 64), BF16).inputs("cuda")
    every = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    configs = portable(inputs)  # whose dq is added up in a fixed order

    def run(q, k, v):
        return tileloom.attention(q, k, v, dropout_p=0.2, **configs)

    found = []
    for wrapped in (run, lambda *a: checkpoint(run, *a, use_reentrant=False)):
        torch.manual_seed(4)
        found.append(torch.autograd.grad(wrapped(*every).float().square().sum(), every))
    for plain, again in zip(*found):
        assert torch.equal(plain, again)


def test_a_call_and_its_plan_draw_anew_each_time():
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=FP16)
    with torch.no_grad():
        first = [tileloom.attention(q, q, q, dropout_p=0.5) for _ in range(5)]
        torch.manual_seed(9)
        again = [tileloom.attention(q, q, q, dropout_p=0.5) for _ in range(5)]
        torch.manual_seed(9)
        repeated = [tileloom.attention(q, q, q, dropout_p=0.5) for _ in range(5)]
    for a, b in zip(again, repeated):
        assert torch.equal(a, b)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(first))


def test_the_reference_backend_draws_from_the_same_generator():
    inputs = AttentionCase("reference", (1, 2, 2, 70, 70, 64, 64), FP32).inputs("cuda")
    torch.manual_seed(6)
    state = drawn_at(inputs)
    qkv = (inputs.q, inputs.k, inputs.v)
    out, lse = tileloom.attention(*qkv, dropout_p=0.5, return_lse=True, config=ReferenceConfig())
    check(inputs, out, lse, 0.5, state)
    assert _generator().get_offset() == int(state[1]) + 2 * 70 * 70


@pytest.mark.parametrize("backend", ["fastest", "portable"])
def test_a8_both_directions_have_the_mask_beyond_2_to_the_32_scores(backend):
    """Of 73728 rows and keys the last 16 rows; the original wraps in 32 bits."""
    n, width = 73_728, 64
    zeros = torch.zeros(1, 1, n, width, device="cuda", dtype=BF16)
    v = torch.zeros_like(zeros)
    v[0, 0, -width:] = torch.eye(width)
    v.requires_grad_()
    dout = torch.zeros_like(zeros)
    dout[0, 0, -16:, :16] = torch.eye(16)
    inputs = cases.Inputs(zeros, zeros, v, {})
    configs = portable(inputs) if backend == "portable" else {}
    torch.manual_seed(8)
    seed, offset = drawn_at(inputs)
    out = tileloom.attention(zeros, zeros, v, dropout_p=0.5, **configs)
    (dv,) = torch.autograd.grad(out, v, dout)
    last = offset + (n - 16) * n
    assert last > 2**32
    right = dropout_mask(0.5, seed=seed, offset=last, size=(1, 1, 16, n), device="cuda")[0, 0]
    assert torch.equal(out[0, 0, -16:] != 0, right[:, -width:])
    assert torch.equal(dv[0, 0, :, :16].mT != 0, right)


@pytest.mark.parametrize("offset", [2**33, 2**40 + 4, 2**34 - 20_000])
def test_offsets_beyond_32_bits(offset):
    size = (1, 2, 130, 140)
    torch.manual_seed(12)
    for shown in (recovered, recovered_backward):
        _generator().set_offset(offset)
        right = dropout_mask(0.4, seed=12, offset=offset, size=size, device="cuda")
        assert torch.equal(shown(size, 0.4, device="cuda"), right)


@pytest.mark.parametrize("sizes", [(16, 16, 4), (32, 64, 4), (128, 32, 8), (64, 128, 8)])
def test_a18_every_size_of_tile_has_the_same_mask(sizes):
    size = (1, 2, 257, 259)
    tile = Tile(*sizes)
    configs = {"config": TritonConfig(*sizes), "backward_config": TritonBackwardConfig(tile, tile)}
    for shown in (recovered, recovered_backward):
        torch.manual_seed(14)
        right = dropout_mask(0.3, seed=14, offset=0, size=size, device="cuda")
        assert torch.equal(shown(size, 0.3, device="cuda", width=128, **configs), right)


def test_gradients_are_the_same_in_every_run():
    inputs = AttentionCase(
        "again", (2, 4, 2, 257, 300, 64, 64), BF16, bias=cases.added((4, 1, 300))
    ).inputs("cuda")
    given = gradients.upstream(inputs)
    first = None
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            torch.manual_seed(3)
            results = gradients.of_attention(inputs, given, dropout_p=0.2)
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(first, results))
    finally:
        torch.use_deterministic_algorithms(False)
