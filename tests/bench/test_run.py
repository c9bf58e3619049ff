import warnings
from dataclasses import replace

import pytest
import torch
from tests.bench.fakes import CAUSAL, SMALL, FakeTimer, OneMs, contender, session

from tileloom.bench import AttentionCase, Contender, run, run_cell
from tileloom.bench.run import sets_for
from tileloom.ops.attention import attention_reference


def _one_key_lost(out, run):
    """The error of a kernel that skips the last tile: some rows are a little off."""
    out = out.clone()
    out[:, :, -4:] *= 1.02
    return out


def _by_name(cell):
    return {entry.name: entry for entry in cell.entries}


@pytest.mark.parametrize("case", [SMALL, CAUSAL])
def test_right_contenders_get_numbers_and_ratios(case):
    timer = FakeTimer()
    cell = run_cell(
        case,
        [contender("base", timer, 2.0), contender("mine", timer, 1.0, side="ours", host_us=40.0)],
        session(timer, baseline="base", compare=("mine",), matmul_tflops=1e-3),
    )
    base, mine = cell.entries
    assert [entry.status for entry in cell.entries] == ["ok", "ok"]
    assert mine.tflops == pytest.approx(case.flops / 1e-3 / 1e12)
    assert mine.of_matmul == pytest.approx(mine.tflops / 1e-3)
    assert mine.host_us == pytest.approx(40.0)
    assert mine.samples_ms == pytest.approx((1.0,) * 6)
    assert mine.ratios["base"].value == pytest.approx(2.0)
    assert mine.ratios["base"].verdict == "faster"
    assert set(mine.ratios) == {"base"}
    assert base.ratios["mine"].verdict == "slower"
    assert cell.rounds == 6


def test_a_wrong_kernel_gets_no_number_and_is_never_timed():
    timer = FakeTimer()
    steps = []
    cell = run_cell(
        SMALL,
        [contender("base", timer, 2.0), contender("bad", timer, 0.1, spoil=_one_key_lost)],
        session(timer, baseline="base", step=steps.append),
    )
    bad = _by_name(cell)["bad"]
    assert bad.status == "wrong"
    assert "allowed" in bad.reason
    assert "60..63" in bad.reason  # the report names the rows
    assert (bad.tflops, bad.time_ms, bad.samples_ms) == (None, None, ())
    assert "small: timing bad" not in steps
    assert "small: timing base" in steps
    assert _by_name(cell)["base"].tflops is not None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, run: torch.zeros_like(out),
        lambda out, run: out.double(),
        lambda out, run: out[:, :, :-1],
        lambda out, run: torch.full_like(out, float("nan")),
    ],
    ids=["zeros", "dtype", "shape", "nan"],
)
def test_wrong_in_other_ways(spoil):
    timer = FakeTimer()
    cell = run_cell(SMALL, [contender("bad", timer, 1.0, spoil=spoil)], session(timer))
    assert cell.entries[0].status == "wrong"
    assert cell.entries[0].reason


def test_one_that_becomes_wrong_under_load_loses_its_number():
    timer = FakeTimer()
    racy = contender(
        "racy", timer, 1.0, spoil=lambda out, run: out if run < 12 else _one_key_lost(out, run)
    )
    cell = run_cell(SMALL, [racy], session(timer))
    assert cell.entries[0].status == "wrong"
    assert cell.entries[0].reason.startswith("right at first, wrong after the timed calls: ")
    assert cell.entries[0].tflops is None


def test_one_that_refuses_gives_its_reason_and_does_not_run():
    timer = FakeTimer()
    shy = contender("shy", timer, 1.0, refuse=lambda case, inputs: f"not {case.name}")
    cell = run_cell(SMALL, [shy], session(timer))
    assert (cell.entries[0].status, cell.entries[0].reason) == ("refused", "not small")
    assert timer.device_ms == 0


def test_one_that_raises_gives_error_and_warnings():
    """SDPA says in warnings why a backend cannot run, and in the error only that none could."""
    timer = FakeTimer()

    def spoil(out, run):
        warnings.warn("Flash attention requires half precision", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.\nsecond line")

    broken = contender("broken", timer, 1.0, spoil=spoil)
    cell = run_cell(SMALL, [broken, contender("good", timer, 1.0)], session(timer))
    assert cell.entries[0].status == "failed"
    assert cell.entries[0].reason == (
        "RuntimeError: No available kernel. Aborting execution. | "
        "Flash attention requires half precision"
    )
    assert cell.entries[1].status == "ok"


def test_a_failure_while_timing_is_a_failure():
    timer = FakeTimer()

    def spoil(out, run):
        if run > 15:
            raise RuntimeError("out of memory")
        return out

    cell = run_cell(SMALL, [contender("bad", timer, 1.0, spoil=spoil)], session(timer))
    assert (cell.entries[0].status, cell.entries[0].reason) == (
        "failed",
        "RuntimeError: out of memory",
    )


def test_a_failure_in_the_last_check_is_a_failure():
    timer = FakeTimer()
    seen = []

    def spoil(out, run):
        seen.append(run)
        if last[0] and run == last[0]:
            raise RuntimeError("too late")
        return out

    last = [0]
    run_cell(SMALL, [contender("a", timer, 1.0, spoil=spoil)], session(timer))
    last[0] = seen[-1]
    cell = run_cell(SMALL, [contender("a", timer, 1.0, spoil=spoil)], session(timer))
    assert cell.entries[0].status == "failed"
    assert "too late" in cell.entries[0].reason


def test_warnings_of_one_that_runs_are_kept():
    timer = FakeTimer()

    def spoil(out, run):
        if run == 1:
            warnings.warn("the portable kernel runs", stacklevel=1)
        return out

    cell = run_cell(SMALL, [contender("a", timer, 1.0, spoil=spoil)], session(timer))
    assert cell.entries[0].about["warnings"] == ["the portable kernel runs"]


def test_a_lost_device_ends_the_cell():
    timer = FakeTimer()

    def spoil(out, run):
        timer.lost = True
        return out

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_cell(SMALL, [contender("bad", timer, 1.0, spoil=spoil)], session(timer))


def test_memory_is_poisoned_before_each_contender(monkeypatch):
    """A kernel that writes nothing must not live on what the one before it has written."""
    timer, order = FakeTimer(), []
    monkeypatch.setattr(run, "_poison", lambda case, device: order.append("poison"))

    def noted(name):
        def spoil(out, count):
            if count == 1:
                order.append(name)
            return out

        return contender(name, timer, 1.0, spoil=spoil)

    run_cell(SMALL, [noted("a"), noted("b")], session(timer))
    assert order == ["poison", "a", "poison", "b"]


def test_poison_makes_two_blocks_of_nan_of_the_outputs_size(monkeypatch):
    made = []
    full = torch.full

    def noted(*args, **options):
        made.append(full(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "full", noted)
    run._poison(SMALL, torch.device("cpu"))
    assert [(tuple(t.shape), t.dtype) for t in made] == [((1, 2, 64, 32), torch.float32)] * 2
    assert all(bool(t.isnan().all()) for t in made)
    assert made[0].data_ptr() != made[1].data_ptr()


def test_a_case_that_cannot_tell_right_from_wrong_is_an_error():
    timer = FakeTimer()

    def judge(actual, reference, baseline):
        raise ValueError("this case cannot tell a kernel from zeros")

    weak = session(timer)
    weak = type(weak)(**{**vars(weak), "judge": judge})
    with pytest.raises(ValueError, match="from zeros"):
        run_cell(SMALL, [contender("a", timer, 1.0)], weak)


@pytest.mark.parametrize(("length", "sets"), [(16384, 2), (1024, 2), (512, 3), (64, 11), (1, 32)])
def test_sets_push_three_times_the_cache_between_two_uses(length, sets):
    l2 = 50 * 2**20
    case = AttentionCase("c", 1, 32, 32, 16 * length, 16 * length, 64, False)
    if length < 16384:
        case = AttentionCase("c", 1, 32, 32, length * 4, length * 4, 64, False)
    assert sets_for(case, l2) == min(32, max(2, 1 + -(-3 * l2 // case.bytes_moved)))
    if sets_for(case, l2) < 32:
        assert (sets_for(case, l2) - 1) * case.bytes_moved >= 3 * l2


def test_the_card_is_asked_for_the_time_of_the_timing():
    timer, asked = FakeTimer(), []
    run_cell(
        SMALL,
        [contender("a", timer, 1.0)],
        session(timer, card=lambda start, end: asked.append(end - start)),
    )
    assert len(asked) == 1
    assert asked[0] > 0


def _flipped(name, change=lambda t: t):
    """A contender with a layout of its own, whose gradients `change` may spoil."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return change(grad)

    def prepare(case, inputs):
        q, k, v = (Spoil.apply(t).transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        return lambda: attention_reference(q, k, v, is_causal=case.is_causal).transpose(1, 2)

    def layout(t):
        return t.transpose(1, 2).contiguous()

    return Contender(name, "ours", prepare, layout=layout, read=lambda t: t.transpose(1, 2))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_backward_is_judged_by_each_gradient_in_the_contenders_layout(is_causal):
    case = replace(CAUSAL if is_causal else SMALL, direction="backward")
    contenders = [_flipped("right"), _flipped("wrong", lambda t: t * 1.01)]
    right, wrong = run_cell(case, contenders, session(OneMs())).entries
    assert (right.status, right.reason) == ("ok", None)
    assert wrong.status == "wrong"
    assert (wrong.reason or "").startswith("dq: ")
    assert right.tflops == pytest.approx(2.5 * SMALL.flops * (0.5 if is_causal else 1) / 1e9)
