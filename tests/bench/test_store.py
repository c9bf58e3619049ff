import copy
import json

import pytest
from tests.bench.fakes import CAUSAL, SMALL, FakeTimer, contender, session

from tileloom.bench import Bar, Plan, document, judge_bars, load, run_cell, save
from tileloom.bench.ceilings import measure_ceilings
from tileloom.bench.store import check, geometric_means
from tileloom.errors import OptionError

PLAN = Plan(rounds=6, sample_ms=4.0, warm_ms=2.0, pause_s=0.25)


def _cells(timer):
    contenders = [
        contender("base", timer, 2.0),
        contender("mine", timer, 1.0, side="ours", describe=lambda c, i: {"config": "x:1"}),
        contender("bad", timer, 1.0, spoil=lambda out, run: out * 0),
        contender("shy", timer, 1.0, refuse=lambda c, i: "cannot"),
    ]
    return [run_cell(case, contenders, session(timer, baseline="base")) for case in (SMALL, CAUSAL)]


@pytest.fixture
def record():
    timer = FakeTimer()
    cells = _cells(timer)
    return document(
        operator="attention_fwd",
        date="2026-11-27T12:00:00+00:00",
        code={"commit": "abc", "dirty": False},
        machine={"card": "a card"},
        plan=PLAN,
        baseline="base",
        cells=cells,
        bars=judge_bars([Bar("small", "mine", "faster_than", "base")], cells),
        ceilings=None,
        finished=True,
    )


def test_what_is_saved_is_loaded(tmp_path, record):
    path = tmp_path / "new" / "folder" / "run.json"
    save(path, record)
    assert load(path) == json.loads(json.dumps(record))
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_what_a_reader_needs_is_there(record):
    assert (record["kind"], record["schema"]) == ("tileloom-bench", 1)
    assert "N(0, 1)" in record["inputs"]
    assert record["protocol"]["rounds"] == 6
    assert record["protocol"]["pause_s"] == 0.25
    cell = record["cells"][1]
    assert cell["case"]["name"] == "small-causal"
    by_name = {entry["name"]: entry for entry in cell["entries"]}
    assert {name: entry["status"] for name, entry in by_name.items()} == {
        "base": "ok", "mine": "ok", "bad": "wrong", "shy": "refused",
    }  # fmt: skip
    assert by_name["mine"]["about"] == {"config": "x:1"}
    assert by_name["mine"]["ratios"]["base"]["verdict"] == "faster"
    assert len(by_name["mine"]["samples_ms"]) == 6
    assert by_name["shy"]["reason"] == "cannot"
    assert record["bars"][0]["met"] is True


def test_geometric_means_count_only_cells_with_a_number():
    means = geometric_means(_cells(FakeTimer()), "base")
    assert means["mine"]["cells"] == means["mine"]["ratio_cells"] == 2
    assert means["mine"]["ratio"] == pytest.approx(2.0)
    assert means["mine"]["tflops"] == pytest.approx((SMALL.flops * CAUSAL.flops) ** 0.5 / 1e9)
    assert means["bad"] == {"cells": 0, "tflops": None, "ratio": None, "ratio_cells": 0}
    assert means["base"]["ratio"] is None


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda r: r.update(kind="other"), "kind is 'other'"),
        (lambda r: r.update(schema=2), "schema is 2"),
        (lambda r: r.pop("machine"), "machine is None"),
        (lambda r: r["cells"][0]["entries"][0].update(status="fine"), "base in small has status"),
        (lambda r: r["cells"][0]["entries"][0].update(tflops=None), "base in small is ok and has"),
        (lambda r: r["cells"][0]["entries"][2].update(tflops=900.0), "bad in small is wrong and"),
        (lambda r: r["cells"][0]["entries"][3].update(reason=None), "shy in small .* no reason"),
        (lambda r: r["cells"][0]["entries"][1]["samples_ms"].pop(), "has 5 samples in 6 rounds"),
        (lambda r: r["cells"][0]["entries"][1].update(tflops=float("nan")), "tflops=nan"),
    ],
)
def test_a_record_that_lies_is_refused(tmp_path, record, spoil, text):
    broken = copy.deepcopy(json.loads(json.dumps(record)))
    spoil(broken)
    with pytest.raises(OptionError, match=text):
        check(broken)
    path = tmp_path / "run.json"
    with pytest.raises(OptionError, match=text):
        save(path, broken)
    assert not path.exists()


def test_a_failed_write_leaves_the_old_record(tmp_path, record, monkeypatch):
    path = tmp_path / "run.json"
    save(path, record)
    old = path.read_text()

    def no_space(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdopen", no_space)
    with pytest.raises(OSError, match="No space"):
        save(path, record)
    assert path.read_text() == old
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "[1]", "null"])
def test_a_file_that_is_no_record(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="record"):
        load(path)


def test_ceilings_are_part_of_the_record(tmp_path, record, monkeypatch):
    timer = FakeTimer()
    sample = timer.sample

    def slow(call, calls, lead_ms):
        timer.spend(0.5 * calls, 8.0 * calls)
        real = sample(call, calls, lead_ms)
        return type(real)(0.5, 8.0)

    monkeypatch.setattr(timer, "sample", slow)
    import torch

    found = measure_ceilings(torch.device("cpu"), timer, PLAN, sizes=(16, 32))
    assert found.matmul_by_size["32"] == pytest.approx(2 * 32**3 / 0.5e-3 / 1e12)
    assert found.matmul_tflops == found.matmul_by_size["32"]
    assert (found.launch_us, found.launch_host_us) == (500.0, 8.0)
