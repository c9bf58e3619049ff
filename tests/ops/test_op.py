"""The machinery that operators share: the short way round PyTorch's dispatcher means the same."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tileloom.errors import GradientError
from tileloom.ops import _op, record_choices

_names = itertools.count()


def _cube() -> _op.Operator:
    """x^3 with a gradient, under a new name each time: names cannot be registered twice."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad, None

    return _op.register(
        f"test_cube_{next(_names)}(Tensor x, float scale) -> Tensor",
        lambda x, scale: x**3 * scale,
        lambda x, scale: torch.empty_like(x),
        setup_context=setup_context,
        backward=backward,
    )


@pytest.fixture(params=[False, True], ids=["dispatcher", "short way"])
def way(request, monkeypatch):
    monkeypatch.setattr(_op, "is_eager", lambda args: request.param)


@pytest.mark.usefixtures("way")
def test_values_and_gradients_are_those_of_the_formula():
    op = _cube()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = op(x, 1.0)
    y.backward(torch.tensor([1.0, 10.0]))
    assert y.tolist() == [1.0, 8.0]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 120.0]
    with torch.no_grad():
        assert not op(x, 2.0).requires_grad


@pytest.mark.usefixtures("way")
def test_a_backward_in_another_thread_reports_to_those_who_watched_its_forward():
    seen = []

    def backward(ctx, grad):
        seen.append(_op.is_watched())
        return grad

    op = _op.register(
        f"test_seen_{next(_names)}(Tensor x) -> Tensor",
        lambda x: x.clone(),
        torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=backward,
    )
    x = torch.ones(1, requires_grad=True)
    with record_choices():
        watched = op(x)
    for y in (watched, op(x)):
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert seen == [True, False]


@pytest.mark.usefixtures("way")
def test_a_refused_gradient_raises_its_sentence():
    schema = f"test_stuck_{next(_names)}(Tensor x) -> Tensor"
    op = _op.register(schema, torch.neg, torch.empty_like, no_gradient="test: no gradient.")
    assert op(torch.ones(2)).tolist() == [-1.0, -1.0]
    with pytest.raises(GradientError, match="test: no gradient"):
        op(torch.ones(2, requires_grad=True))


def test_gradients_by_torch_func_are_refused_by_a_sentence():
    op = _cube()
    text = r"^test_cube_\d+: it is called under torch\.func\.grad.*Try: torch\.autograd\.grad"
    x = torch.ones(2)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(GradientError, match=text):
            transform(lambda t: op(t, 1.0).sum())(x)
    with pytest.raises(GradientError, match=text):
        torch.func.vjp(lambda t: op(t, 1.0), x)
    unseen = torch.func.grad(lambda t: (t * op(x, 1.0)).sum())(x)  # nothing of it is differentiated
    assert unseen.tolist() == [1.0, 1.0]


class _OnGpu(torch.Tensor):
    pass


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_short_way_is_for_gpu_tensors():
    assert not _op.is_eager((torch.ones(1),))


@pytest.mark.gpu
def test_the_short_way_is_left_when_somebody_watches():
    x = torch.ones(2, device="cuda")
    assert _op.is_eager((x, None, 1.0, "a", torch.nn.Parameter(x)))
    assert not _op.is_eager((x, x.as_subclass(_OnGpu)))
    assert not _op.is_eager((x, torch.ones(2, device="cuda", dtype=torch.complex64).conj().imag))
    with _Watching():
        assert not _op.is_eager((x,))
    with record_choices():
        assert not _op.is_eager((x,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not _op.is_eager((x,))
    with torch.autograd.forward_ad.dual_level():
        assert not _op.is_eager((x,))
    inside = []
    torch.vmap(lambda t: (inside.append(_op.is_eager((t,))), t)[1])(x)
    assert inside == [False]
    assert _op.is_eager((x,))
