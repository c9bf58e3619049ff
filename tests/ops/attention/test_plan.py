"""What a call of attention comes to is kept: by everything it depends on, and no tensor with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.ops.attention import gradients
from tests.ops.attention.cases import BF16, AttentionCase

import tileloom
from tileloom import errors
from tileloom.ops import _counters as counters
from tileloom.ops import _op
from tileloom.ops.attention import api, plan
from tileloom.ops.attention.config import ReferenceConfig, TritonConfig
from tileloom.ops.attention.reference import attention_reference

SHAPE = (2, 4, 64, 32)


def call(**changes):
    """The arguments of `plan.key_of`, some of them changed."""
    q, k, v = torch.zeros((3, *SHAPE)).unbind(0)
    given = {"q": q, "k": k, "v": v, "mask": None, "bias": None, "key_lengths": None, "left": None,
             "right": 0, "scale": 0.5, "config": ""}  # fmt: skip
    return list((given | changes).values())


def test_the_same_call_has_the_same_key():
    assert plan.key_of(*call()) == plan.key_of(*call())
    assert hash(plan.key_of(*call())) == hash(plan.key_of(*call()))


def _unaligned(*shape):
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1)[1:].view(shape)


DIFFERENT = {
    "length": {"k": torch.zeros(2, 4, 65, 32), "v": torch.zeros(2, 4, 65, 32)},
    "grouped heads": {"k": torch.zeros(2, 2, 64, 32)},
    "dtype": {"q": torch.zeros(SHAPE, dtype=torch.bfloat16)},
    "k of another dtype": {"k": torch.zeros(SHAPE, dtype=torch.float64)},
    "strides": {"q": torch.zeros(2, 64, 4, 32).transpose(1, 2)},
    "alignment": {"v": _unaligned(*SHAPE)},
    "alignment of another": {"k": _unaligned(*SHAPE)},
    "a mask": {"mask": torch.ones(64, 64, dtype=torch.bool)},
    "a mask of one row": {"mask": torch.ones(1, 64, dtype=torch.bool)},
    "a bias": {"bias": torch.zeros(64, 64)},
    "a bias of another dtype": {"bias": torch.zeros(64, 64, dtype=torch.float16)},
    "a bias with other strides": {"bias": torch.zeros(64, 64).T},
    "an unaligned bias": {"bias": _unaligned(64, 64)},
    "lengths": {"key_lengths": torch.zeros(2, dtype=torch.int32)},
    "lengths of 64 bits": {"key_lengths": torch.zeros(2, dtype=torch.int64)},
    "lengths with a stride": {"key_lengths": torch.zeros(4, dtype=torch.int32)[::2]},
    "no band": {"right": None},
    "another band": {"left": 3},
    "scale": {"scale": 0.25},
    "config": {"config": "reference"},
}


def test_what_differs_has_another_key():
    keys = {name: plan.key_of(*call(**changes)) for name, changes in DIFFERENT.items()}
    keys["nothing"] = plan.key_of(*call())
    assert len(set(keys.values())) == len(keys)


def test_a_key_holds_no_tensor():
    given = call(bias=torch.zeros(64, 64), mask=torch.ones(64, 64, dtype=torch.bool))
    alive = [weakref.ref(value) for value in given if isinstance(value, torch.Tensor)]
    key = plan.key_of(*given)
    del given
    gc.collect()
    assert key
    assert [ref() for ref in alive] == [None] * 5


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    for number in range(3 * plan.LIMIT):
        plan.keep(number, None)  # type: ignore[arg-type]
        assert plan._plans
    assert len(plan._plans) <= plan.LIMIT


def test_a_counter_on_the_cpu_is_a_zero():
    counter = counters.zero_counter(torch.ones(1))
    assert torch.equal(counter, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"config": TritonConfig(32, 64, 4, 1)}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_training_call_has_the_same_arguments_the_short_way(monkeypatch, is_causal, options):
    taken = []
    results = torch.zeros(1), torch.zeros(1)
    monkeypatch.setattr(api, "attention_fwd", lambda *given: taken.append(given) or results)
    q, k, v = (torch.zeros(SHAPE, requires_grad=True) for _ in range(3))
    tileloom.attention(q, k, v, is_causal=is_causal, **options)
    monkeypatch.setattr(plan, "is_eager", lambda tensors: True)
    monkeypatch.setattr(plan, "checked", lambda key: "a plan that is not run")
    tileloom.attention(q, k, v, is_causal=is_causal, **options)
    long, short = taken
    assert all(a is b for a, b in zip(long[:3], short[:3]))
    assert long[3:] == short[3:]


# On a GPU


@pytest.fixture
def qkv():
    device = torch.cuda.current_device()
    torch.manual_seed(2)
    return torch.randn((3, 2, 4, 300, 64), device=device).bfloat16().unbind(0)


def expected(qkv, **options):
    return attention_reference(*[t.double() for t in qkv], **options)


def close(out, wanted):
    """Whether it is the same computation at all; accuracy is tested elsewhere."""
    return (out.double() - wanted).abs().max() < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, TritonConfig(), ReferenceConfig()])
@pytest.mark.parametrize("is_causal", [False, True])
def test_later_calls_give_the_same_bits(qkv, config, is_causal):
    wanted = expected(qkv, is_causal=is_causal)
    with torch.no_grad():
        first = tileloom.attention(*qkv, is_causal=is_causal, config=config, return_lse=True)
        assert close(first[0], wanted)
        for _ in range(5):
            later = tileloom.attention(*qkv, is_causal=is_causal, config=config, return_lse=True)
            assert torch.equal(first[0], later[0])
            assert torch.equal(first[1], later[1])
            assert later[0].stride() == first[0].stride()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning")  # a bias, a mask
def test_calls_that_differ_do_not_share_a_plan(qkv):
    q, k, v = qkv
    device = q.device
    bias = torch.randn(300, 300, device=device)
    visible = bias > 0
    lengths = torch.tensor([100, 300], dtype=torch.int32, device=device)
    calls = [
        ({}, qkv),
        ({"is_causal": True}, qkv),
        ({"bias": bias}, qkv),
        ({"bias": bias.T}, qkv),
        ({"mask": visible}, qkv),
        ({"mask": tileloom.masks.key_lengths(lengths)}, qkv),
        ({"mask": tileloom.masks.window(5, 7)}, qkv),
        ({"scale": 0.5}, qkv),
        ({}, (q[:, :, :77], k, v)),
        ({}, (q, k[:, :2], v[:, :2])),
        ({}, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)),
        ({}, tuple(t.half() for t in qkv)),
    ]
    with torch.no_grad():
        wanted = [expected(tensors, **options) for options, tensors in calls]
        for _ in range(4):
            for (options, tensors), right in zip(calls, wanted):
                assert close(tileloom.attention(*tensors, **options), right), options


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [0, 1, 5])
def test_graphs_with_a_counter(qkv, warm):
    with torch.no_grad():
        tileloom.attention(*qkv, is_causal=True)  # compiled
        plan._plans.clear()
        for _ in range(warm):
            tileloom.attention(*qkv, is_causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tileloom.attention(*qkv, is_causal=True)
        for _ in range(3):
            for tensor in qkv:
                tensor.normal_()
            out.zero_()
            graph.replay()
            assert close(out, expected(qkv, is_causal=True))
            assert torch.equal(out, tileloom.attention(*qkv, is_causal=True))


@pytest.mark.gpu
def test_more_launches_than_counters(qkv):
    small = [t[:1, :1, :64] for t in qkv]
    with torch.no_grad():
        first = tileloom.attention(*small, is_causal=True)
        for _ in range(3 * counters._AT_ONCE):
            out = tileloom.attention(*small, is_causal=True)
    assert torch.equal(first, out)


@pytest.mark.gpu
def test_counters_on_several_streams(qkv):
    with torch.no_grad():
        wanted = tileloom.attention(*qkv, is_causal=True)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        found = []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(tileloom.attention(*qkv, is_causal=True))
        torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in found)


@pytest.mark.gpu
def test_a_call_that_was_right_does_not_excuse_a_wrong_one(qkv):
    q, k, v = qkv
    with torch.no_grad():
        for _ in range(3):
            tileloom.attention(q, k, v)
        for wrong, error in (
            ((q, k.cpu(), v), errors.DeviceError),
            ((q, k, v.half()), errors.DtypeError),
            ((q, k, v[:, :, :7]), errors.ShapeError),
            ((q, k, None), errors.DtypeError),
            ((q, k, 3), errors.DtypeError),
        ):
            with pytest.raises(error):
                tileloom.attention(*wrong)
        for option, value in (
            ("is_causal", 1), ("scale", "2"), ("config", "triton"), ("dropout_p", 2.0),
            ("scores", 1), ("mask", 1), ("bias", 1), ("unknown", 1),
        ):  # fmt: skip
            with pytest.raises(errors.TileloomError):
                tileloom.attention(q, k, v, **{option: value})


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_calls_that_were_checked_before(is_causal):
    options = {"is_causal": is_causal, "scale": 0.2}
    case = AttentionCase("checked", (2, 4, 2, 300, 300, 64, 64), BF16, options=options)
    inputs = case.inputs("cuda")
    given = gradients.upstream(inputs)
    qkv = (inputs.q, inputs.k, inputs.v)
    with torch.no_grad():
        for _ in range(3):
            tileloom.attention(*qkv, **options)
    results = gradients.of_attention(inputs, given)
    gradients.check(inputs, given, results)
    for wanted in ("q", "k", "v", ""):
        leaves = [t.detach().requires_grad_(n in wanted) for n, t in zip("qkv", qkv)]
        out, lse = tileloom.attention(*leaves, **options, return_lse=True)
        assert (out.requires_grad, lse.requires_grad) == (bool(wanted), bool(wanted))
        if wanted:
            leaf = leaves["qkv".index(wanted)]
            (alone,) = torch.autograd.grad((out, lse), leaf, (given.dout, given.dlse))
            both = results["qkv".index(wanted)]
            assert torch.equal(alone, both) or wanted == "q"  # added up in no fixed order


@pytest.mark.gpu
def test_autocast_takes_the_long_way(qkv):
    with torch.no_grad():
        for _ in range(3):
            tileloom.attention(*qkv)
    with torch.autocast(qkv[0].device.type, torch.float16):
        assert tileloom.attention(*qkv).dtype == torch.float16


@pytest.mark.gpu
def test_every_call_is_recorded(qkv):
    with torch.no_grad():
        for _ in range(4):
            tileloom.attention(*qkv)
        with _op.record_choices() as made:
            for _ in range(3):
                tileloom.attention(*qkv)
    assert [choice.backend for choice in made] == [made[0].backend] * 3


@pytest.mark.gpu
def test_no_tensor_is_held_by_a_plan():
    device = torch.cuda.current_device()
    with torch.no_grad():
        for _ in range(3):
            q, k, v = torch.randn((3, 1, 2, 96, 64), device=device).half().unbind(0)
            tileloom.attention(q, k, v)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        big = torch.randn((3, 1, 2, 96, 64), device=device).half()
        for _ in range(3):
            tileloom.attention(*big.unbind(0))
        del big
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
