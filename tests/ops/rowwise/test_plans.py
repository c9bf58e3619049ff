"""The table of plans: what a key depends on, how large the table grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tileloom.ops.rowwise.norm.calls as norm_calls
import tileloom.ops.rowwise.swiglu.api as swiglu_api
from tileloom import emulator
from tileloom.errors import DtypeError, OptionError, ShapeError
from tileloom.ops import _plans
from tileloom.ops._plans import Launch, Plans, is_short, layout_key, plan_key
from tileloom.ops.rowwise.config import ReferenceConfig
from tileloom.ops.rowwise.layer_norm import layer_norm
from tileloom.ops.rowwise.rms_norm import rms_norm
from tileloom.ops.rowwise.swiglu import swiglu


def test_a_key_tells_apart_what_a_plan_depends_on():
    x = torch.empty(4, 6)
    others = [torch.empty(6, 4), x.half(), x.t().contiguous().t(), x[:, :5]]
    others += [x[:1, :1].expand(4, 6), torch.empty(25)[1:].view(4, 6)]
    keys = {layout_key(t) for t in (x, None, *others)}
    assert len(keys) == 8
    assert layout_key(torch.empty(4, 6)) == layout_key(x)


def test_what_is_no_tensor_has_no_plan():
    x = torch.zeros(3)
    plans: Plans[int] = Plans()
    for wrong in ([1.0], "x"):
        key = plan_key((x, wrong), 1.0)  # pyright: ignore[reportArgumentType]
        assert key is None
        assert plans.get(key) is None
    assert plans.get(plan_key((x,), [1.0])) is None  # pyright: ignore[reportArgumentType]


def test_the_table_is_bounded():
    plans: Plans[int] = Plans(most=100)
    for n in range(10_000):
        assert plans.put((n,), n) == n
        assert plans.get((n,)) == n
    assert len(plans) <= 100


class _Recorder:
    """Stands for a launcher, and for what it binds."""

    def __init__(self):
        self.given = []

    def bind(self, grid, *arguments):
        return self

    def launch(self, *tensors):
        self.given.append(tensors)


@pytest.mark.parametrize("has_two", [False, True])
def test_a_launch_gives_the_tensors_that_are_there(has_two, monkeypatch):
    """Also where one is there alone, of any size."""
    recorder = _Recorder()
    monkeypatch.setattr(_plans, "launcher", lambda *options: recorder)
    launch = Launch(None, 1, 1, (3.0,))
    x, y = torch.zeros(3), torch.zeros(3) if has_two else None
    for _ in range(2):
        launch(x, None, y)
    there = [x, y] if has_two else [x]
    assert [list(map(id, tensors)) for tensors in recorder.given] == [list(map(id, there))] * 2


def test_calls_on_the_cpu_do_not_go_short():
    assert not is_short((torch.ones(2), None))
    assert not is_short(([1.0],))


class _Counted:
    """A function, and how often it was called."""

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.fixture
def short(monkeypatch):
    """Calls go straight to their plans, as on a GPU; gives the counted checks of the norms."""
    monkeypatch.setattr(norm_calls, "is_eager", lambda tensors: True)
    monkeypatch.setattr(norm_calls, "forward_plans", Plans())
    counted = _Counted(norm_calls.check)
    monkeypatch.setattr(norm_calls, "check", counted)
    with emulator.run():
        yield counted


def test_a_norm_is_checked_once_for_each_kind_of_call(short):
    x, w = torch.randn(3, 40), torch.randn(40)
    for _ in range(3):
        torch.testing.assert_close(rms_norm(x, w), torch.nn.functional.rms_norm(x, (40,), w))
    assert short.calls == 1
    different = [
        lambda: rms_norm(x, w, eps=1e-3),
        lambda: rms_norm(x),
        lambda: rms_norm(x[:2], w),
        lambda: rms_norm(x, w, residual=x)[1],
        lambda: rms_norm(x.half(), w),
        lambda: rms_norm(x, w, config=ReferenceConfig()),
        lambda: layer_norm(x, w, eps=1e-5),
    ]
    for count, call in enumerate(different, 2):
        for _ in range(2):
            call()
        assert short.calls == count


def test_a_wrong_call_beside_a_kept_plan_is_refused(short):
    x, w = torch.randn(3, 40), torch.randn(40)
    rms_norm(x, w)
    for wrong, error in (
        (lambda: rms_norm(x, w[:30]), ShapeError),
        (lambda: rms_norm(x, w, eps=float("nan")), OptionError),
        (lambda: rms_norm(x, w, eps=[1e-5]), OptionError),
        (lambda: rms_norm(x, [1.0]), DtypeError),
        (lambda: rms_norm(x, w.int()), DtypeError),
        (lambda: rms_norm(x, w, config="triton"), OptionError),
    ):
        with pytest.raises(error):
            wrong()
    assert short.calls == 7
    rms_norm(x, w)
    assert short.calls == 7


def test_swiglu_keeps_its_plans(monkeypatch):
    monkeypatch.setattr(swiglu_api, "is_short", lambda tensors: True)
    plans: Plans[Any] = Plans()
    monkeypatch.setattr(swiglu_api, "forward_plans", plans)
    gate, up = torch.randn(3, 80).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    with emulator.run() as run:
        first = swiglu(gate, up)
        plans.put(plan_key((gate, up), ""), swiglu_api.forward_plan(gate, up, ""))
        monkeypatch.setattr(swiglu_api, "check_rows", None)  # not called again
        second = swiglu(gate, up)
    assert len(run.launches) == 2
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected)
