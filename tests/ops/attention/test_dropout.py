"""Dropout of the reference backend and of the operators: draws, gradients, PyTorch's compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.attention import gradients
from tests.ops.attention.cases import BF16, FP32, AttentionCase
from tests.ops.attention.dropout import FORMS, check, check_gradients, drawn_at, recovered
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tileloom
from tileloom import errors, masks
from tileloom.ops.attention import attention_reference
from tileloom.ops.attention.philox import draw
from tileloom.ops.attention.reference import attention_reference_backward
from tileloom.testing import dropout_mask

_SIZES = (2, 4, 2, 9, 13, 16, 8)


def leaves(dtype: torch.dtype = FP32, sizes: Any = _SIZES) -> list[torch.Tensor]:
    inputs = AttentionCase("leaves", sizes, dtype).inputs()
    return [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.id)
def test_outputs_and_gradients(case):
    inputs = case.inputs()
    given = gradients.upstream(inputs)
    torch.manual_seed(2)
    state = drawn_at(inputs)
    results = gradients.of_attention(inputs, given, dropout_p=0.3)
    torch.manual_seed(2)
    out, lse = tileloom.attention(
        inputs.q, inputs.k, inputs.v, **inputs.options, dropout_p=0.3, return_lse=True
    )
    check(inputs, out, lse, 0.3, state)
    check_gradients(inputs, given, results, 0.3, state)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_dropped_and_what_is_kept(p):
    """Against an even plainer formula: softmax, the host's mask, a product."""
    q, k, v = (t.detach().double() for t in leaves(sizes=(2, 2, 2, 9, 13, 16, 8)))
    kept = dropout_mask(p, seed=5, offset=3, size=(2, 2, 9, 13))
    weights = torch.softmax(q @ k.mT / 4, 3)
    expected = (weights * kept / (1 - p)) @ v
    out, lse = attention_reference(q, k, v, dropout_p=p, philox=(5, 3), return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 4, 3))


def test_the_formulas_are_the_derivative():
    q, k, v = (t.detach().double().requires_grad_() for t in leaves(sizes=(1, 2, 1, 4, 5, 3, 2)))
    bias = torch.randn(2, 1, 5, dtype=torch.float64, requires_grad=True)
    options = {"dropout_p": 0.4, "philox": (9, 2), "mask": masks.window(2, 3)}

    def call(q, k, v, bias):
        return attention_reference(q, k, v, bias=bias, **options, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))
    out, lse = call(q, k, v, bias)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    every = (q, k, v, bias)
    expected = torch.autograd.grad((out, lse), every, (dout, dlse))
    formulas = attention_reference_backward(dout, dlse, q, k, v, bias=bias, **options)
    for ours, right in zip(formulas, expected):
        torch.testing.assert_close(ours, right)


def test_no_dropout_draws_nothing():
    before = torch.get_rng_state()
    every = leaves()
    tileloom.attention(*every, dropout_p=0.0).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_manual_seed_repeats_a_mask_and_calls_differ():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append([recovered((1, 2, 8, 40), 0.5) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


def test_a_call_on_the_cpu_draws_its_seed_by_randint():
    torch.manual_seed(13)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    torch.manual_seed(13)
    assert torch.equal(
        recovered((1, 2, 8, 40), 0.5), dropout_mask(0.5, seed=seed, offset=0, size=(1, 2, 8, 40))
    )


def test_a_backward_draws_nothing_and_later_calls_do_not_disturb_it():
    every = leaves()
    torch.manual_seed(1)
    out = tileloom.attention(*every, dropout_p=0.5)
    expected = torch.autograd.grad(out.sum(), every, retain_graph=True)
    tileloom.attention(*every, dropout_p=0.5)
    before = torch.get_rng_state()
    for ours, right in zip(torch.autograd.grad(out.sum(), every), expected):
        assert torch.equal(ours, right)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_mask(reentrant):
    def run(*tensors):
        return tileloom.attention(*tensors, dropout_p=0.5)

    found = []
    for wrapped in (run, lambda *a: checkpoint(run, *a, use_reentrant=reentrant)):
        every = leaves()
        torch.manual_seed(4)
        wrapped(*every).square().sum().backward()
        found.append([leaf.grad for leaf in every])
    for ours, right in zip(*found):
        assert torch.equal(ours, right)


def _arguments(with_extras: bool) -> tuple[Any, ...]:
    extras: tuple[Any, ...] = (None, None, None)
    if with_extras:
        visible = torch.ones(2, 1, 9, 13, dtype=torch.bool)
        extras = (visible, torch.randn(4, 9, 13, requires_grad=True), torch.tensor([13, 4]))
    state = (torch.tensor(-5), torch.tensor(7))
    return (*leaves(), *extras, 3, None, None, 2, 0.25, 0.3, *state, "", "")


@pytest.mark.parametrize("with_extras", [False, True], ids=["plain", "extras"])
def test_opcheck_of_both_operators(with_extras):
    arguments = _arguments(with_extras)
    torch.library.opcheck(torch.ops.tileloom.attention_fwd.default, arguments)
    *rest, _config, _backward_config = (
        a.detach() if isinstance(a, torch.Tensor) else a for a in arguments
    )
    q, k, v, mask, bias, lengths, *options = rest
    out, lse = torch.ops.tileloom.attention_fwd(*rest, "", "")
    backward = (
        torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, mask, bias, lengths,
        *options, True, True, with_extras, "",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.tileloom.attention_bwd.default, backward)


def test_opcheck_of_the_draw():
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (torch.zeros(3), 24)
    torch.library.opcheck(torch.ops.tileloom.philox_state.default, arguments, test_utils=checks)
    assert torch.Tag.nondeterministic_seeded in torch.ops.tileloom.philox_state.default.tags


def test_fake_tensors_go_through():
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t.detach()) for t in leaves())
        out = tileloom.attention(q, k, v, dropout_p=0.3)
    assert out.shape == (2, 4, 9, 8)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training_is_one_graph_with_one_mask(dynamic):
    """V = I shows the mask of the forward, dO = I that of the backward."""
    torch._dynamo.reset()

    def run(q, v):
        return tileloom.attention(q, q, v, dropout_p=0.4)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (24, 20, 28) if dynamic else (24, 24):
        q = torch.zeros(1, 2, n, 16)
        v = torch.eye(n).expand(1, 2, n, n).contiguous().requires_grad_()
        shown = []
        for _ in range(2):
            out = compiled(q, v)
            (dv,) = torch.autograd.grad(out, v, torch.eye(n).expand(1, 2, n, n))
            assert torch.equal(out != 0, dv.mT != 0)
            shown.append(out.detach() != 0)
        assert not torch.equal(*shown)
        assert 0.4 < shown[0].double().mean() < 0.8


def test_a_new_length_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q: tileloom.attention(q, q, q, dropout_p=0.4),
        fullgraph=True, dynamic=True, backend=counter,
    )  # fmt: skip
    counts = []
    for length in (9, 12, 17):
        compiled(torch.randn(2, 2, length, 16))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_it_exports_and_draws_in_the_program():
    class Model(torch.nn.Module):
        def forward(self, q):
            return tileloom.attention(q, q, q, dropout_p=0.5)

    q = torch.randn(1, 2, 8, 16)
    program = torch.export.export(Model(), (q,)).module()
    first, second = program(q), program(q)
    assert not torch.equal(first, second)


def test_autocast_keeps_the_mask():
    q, k, v = leaves()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=BF16):
        out = tileloom.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    expected = tileloom.attention(*(t.to(BF16) for t in (q, k, v)), dropout_p=0.5)
    assert out.dtype == BF16
    assert torch.equal(out, expected)


def test_an_empty_problem_is_still_empty():
    q, k, v = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8)
    out, lse = tileloom.attention(q, k, v, dropout_p=0.5, return_lse=True)
    assert not out.any()
    assert bool((lse == float("-inf")).all())


def test_the_reference_wants_a_state():
    with pytest.raises(errors.OptionError, match="philox is None; it must be a seed"):
        attention_reference(*leaves(), dropout_p=0.1)


def test_a_state_on_the_wrong_device_is_refused():
    seed, offset = torch.tensor(1, device="meta"), torch.tensor(0)
    with pytest.raises(errors.DeviceError, match="philox_seed is on meta, philox_offset on cpu"):
        tileloom.ops.attention.philox.state_of("attention_fwd", torch.zeros(1), 0.1, seed, offset)


def test_a_draw_gives_numbers_without_a_dimension():
    seed, offset = draw(torch.zeros(2, requires_grad=True), 100)
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == (
        (), torch.int64, (), torch.int64,
    )  # fmt: skip
    assert int(offset) == 0


def test_the_mean_over_masks_is_attention_without_dropout():
    q, k, v = (t.detach() for t in leaves())
    plain = attention_reference(q, k, v, compute_dtype=torch.float64)
    total = torch.zeros_like(plain)
    for seed in range(400):
        total += attention_reference(q, k, v, dropout_p=0.3, philox=(seed, 0)).double()
    assert ((total / 400 - plain).abs().mean() / plain.abs().mean()) < 0.1
