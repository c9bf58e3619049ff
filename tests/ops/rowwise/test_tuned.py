"""Row-wise calls that a user asks to tune: what is compared, kept and taken; and only those.

Without a GPU the times are made up, and the candidates run in the emulator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.tuning.store_samples import PLATFORM

import tileloom
from tileloom import emulator, knobs, tuning
from tileloom.ops._op import record_choices
from tileloom.ops.rowwise.config import Tile, TritonConfig
from tileloom.ops.rowwise.tuned import MOST_WARPS, neighbours
from tileloom.testing import assert_accurate
from tileloom.tuning import of_operators
from tileloom.tuning.store import Candidate, Store


def rms_norm64(x, weight=None):
    y = x.double()
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize(
    ("tile", "width"),
    [
        (Tile(4096, 1, 8), 4096), (Tile(16, 128, 4), 9), (Tile(32768, 1, 32), 32768),
        (Tile(4096, 1, 4, 2, 2), 100_000), (Tile(8192, 1, 8, 4, split=True), 50_000),
        (Tile(2048, 1, 8, 3), 2**20),
    ],
)  # fmt: skip
def test_candidates_are_the_rule_and_what_is_one_step_away(tile, width):
    found = neighbours(tile, width)
    assert found[0] == tile
    assert 3 <= len(set(found)) == len(found) <= 16
    for one in found:
        assert not one.faults("tile")
        assert one.num_warps * one.per_sm <= MOST_WARPS
        assert (one.block >= width) == (tile.block >= width)


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """Emulated calls may be tuned; each has the time that `times` gives it. Yields who is asked."""
    asked = []

    def compared(candidates, prepare, device, changed):
        asked.append(list(candidates))
        tried = []
        calls = [prepare(config) for config in candidates]
        calls[1]()
        for config in candidates:
            ms = 0.1 if config == candidates[1] else 0.2
            tried.append(Candidate(config.to_dict(), ms, ms / 0.1))
        winner = candidates[1].to_dict()
        return {"winner": winner, "found_by": "list", "candidates": tuple(tried), "measured": {}}

    monkeypatch.setattr(of_operators, "_compared", compared)
    monkeypatch.setattr(of_operators, "is_on", lambda tensor: of_operators._inside > 0)
    monkeypatch.setattr(of_operators, "_where", lambda device: ("sm_90", PLATFORM))
    with knobs.scope({"cache.dir": tmp_path}), emulator.run():
        yield asked


def test_nothing_is_tuned_unless_asked(emulated):
    with record_choices() as made:
        tileloom.rms_norm(torch.randn(4, 32))
    assert [choice.source for choice in made] == ["rule"]
    assert emulated == []


def test_the_fastest_runs_and_is_kept(emulated):
    x, weight = torch.randn(4, 32), torch.randn(32)
    with tuning.operators(), record_choices() as made:
        out = tileloom.rms_norm(x, weight, eps=1e-6)
        tileloom.rms_norm(x[:3], weight, eps=1e-6)  # of as many rows, rounded up
    (asked,) = emulated
    rule = asked[0]
    assert [choice.source for choice in made] == ["tuned", "tuned"]
    assert {choice.config.forward for choice in made} == {
        Tile(**asked[1].kwargs, num_warps=asked[1].num_warps, stages=asked[1].num_stages)
    }
    assert_accurate(out, rms_norm64(x, weight), rms_norm64(x, weight).float())
    (path,) = Store().files()
    record = json.loads(path.read_text())["record"]
    assert record["problem"]["kernel"] == "tileloom.ops.rowwise:rms_norm_forward"
    assert record["candidates"][0]["config"] == rule.to_dict(), "the rule is the default"


def test_other_calls_have_their_own(emulated):
    weight = torch.randn(32)
    with tuning.operators():
        for call in (
            lambda: tileloom.rms_norm(torch.randn(4, 32)),
            lambda: tileloom.rms_norm(torch.randn(4, 32), weight),
            lambda: tileloom.rms_norm(torch.randn(9, 32)),
            lambda: tileloom.rms_norm(torch.randn(4, 33)),
            lambda: tileloom.layer_norm(torch.randn(4, 32)),
            lambda: tileloom.softmax(torch.randn(4, 32)),
            lambda: tileloom.swiglu(torch.randn(4, 32), torch.randn(4, 32)),
            lambda: tileloom.cross_entropy(torch.randn(4, 32), torch.tensor([1, 2, 3, 4])),
        ):
            before = len(emulated)
            call()
            assert len(emulated) == before + 1
    assert len(Store().files()) == len(emulated)


def test_backwards_are_tuned_too(emulated):
    x = torch.randn(4, 32, requires_grad=True)
    with tuning.operators():
        tileloom.softmax(x).backward(torch.randn(4, 32))
    kernels = sorted(json.loads(path.read_text())["record"]["problem"]["kernel"]
                     for path in Store().files())  # fmt: skip
    assert [name.rpartition("_")[2] for name in kernels] == ["backward", "forward"]


def test_what_an_inplace_backward_writes_over_is_put_back():
    """`changed` names it; see tests/tuning for what that does."""
    from tileloom.ops.rowwise.cross_entropy import plans

    seen = {}

    def noted(choice, part, decide, tensors, *, changed=()):
        seen[part] = [t is tensors[1] for t in changed]
        return choice

    with pytest.MonkeyPatch.context() as patch, emulator.run():
        patch.setattr(plans, "tuned", noted)
        logits = torch.randn(4, 32, requires_grad=True)
        labels = torch.tensor([1, 2, 3, 4])
        tileloom.cross_entropy(logits, labels).backward()
        assert seen.pop("backward") == []
        loss = tileloom.cross_entropy(logits * 1, labels, inplace_backward=True)
        loss.backward()
    assert seen["backward"] == [True]


def test_an_explicit_config_is_not_tuned(emulated):
    config = TritonConfig(forward=Tile(32, 4, 1))
    with tuning.operators(), record_choices() as made:
        tileloom.rms_norm(torch.randn(4, 32), config=config)
    assert (made[0].source, emulated) == ("explicit", [])


def test_a_record_whose_tile_does_not_fit_leaves_the_rule(emulated, monkeypatch):
    from tileloom.ops.rowwise import tuned as place

    own = place._tile
    monkeypatch.setattr(place, "_tile", lambda config: replace(own(config), num_warps=3))
    monkeypatch.setattr(of_operators, "best", lambda *given: given[3][1])
    with tuning.operators(), record_choices() as made:
        tileloom.rms_norm(torch.randn(4, 32))
    assert made[0].source == "rule"


def test_where_no_tile_runs_nothing_is_kept_and_the_rule_runs(emulated, monkeypatch):
    def compared(*given):
        raise of_operators._NoneRunsError

    monkeypatch.setattr(of_operators, "_compared", compared)
    with tuning.operators(), record_choices() as made:
        tileloom.rms_norm(torch.randn(4, 32))
    assert made[0].source == "rule"
    assert Store().files() == []


def test_what_is_compared_and_why_others_are_not(monkeypatch):
    """With times that are made up, on the CPU."""
    from tileloom.tuning import Config, measure

    class Timer:
        def __init__(self, device, before):
            self.before = before

        def sample(self, calls):
            self.before()
            return [call() for call in calls]

    monkeypatch.setattr(measure, "DeviceTimer", Timer)
    times = {1: 0.2, 2: 0.1, 4: None}
    listed = [Config({}, num_warps=warps) for warps in times]
    changed = torch.zeros(3)

    def prepare(config):
        if times[config.num_warps] is None:
            raise ValueError("too many")
        return lambda: changed.add_(1) is not None and times[config.num_warps]

    found = of_operators._compared(listed, prepare, torch.device("cpu"), [changed])
    assert found["winner"] == listed[1].to_dict()
    assert [one.reason for one in found["candidates"][1:]] == ["", "ValueError: too many"]
    assert torch.equal(changed, torch.zeros(3)), "it is put back"
    times.update({1: None, 2: None})
    with pytest.raises(of_operators._NoneRunsError):
        of_operators._compared(listed, prepare, torch.device("cpu"), [])


def test_a_block_decides_anew_and_what_it_decided_holds(emulated):
    x = torch.randn(4, 64)
    tileloom.rms_norm(x)
    with tuning.operators():
        tileloom.rms_norm(x)
        assert len(emulated) == 1
    assert not of_operators._inside


def test_it_is_off_on_the_cpu_and_under_deterministic_algorithms(monkeypatch):
    gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not of_operators.is_on(gpu)
    with tuning.operators():
        assert of_operators.is_on(gpu)
        assert not of_operators.is_on(torch.zeros(1))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not of_operators.is_on(gpu)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not of_operators.is_on(gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (64, 100_000), (3, 5, 37)], ids=str)
def test_tuned_calls_on_a_gpu(shape, tmp_path):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    plain = [t.detach().clone().requires_grad_() for t in (x, weight)]

    def formula(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    with knobs.scope({"cache.dir": tmp_path}), tuning.operators(), record_choices() as made:
        out = tileloom.rms_norm(x, weight, eps=1e-6)
        out.backward(grad)
    assert [choice.source for choice in made] == ["tuned", "tuned"]
    reference, baseline = formula(*exact), formula(*plain)
    reference.backward(grad.double())
    baseline.backward(grad)
    assert_accurate(out, reference, baseline)
    for own, true, base in zip((x, weight), exact, plain):
        assert_accurate(own.grad, true.grad, base.grad)


SECOND = """
import torch, tileloom
from tileloom import tuning
from tileloom.ops._op import record_choices
from tileloom.tuning import measure
measure.DeviceTimer.sample = None  # measuring fails
x = torch.randn(512, 4096, device="cuda")
with tuning.operators(), record_choices() as made:
    tileloom.softmax(x)
print([choice.source for choice in made])
"""


@pytest.mark.gpu
def test_a_second_process_measures_nothing(tmp_path):
    with knobs.scope({"cache.dir": tmp_path}), tuning.operators():
        tileloom.softmax(torch.randn(512, 4096, device="cuda"))
    environment = os.environ | {
        "TILELOOM_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SECOND], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "tuned" in done.stdout
