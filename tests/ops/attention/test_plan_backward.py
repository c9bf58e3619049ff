"""What a backward of attention comes to is kept: by all it depends on, and no tensor with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.ops.attention import cases, gradients
from tests.ops.attention.cases import BF16, AttentionCase

import tileloom
from tileloom import masks
from tileloom.ops import _op
from tileloom.ops.attention import plan_backward
from tileloom.ops.attention.config import ReferenceConfig
from tileloom.ops.attention.config_backward import TritonBackwardConfig

SHAPE = (2, 4, 64, 32)
_NAMES = ("dout", "dlse", "q", "k", "v", "out", "lse", "mask", "bias", "lengths")


def _given(**changes):
    """The tensors of a backward and the rest of the call, some of them changed."""
    tensors = dict.fromkeys(_NAMES)
    for name in ("dout", "q", "k", "v", "out"):
        tensors[name] = torch.zeros(SHAPE)
    tensors["lse"] = torch.zeros(SHAPE[:3])
    rest = {"right": 0, "scale": 0.5, "needs_q": True, "config": ""}
    tensors |= {n: t for n, t in changes.items() if n in _NAMES}
    rest |= {n: x for n, x in changes.items() if n not in _NAMES}
    return tuple(tensors.values()), tuple(rest.values())


def _key(**changes):
    tensors, rest = _given(**changes)
    return plan_backward.key_of(tensors, *rest)


def _unaligned(*shape):
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1)[1:].view(shape)


DIFFERENT = {
    **{f"{n} unaligned": {n: _unaligned(*SHAPE)} for n in ("dout", "q", "k", "v", "out")},
    "dout of a sum": {"dout": torch.zeros(1).expand(SHAPE)},
    "a gradient of LSE": {"dlse": torch.zeros(SHAPE[:3])},
    "one with strides": {"dlse": torch.zeros(2, 64, 4).transpose(1, 2)},
    "grouped heads": {"k": torch.zeros(2, 2, 64, 32)},
    "dtype": {"q": torch.zeros(SHAPE, dtype=torch.bfloat16)},
    "a mask": {"mask": torch.ones(64, 64, dtype=torch.bool)},
    "a bias": {"bias": torch.zeros(64, 64)},
    "a bias of one row": {"bias": torch.zeros(1, 64)},
    "lengths": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "no band": {"right": None},
    "scale": {"scale": 0.25},
    "no dq": {"needs_q": False},
    "config": {"config": "reference"},
}


def test_what_differs_has_another_key():
    assert _key() == _key()
    keys = {name: _key(**changes) for name, changes in DIFFERENT.items()}
    keys["nothing"] = _key()
    assert len(set(keys.values())) == len(keys)


def test_deterministic_algorithms_have_a_plan_of_their_own():
    before = _key()
    torch.use_deterministic_algorithms(True)
    try:
        assert _key() != before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_key_holds_no_tensor():
    tensors, rest = _given(bias=torch.zeros(64, 64), dlse=torch.zeros(SHAPE[:3]))
    alive = [weakref.ref(t) for t in tensors if t is not None]
    key = plan_backward.key_of(tensors, *rest)
    del tensors
    gc.collect()
    assert key
    assert [ref() for ref in alive] == [None] * 8


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plan_backward, "_plans", {})
    for number in range(3 * plan_backward.LIMIT):
        plan_backward.keep(number, None)  # type: ignore[arg-type]
        assert plan_backward._plans
    assert len(plan_backward._plans) <= plan_backward.LIMIT


# On a GPU

_CAUSAL = {"is_causal": True}


def _case(name, sizes=(2, 4, 2, 300, 300, 64, 64), dtype=BF16, **fields):
    return AttentionCase(name, sizes, dtype, **fields)


def _calls():
    bias = {"bias": cases.added((300, 300))}
    return [
        _case("full"),
        _case("causal", options=_CAUSAL),
        _case("bias", **bias),
        _case("window", mask=cases.shown_by(masks.window(5, 7))),
        _case("lengths", mask=cases.lengths(100, 300, dtype=torch.int32)),
        _case("scale", options={"scale": 0.5}),
        _case("rows", sizes=(2, 4, 2, 77, 300, 64, 64)),
        _case("fp16", dtype=torch.float16),
        _case("d128", sizes=(1, 2, 2, 130, 300, 128, 128)),
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning")  # a bias
@pytest.mark.parametrize("config", [None, TritonBackwardConfig(), ReferenceConfig()])
def test_calls_in_turn_keep_their_own_plans(config):
    given = [case.inputs("cuda") for case in _calls()]
    upstreams = [gradients.upstream(one, with_lse=i % 2 == 0) for i, one in enumerate(given)]
    for turn in range(4):
        for one, upstream in zip(given, upstreams):
            results = gradients.of_attention(one, upstream, backward_config=config)
            if turn in (0, 3):
                gradients.check(one, upstream, results)


@pytest.mark.gpu
def test_what_is_asked_for_changes_in_turn():
    inputs = _case("some").inputs("cuda")
    for _ in range(4):
        for wanted in ("qkv", "q", "kv", "v"):
            own = {n: getattr(inputs, n).detach().requires_grad_(n in wanted) for n in "qkv"}
            out = tileloom.attention(*own.values())
            got = torch.autograd.grad(out.sum(), [own[n] for n in wanted])
            dense = torch.autograd.grad(
                tileloom.attention(*own.values()), [own[n] for n in wanted], torch.ones_like(out)
            )
            for name, a, b in zip(wanted, got, dense):
                assert torch.equal(a, b) or name == "q"  # added up in no fixed order
                assert (a - b).abs().max() < 0.02


@pytest.mark.gpu
def test_every_backward_is_recorded():
    inputs = _case("recorded").inputs("cuda")
    given = gradients.upstream(inputs)
    for _ in range(3):
        gradients.of_attention(inputs, given)
    with _op.record_choices() as made:
        for _ in range(3):
            gradients.of_attention(inputs, given)
    assert [c.op for c in made] == ["attention", "attention_bwd"] * 3


@pytest.mark.gpu
def test_no_tensor_is_held_by_a_plan():
    inputs = _case("held").inputs("cuda")
    given = gradients.upstream(inputs)
    for _ in range(3):
        gradients.of_attention(inputs, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    other = _case("held").inputs("cuda")
    upstream = gradients.upstream(other)
    for _ in range(3):
        gradients.of_attention(other, upstream)
    del other, upstream
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
