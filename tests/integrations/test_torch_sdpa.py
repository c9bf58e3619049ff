"""The registration, on the CPU: PyTorch has no CPU kernels of these operators, so tests bring some.

`torch_sdpa._hold("CPU", ...)` is what `register()` does for "CUDA".
"""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from tests.integrations import torch_sdpa_spec as spec
from tests.integrations.torch_sdpa_cases import (
    BOTTOM,
    CAUSAL,
    DENSE,
    PACKED,
    SdpaCase,
    arguments,
    seeded,
)

from tileloom import emulator
from tileloom.errors import OptionError, UnsupportedError
from tileloom.integrations import torch_sdpa
from tileloom.ops import record_choices

FORWARD = torch.ops.aten._efficient_attention_forward
SMALL = SdpaCase("small", (1, 5, 6, 2, 8, 8))
MARK = 7.0
# PyTorch's own formula for the gradient leaves the window out.
_DIFFERENTIABLE = [case for case in (*DENSE, *PACKED) if "window_size" not in case.options]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture
def originals():
    """Kernels that stand for PyTorch's own: they mark their results, and note their arguments."""
    seen = []

    def forward(query, key, value, *args, **kwargs):
        seen.append((len(args), kwargs))
        if query.dim() != 4:
            raise RuntimeError("the original refuses this")
        batch, rows, heads, _ = query.shape
        out = query.new_full((batch, rows, heads, value.shape[3]), MARK)
        lse = torch.zeros((batch, heads, -(-rows // 32) * 32))
        state = torch.zeros((), dtype=torch.int64)
        return out, lse, state, state.clone(), rows, key.shape[1]

    def backward(grad_out, query, key, value, *args, **kwargs):
        seen.append((len(args), kwargs))
        return (*(torch.full_like(t, MARK) for t in (query, key, value)), None)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", forward, "CPU")
    library.impl("_efficient_attention_backward", backward, "CPU")
    yield seen
    torch_sdpa.unregister()
    library._destroy()


def call(tensors, **options):
    positional, rest = arguments(tensors, **options)
    return FORWARD(*positional, **rest)


def is_ours():
    return not bool((call(SMALL.tensors())[0] == MARK).all())


def hold(*, float32=True):
    return torch_sdpa._hold("CPU", float32=float32)


@pytest.mark.usefixtures("originals")
@pytest.mark.parametrize("case", _DIFFERENTIABLE, ids=lambda case: case.id)
def test_outputs_and_gradients_of_the_operator_are_right(case):
    leaves = tuple(t.detach().clone().requires_grad_() for t in case.tensors())
    before = torch_sdpa.calls()
    with hold(), record_choices() as choices:
        results = call(leaves, **case.packing(), **case.options)
        grads = torch.autograd.grad(results[0], leaves, case.upstream())
    after = torch_sdpa.calls()
    assert (after.forward, after.backward) == (before.forward + 1, before.backward + 1)
    assert after.refused == before.refused
    names = ["attention_varlen", "attention_varlen_bwd"]
    names = names if case.lengths else ["attention", "attention_bwd"]
    assert [choice.op for choice in choices] == names
    tensors = tuple(t.detach() for t in leaves)
    options = seeded(case, results)
    spec.check_forward([t.detach() for t in results[:2]], tensors, **options)
    spec.check_gradients(grads, case.upstream(), tensors, **options)


@pytest.mark.usefixtures("originals")
def test_a_window_whose_gradient_pytorch_gets_wrong_warns():
    query, key, value = SMALL.tensors()
    options = {"custom_mask_type": 1, "window_size": 2}
    with hold():
        with pytest.warns(UserWarning, match="does not pass window_size on"):
            call((query.requires_grad_(), key, value), **options)
        with torch.no_grad():
            call((query, key, value), **options)


def test_without_a_registration_the_original_runs(originals):
    assert not is_ours()
    assert len(originals) == 1


def test_registering_without_cuda_kernels_is_refused_in_a_sentence():
    if torch.version.cuda:
        pytest.skip("this PyTorch has CUDA kernels")
    with pytest.raises(UnsupportedError) as error:
        torch_sdpa.register()
    assert str(error.value) == (
        f"register: this PyTorch ({torch.__version__}) has no CUDA kernel of "
        "aten::_efficient_attention_forward to replace (no kernel for CUDA for "
        "aten::_efficient_attention_forward). Try: a PyTorch that is built with CUDA, or call "
        "tileloom.attention, which needs no registration."
    )
    assert not torch_sdpa._overrides


@pytest.mark.usefixtures("originals")
def test_a_registration_ends_with_its_block():
    with hold() as registration:
        assert repr(registration) == "Registration(held)"
        assert is_ours()
    assert repr(registration) == "Registration(removed)"
    assert not is_ours()


@pytest.mark.usefixtures("originals")
def test_a_registration_ends_with_an_exception():
    with pytest.raises(KeyError), hold():
        raise KeyError
    assert not is_ours()


@pytest.mark.usefixtures("originals")
def test_registering_twice_needs_removing_twice_in_any_order():
    first, second = hold(), hold()
    first.remove()
    first.remove()
    assert is_ours()
    second.remove()
    assert not is_ours()
    with hold(), hold():
        assert is_ours()
    assert not is_ours()


@pytest.mark.usefixtures("originals")
def test_unregister_ends_all_holds():
    first, second = hold(), hold()
    torch_sdpa.unregister()
    assert not is_ours()
    assert repr(first) == "Registration(removed)"
    third = hold()
    first.remove()
    second.remove()
    assert is_ours()
    third.remove()
    assert not is_ours()
    torch_sdpa.unregister()


@pytest.mark.usefixtures("originals")
def test_a_kernel_that_somebody_registered_before_is_given_back():
    theirs = torch.library.Library("aten", "IMPL")
    theirs.impl(
        "_efficient_attention_forward", lambda *args, **kwargs: (None,) * 4 + (11, 12), "CPU",
        allow_override=True,
    )  # fmt: skip
    with hold():
        assert is_ours()
    assert call(SMALL.tensors())[4:] == (11, 12)
    theirs._destroy()
    assert not is_ours()


def test_what_is_refused_reaches_the_original_unchanged(originals, caplog):
    before = torch_sdpa.calls()
    with hold(), caplog.at_level(logging.INFO, "tileloom.torch_sdpa"):
        lengths = torch.tensor([6], dtype=torch.int32)
        results = call(SMALL.tensors(), seqlen_k=lengths, scale=0.5)
    assert bool((results[0] == MARK).all())
    count, kwargs = originals[-1]
    assert count == 8
    assert set(kwargs) == {"seqlen_k", "scale"}
    assert kwargs["seqlen_k"] is lengths or torch.equal(kwargs["seqlen_k"], lengths)
    after = torch_sdpa.calls()
    assert (after.forward, after.backward) == (before.forward, before.backward)
    reason = "seqlen_k is given without cu_seqlens_k; PyTorch's kernel ignores it there"
    name = f"_efficient_attention_forward: {reason}"
    assert after.refused[name] == before.refused.get(name, 0) + 1
    assert (
        f"aten::_efficient_attention_forward: PyTorch's own kernel runs, because {reason}"
        in caplog.messages
    )


def test_an_import_registers_nothing_and_a_registration_is_logged_if_the_variable_says_so():
    code = (
        "import sys, torch; from tileloom.integrations import torch_sdpa; "
        "assert not torch_sdpa._overrides; assert 'triton' not in sys.modules; "
        "library = torch.library.Library('aten', 'IMPL'); names = torch_sdpa.KERNELS; "
        "[library.impl(name, lambda *a, **k: None, 'CPU') for name in names]; "
        "torch_sdpa._hold('CPU', float32=False).remove()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TILELOOM_LOGS"] = "torch_sdpa"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, timeout=120, text=True,
        capture_output=True,
    ).stderr  # fmt: skip
    assert "[tileloom.torch_sdpa] registered for CPU, over " in shown
    assert "[tileloom.torch_sdpa] removed" in shown


@pytest.mark.usefixtures("originals")
def test_float32_goes_to_the_original_unless_it_is_asked_for():
    tensors = [t.float() for t in SMALL.tensors()]
    leaves = tuple(t.requires_grad_() for t in tensors)
    before = torch_sdpa.calls()
    with hold(float32=False):
        out = call(leaves)[0]
        grads = torch.autograd.grad(out, leaves, SMALL.upstream().float())
        assert is_ours()
    assert bool((out == MARK).all())
    assert all(bool((grad == MARK).all()) for grad in grads)
    after = torch_sdpa.calls()
    for name in torch_sdpa.KERNELS:
        reason = (
            f"{name}: float32, which PyTorch's own kernel computes faster; "
            "register(float32=True) has tileloom's"
        )
        assert after.refused[reason] == before.refused.get(reason, 0) + 1
    with hold(float32=True):
        assert not bool((call(leaves)[0] == MARK).all())


@pytest.mark.usefixtures("originals")
def test_registering_with_another_option_is_refused_in_a_sentence():
    with hold(float32=False), pytest.raises(OptionError) as error:
        hold(float32=True)
    assert str(error.value) == (
        "register: float32 is True, and it is registered with False. Try: remove that "
        "registration first, or give the same."
    )
    with pytest.raises(OptionError) as error:
        hold(float32=1)
    assert str(error.value) == "register: float32 is 1; it must be True or False."
    assert not is_ours()


@pytest.mark.usefixtures("originals")
def test_a_malformed_call_gets_the_originals_own_words():
    query, key, value = SMALL.tensors()
    with hold(), pytest.raises(RuntimeError, match="the original refuses this"):
        call((query[0], key, value))


@pytest.mark.usefixtures("originals")
def test_a_backward_after_a_forward_of_the_other_kernel_is_right():
    """A hold may begin or end between the two."""
    tensors = SMALL.tensors()
    leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
    with hold():
        out = call(leaves)[0]
    grads = torch.autograd.grad(out, leaves, SMALL.upstream())
    assert all(bool((grad == MARK).all()) for grad in grads)


@pytest.mark.usefixtures("originals")
def test_threads_may_register_and_call_at_once():
    wrong: list[object] = []
    tensors = SMALL.tensors()
    with hold():
        want = call(tensors)[0]
        taken = torch_sdpa.calls().forward

        def work():
            try:
                for _ in range(20):
                    with hold():
                        if not torch.equal(call(tensors)[0], want):
                            wrong.append("another result")
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert torch_sdpa.calls().forward == taken + 120
        assert is_ours()
    assert not is_ours()


@pytest.mark.usefixtures("originals")
def test_compiled_functions_call_whatever_is_registered_when_they_run():
    tensors = SMALL.tensors()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value):
        return FORWARD(query, key, value, None, None, None, None, None, 0.0, 0, True)[0] + 1.0

    assert bool((compiled(*tensors) == MARK + 1).all())
    with hold():
        out = compiled(*tensors) - 1.0
        assert torch.allclose(out, call(tensors)[0], atol=2e-3)
    assert bool((compiled(*tensors) == MARK + 1).all())


@pytest.mark.usefixtures("originals")
@pytest.mark.parametrize("layout", ["bmhk", "bhmk", "packed"])
def test_what_a_compiler_expects_of_the_outputs_is_what_they_are(layout):
    case = SdpaCase("meta", (2, 40, 40, 3, 16, 16), layout=layout)
    tensors = case.tensors()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        expected = call(fakes, custom_mask_type=1)
    with hold():
        results = call(tensors, custom_mask_type=1)
    for real, fake in zip(results[:2], expected[:2]):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert results[4:] == expected[4:]


_EMULATED = [
    (SdpaCase("M1", (1, 90, 70, 2, 64, 64), layout="bhmk", options=BOTTOM), "gluon_sm90"),
    (SdpaCase("bias", (1, 20, 37, 2, 16, 16), bias="full", options=CAUSAL), None),
    (SdpaCase("float32", (1, 20, 20, 1, 16, 16), torch.float32, layout="packed"), "triton"),
]


@pytest.mark.usefixtures("originals")
@pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning")
@pytest.mark.parametrize(("case", "backend"), _EMULATED, ids=lambda x: getattr(x, "id", ""))
def test_the_kernels_compute_the_operators_under_the_emulator(case, backend):
    leaves = tuple(t.detach().clone().requires_grad_() for t in case.tensors())
    with hold(), emulator.run(sms=2) as run, record_choices() as choices:
        results = call(leaves, **case.options)
        grads = torch.autograd.grad(results[0], leaves, case.upstream())
    assert "reference" not in [choice.backend for choice in choices]
    assert backend is None or choices[0].backend == backend
    assert [r.text() for r in run.reports if r.severity != "info"] == []
    tensors = tuple(t.detach() for t in leaves)
    spec.check_forward([t.detach() for t in results[:2]], tensors, **case.options)
    spec.check_gradients(grads, case.upstream(), tensors, **case.options)
