"""What `cross_entropy` promises besides its values: errors, dispatch, gradients in place."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.ops.rowwise.cross_entropy import cases
from torch.autograd import forward_ad

from tileloom import emulator, knobs
from tileloom.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    GradientError,
    OptionError,
    ShapeError,
    UnknownOptionError,
)
from tileloom.ops import record_choices
from tileloom.ops.rowwise.config import TritonConfig
from tileloom.ops.rowwise.cross_entropy import cross_entropy, cross_entropy_reference
from tileloom.ops.rowwise.cross_entropy.config import choose, cross_entropy_rule
from tileloom.ops.rowwise.cross_entropy.problem import Options, forward_problem
from tileloom.target import H100

X = torch.zeros(2, 3, 8)
T = torch.zeros(2, 3, dtype=torch.int64)
_NAMES = "label_smoothing, ignore_index, soft_cap, reduction, inplace_backward, config"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cross_entropy([1.0], T), DtypeError,
         "cross_entropy: logits is a list; it must be a torch.Tensor. Try: "
         "torch.as_tensor(logits)."),
        (lambda: cross_entropy(X, [1, 2]), DtypeError,
         "cross_entropy: labels is a list; it must be a torch.Tensor. Try: "
         "torch.as_tensor(labels)."),
        (lambda: cross_entropy(X, T.short()), DtypeError,
         "cross_entropy: labels has dtype torch.int16; supported: torch.int32, torch.int64. Try: "
         "labels.to(torch.int64)."),
        (lambda: cross_entropy(X, X), DtypeError,
         "cross_entropy: labels has dtype torch.float32; supported: torch.int32, torch.int64. Try: "
         "labels.argmax(-1); there are no labels of probabilities."),
        (lambda: cross_entropy(X, T.flatten()), ShapeError,
         "cross_entropy: labels has shape (6,), logits have (2, 3, 8); labels must have shape "
         "(2, 3), and the classes lie in the last dimension. Try: "
         "labels.reshape(logits.shape[:-1])."),
        (lambda: cross_entropy(X, T[:, :2]), ShapeError,
         "cross_entropy: labels has shape (2, 2), logits have (2, 3, 8); labels must have shape "
         "(2, 3), and the classes lie in the last dimension. Try: slice both alike: "
         "logits[:, :-1] goes with labels[:, 1:]."),
        (lambda: cross_entropy(X.transpose(1, 2), T), ShapeError,
         "cross_entropy: labels has shape (2, 3), logits have (2, 8, 3); labels must have shape "
         "(2, 8), and the classes lie in the last dimension. Try: logits.movedim(1, -1), as "
         "torch.nn.functional.cross_entropy has them second."),
        (lambda: cross_entropy(X, T.to("meta")), DeviceError,
         "cross_entropy: labels is on meta, logits on cpu; they must be on the same device. Try: "
         "labels.to(logits.device)."),
        (lambda: cross_entropy(X, T, label_smoothing=1.5), OptionError,
         "cross_entropy: label_smoothing is 1.5; it must be a number in 0.0 .. 1.0. Try: "
         "label_smoothing=0.1."),
        (lambda: cross_entropy(X, T, ignore_index=2**63), OptionError,
         "cross_entropy: ignore_index is 9223372036854775808; it must be an integer of 64 bits. "
         "Try: ignore_index=-100."),
        (lambda: cross_entropy(X, T, soft_cap=0.0), OptionError,
         "cross_entropy: soft_cap is 0.0; it must be None or a number in 1e-6 .. 1e6. Try: "
         "soft_cap=None for none, or 30.0."),
        (lambda: cross_entropy(X, T, reduction="avg"), OptionError,
         "cross_entropy: reduction is 'avg'; it must be one of 'mean', 'sum', 'none'. Try: "
         "reduction='mean'."),
        (lambda: cross_entropy(X, T, inplace_backward=1), OptionError,
         "cross_entropy: inplace_backward is 1; it must be True or False."),
        (lambda: cross_entropy(torch.zeros(1, 3, 8).expand(2, 3, 8), T, inplace_backward=True),
         OptionError,
         "cross_entropy: inplace_backward=True, and logits of shape (2, 3, 8) have strides "
         "(0, 8, 1): elements share memory, so that no gradient can be written over them. Try: "
         "inplace_backward=False."),
        (lambda: cross_entropy(torch.zeros(12).unfold(0, 8, 2), T[0], inplace_backward=True),
         OptionError,
         "cross_entropy: inplace_backward=True, and logits of shape (3, 8) have strides "
         "(2, 1): elements share memory, so that no gradient can be written over them. Try: "
         "inplace_backward=False."),
        (lambda: cross_entropy(X, T, config=1), OptionError,
         "cross_entropy: config is a int; it must be one of ReferenceConfig, TritonConfig, or "
         "None."),
        (lambda: cross_entropy(X, T, weight=None), UnknownOptionError,
         f"cross_entropy: there is no option 'weight'; options: {_NAMES}. Try: reduction='none' "
         "and a product with weight[labels]: there are no class weights."),
        (lambda: cross_entropy(X, T, softcap=1.0), UnknownOptionError,
         f"cross_entropy: there is no option 'softcap'; options: {_NAMES}. Try: soft_cap=."),
        (lambda: cross_entropy(X, T, ignore_idx=1), UnknownOptionError,
         f"cross_entropy: there is no option 'ignore_idx'; options: {_NAMES}. Try: ignore_index=."),
    ],
)  # fmt: skip
def test_a_wrong_call_gets_a_sentence(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(3, 0, 8).transpose(0, 2).transpose(0, 1), torch.zeros(2, 3, 0).expand(4, 2, 3, 0),
     torch.zeros(8, 3, 2).permute(2, 1, 0), torch.zeros(2, 4, 9)[:, ::2, 1:]],
)  # fmt: skip
def test_the_gradient_is_written_over_any_logits_that_share_no_memory(logits):
    logits = logits.requires_grad_() * 1
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    cross_entropy(logits, labels, reduction="sum", inplace_backward=True).backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_follows_the_check_of_shared_memory(dynamic):
    def loss(x):
        return cross_entropy((x * 1)[:, :-1], T[:, :-1], reduction="sum", inplace_backward=True)

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x, y = (X.clone().requires_grad_() for _ in range(2))
    compiled(x).backward()
    loss(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_labels_out_of_range_are_named_in_debug_mode():
    labels = torch.tensor([[0, 1, -100], [7, 8, -3]])
    assert cross_entropy(X, labels).isnan()
    with knobs.scope({"debug.labels": True}):
        with pytest.raises(OptionError) as caught:
            cross_entropy(X, labels)
        assert cross_entropy(X, labels.clamp(-100, 7).where(labels != -3, 7)) > 0
    assert str(caught.value) == (
        "cross_entropy: labels[1, 1] is 8; a label must be in 0 .. 7 or ignore_index=-100 "
        "(2 of 6 labels are not). Try: compare the tokenizer's vocabulary with the logits' last "
        "dimension."
    )


def test_a_config_that_cannot_run_says_why():
    with pytest.raises(ConfigError, match="the tensors are on the CPU"):
        cross_entropy(X, T, config=TritonConfig())


@pytest.mark.parametrize("dtype", [cases.FP16, cases.BF16, cases.FP32])
@pytest.mark.parametrize("width", [0, 1, 7, 100, 4096, 32000, 50257, 2**20])
def test_the_rule_gives_tiles_that_run_for_every_width(width, dtype):
    logits = torch.empty((3, width), dtype=dtype, device="meta")
    labels = torch.empty((3,), dtype=torch.int64, device="meta")
    problem = forward_problem(logits, labels, Options(0.0, -100, 0.0, "mean"))
    config = cross_entropy_rule(problem, H100)
    assert config.forward is not None
    assert config.backward is not None
    assert config.reasons_against(problem, H100) == ()
    assert choose(problem, H100).backend == "triton"


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("case", [*cases.ONE_BLOCK, cases.WALKED[1]], ids=lambda case: case.id)
def test_the_cpu_takes_the_reference(case, inplace):
    inputs = case.inputs()
    with record_choices() as made:
        loss, grad = cases.run(inputs, inplace=inplace)
    assert [choice.backend for choice in made] == ["reference"] * 2
    cases.check(inputs, loss, grad)


@pytest.mark.parametrize("options", [{}, cases.ALL], ids=["plain", "all"])
def test_gradcheck(options):
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (3, 4))
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, labels, **options), (logits,))


def test_a_second_gradient_is_refused():
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 2, 3]))
    with pytest.raises(GradientError, match="cross_entropy: a gradient of its gradient"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_forward_mode_derivative_is_refused():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(3, 7), torch.randn(3, 7))
        with pytest.raises(
            GradientError, match="cross_entropy: a forward-mode derivative is asked for"
        ):
            cross_entropy(dual, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("on_the_emulator", [False, True])
@pytest.mark.parametrize("ignore_index", [2**32 + 3, -(2**32) + 3])
def test_int32_labels_are_not_compared_modulo_2_32(ignore_index, on_the_emulator):
    labels = torch.tensor([3, 1, 3, 0])
    results = []
    for given in (labels, labels.int()):
        logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with emulator.run() if on_the_emulator else contextlib.nullcontext():
            loss = cross_entropy(logits, given, ignore_index=ignore_index)
            loss.backward()
        results.append((loss.detach(), logits.grad))
    assert results[0][0].isfinite()
    torch.testing.assert_close(*results)


def test_autocast_leaves_it_alone():
    logits = torch.randn(3, 70)
    labels = torch.tensor([1, 2, 69])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(logits, labels)
        half = cross_entropy(logits.bfloat16(), labels)
    assert loss.dtype == half.dtype == torch.float32
    assert torch.equal(loss, cross_entropy_reference(logits, labels))


class TestInPlace:
    """The gradient written over the logits, and who notices."""

    def test_the_model_before_the_logits_gets_its_gradient(self):
        x = torch.randn(6, 5, requires_grad=True)
        weight = torch.randn(5, 9)
        labels = torch.tensor([1, 2, 3, -100, 8, 0])
        grads = []
        for inplace in (False, True):
            loss = cross_entropy(x @ weight, labels, inplace_backward=inplace)
            grads += torch.autograd.grad(loss, x)
        assert torch.equal(*grads)

    def test_a_second_backward_gets_an_error(self):
        logits = torch.randn(3, 7, requires_grad=True) * 1
        loss = cross_entropy(logits, torch.tensor([1, 2, 3]), inplace_backward=True)
        loss.backward(retain_graph=True)
        with pytest.raises(GradientError) as caught:
            loss.backward()
        assert str(caught.value) == (
            "cross_entropy: the logits have been changed since the forward, and the gradient needs "
            "them. An earlier backward with inplace_backward=True overwrites them. Try: "
            "inplace_backward=False, or logits.clone() before they are changed."
        )

    def test_another_function_that_needs_the_logits_gets_an_error(self):
        logits = torch.randn(3, 7, requires_grad=True) * 1
        square = logits.square().sum()
        loss = cross_entropy(logits, torch.tensor([1, 2, 3]), inplace_backward=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()

    @pytest.mark.parametrize("inplace", [False, True])
    def test_logits_changed_before_the_backward_get_an_error(self, inplace):
        logits = torch.randn(3, 7, requires_grad=True) * 1
        loss = cross_entropy(logits, torch.tensor([1, 2, 3]), inplace_backward=inplace)
        with torch.no_grad():
            logits.zero_()
        with pytest.raises(GradientError, match="the logits have been changed"):
            loss.backward()

    def test_the_forward_leaves_the_logits_alone(self):
        logits = torch.randn(3, 7)
        before = logits.clone()
        with emulator.run():
            cross_entropy(logits, torch.tensor([1, 2, 3]), inplace_backward=True)
        assert torch.equal(logits, before)

    @pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[:, :-1], lambda t: t.view(6, 7)])
    @pytest.mark.parametrize("leaf", [torch.nn.Parameter, torch.Tensor.requires_grad_])
    def test_a_leaf_and_its_views_are_refused(self, leaf, cut):
        logits = cut(leaf(torch.randn(2, 3, 7)))
        labels = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        with pytest.raises(OptionError) as caught:
            cross_entropy(logits, labels, inplace_backward=True)
        assert str(caught.value) == (
            f"cross_entropy: inplace_backward=True, and logits of shape {tuple(logits.shape)} are "
            "a leaf that requires grad, or a view of one: the gradient would be written over its "
            "values. Try: inplace_backward=False, or logits that are the output of a layer."
        )
        with torch.no_grad():
            cross_entropy(logits, labels, inplace_backward=True)
        cross_entropy(logits * 1, labels, inplace_backward=True).backward()

    def test_the_schema_declares_it(self):
        schema = torch.ops.tileloom.cross_entropy_bwd_.default._schema
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        assert written == ["logits"]
