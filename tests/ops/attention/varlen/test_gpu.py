"""Packed sequences on a GPU: every backend, forward and gradients, and what needs a real one."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from tests.ops.attention.cases import BF16
from tests.ops.attention.varlen import cases
from tests.ops.attention.varlen.cases import VarlenCase

import tileloom
from tileloom import knobs, masks
from tileloom.errors import OptionError
from tileloom.ops import record_choices
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.config_backward import TritonBackwardConfig
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.target import target_of_device
from tileloom.testing import poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("exact_products"),
    pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning"),
]

_LONG = (700, 1, 0, 130, 128, 257)
LARGE = [
    VarlenCase(f"large-{name}-{d}", _LONG, _LONG[::-1], (4, 2, d, d_v), BF16, mask=mask)
    for d, d_v in ((64, 64), (128, 128), (192, 128), (64, 256))
    for name, mask in (
        ("full", None),
        ("causal", masks.causal()),
        ("bottom-right", masks.causal("bottom_right")),
        ("window", masks.window(100, 30, anchor="bottom_right")),
    )
]
LARGE += [
    VarlenCase(
        f"large-{name}-{d}", _LONG, _LONG[::-1], (4, 2, d, d), BF16, **own, spare=7,
    )
    for d in (64, 128, 256)
    for name, own in (
        ("bias", {"bias": cases.added("H", "Q", "K")}),
        ("bias-of-keys", {"bias": cases.added("S", "K"), "mask": masks.causal("bottom_right")}),
        ("mask-nan", {"mask": cases.visible("S", "Q", "K"), "hide": slice(70, 200)}),
    )
]  # fmt: skip
CASES = [case for group in cases.GROUPS.values() for case in group] + LARGE


def _offsets(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=lambda each: f"{each[0]}x{each[1]}"
)
@pytest.mark.parametrize("mask", [None, masks.causal("bottom_right")])
def test_gradients_have_the_same_bits_under_deterministic_algorithms(mask, dims):
    case = VarlenCase("again", _LONG, _LONG[::-1], (4, 2, *dims), BF16, mask=mask)
    inputs = case.poisoned("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with record_choices() as made:
            runs = [cases.gradients(inputs) for _ in range(50)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert {choice.backend for choice in made} == {"gluon_sm90"}
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
    cases.check_gradients(inputs, runs[0])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("mask", [None, masks.causal("bottom_right"), masks.window(100, 30)])
def test_persistent_programs_walk_over_several_blocks(mask, ordered):
    case = VarlenCase("walk", 12 * _LONG, 12 * _LONG[::-1], (6, 3, 64, 64), BF16, mask=mask)
    inputs = case.poisoned("cuda")
    persistent = GluonSm90BackwardConfig(64, 3, ordered, persistent=True)
    found, plain = (
        cases.gradients(inputs, backward_config=config)
        for config in (persistent, replace(persistent, persistent=False))
    )
    for a, b in list(zip(found, plain))[0 if ordered else 1 :]:
        assert torch.equal(a, b)
    cases.check_gradients(inputs, found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_outputs_and_gradients(case):
    inputs = case.poisoned("cuda")
    is_192 = inputs.tensors[0].shape[2] == 192  # of so few blocks the rule takes the wide kernel
    configs = {"backward_config": GluonSm90BackwardConfig()} if is_192 else {}
    with poisoned_memory():
        out, lse = cases.call(inputs)
        found = cases.gradients(inputs, **configs)
    cases.check(inputs, out, lse)
    cases.check_gradients(inputs, found)


@pytest.mark.parametrize("d", [64, 128])
def test_more_than_65535_sequences(d):
    lens = [(0, 1, 3, 2)[i % 4] for i in range(70_000)]
    cu = _offsets(lens)
    q, k, v = (torch.randn(sum(lens), 2, d, device="cuda", dtype=BF16) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = tileloom.attention_varlen(*leaves, cu, cu, 3, 3, is_causal=True)
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    first = torch.arange(cu[-4], cu[-1], device="cuda")
    part = [t.detach()[first].requires_grad_() for t in leaves]
    own = _offsets(lens[-3:])
    expected = tileloom.attention_varlen(*part, own, own, 3, 3, is_causal=True)
    torch.testing.assert_close(out[first], expected)
    grads = torch.autograd.grad(expected.float().square().sum(), part)
    for ours, theirs in zip(found, grads):
        torch.testing.assert_close(ours[first], theirs)


@pytest.mark.parametrize("d", [64, 128])
def test_a_sequence_sees_nothing_of_its_neighbours(d):
    lens = [200, 65, 130]
    case = VarlenCase("neighbours", tuple(lens), tuple(lens), (2, 2, d, d), BF16)
    clean, dirty = case.inputs("cuda"), case.inputs("cuda")
    for tensor in dirty.tensors:
        tensor[200:265] = float("nan")
    results = []
    for inputs in (clean, dirty):
        out, _ = cases.call(inputs)
        results.append([out, *cases.gradients(inputs)])
    for ours, theirs in zip(*results):
        for part in (slice(0, 200), slice(265, None)):
            assert not bool(theirs[part].isnan().any())
            torch.testing.assert_close(theirs[part], ours[part])
        assert bool(theirs[200:265].isnan().all())


def test_offsets_are_looked_at_with_a_knob_only():
    q = torch.randn(10, 2, 64, device="cuda", dtype=BF16)
    wrong = torch.tensor([0, 200, 7], dtype=torch.int32, device="cuda")
    tileloom.attention_varlen(q, q, q, wrong, wrong, 300, 300)
    torch.cuda.synchronize()
    with knobs.scope({"debug.lengths": True}), pytest.raises(OptionError, match="falls from 200"):
        tileloom.attention_varlen(q, q, q, wrong, wrong, 300, 300)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("as_tensors", [False, True], ids=["int", "tensor"])
def test_a_graph_replays_with_other_lengths_and_nothing_waits(as_tensors):
    lens = [100, 20, 80]
    q, k, v = (torch.randn(200, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    cu = _offsets(lens)
    most = torch.tensor(200, device="cuda") if as_tensors else 200

    def step() -> tuple[torch.Tensor, ...]:
        out = tileloom.attention_varlen(*leaves, cu, cu, most, most, is_causal=True)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    cu.copy_(_offsets([10, 150, 40]))
    graph.replay()
    for ours, theirs in zip(results, step()):
        torch.testing.assert_close(ours, theirs)


def test_a_plan_is_found_again_for_other_lengths_of_the_same_rows():
    shape = ((40, 0, 90), (70, 30, 30)), ((5, 60, 65), (1, 128, 1))
    for lens_q, lens_k in shape * 2:
        case = VarlenCase("plan", lens_q, lens_k, (2, 2, 64, 64), BF16, mask=masks.causal())
        inputs = replace(case.inputs("cuda"), bounds=(130, 130))
        out, lse = cases.call(inputs)
        cases.check(inputs, out, lse)
        cases.check_gradients(inputs, cases.gradients(inputs))


@pytest.mark.parametrize("backend", ["triton", "gluon_sm90"])
def test_each_backend_by_its_name(backend):
    if backend == "gluon_sm90" and target_of_device(torch.device("cuda")).capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case = VarlenCase("backend", _LONG, _LONG[::-1], (4, 2, 128, 128), BF16)
    inputs = case.inputs("cuda")
    config = TritonConfig() if backend == "triton" else GluonSm90Config()
    backward = TritonBackwardConfig() if backend == "triton" else GluonSm90BackwardConfig()
    with record_choices() as made:
        out, lse = cases.call(inputs, config=config)
        found = cases.gradients(inputs, config=config, backward_config=backward)
    assert {choice.backend for choice in made} == {backend}
    cases.check(inputs, out, lse)
    cases.check_gradients(inputs, found)
