import json
from pathlib import Path

import pytest
from tests.bench.fakes import SMALL, FakeTimer, contender, session

from tileloom.bench import Contender, judge_bars, load_bars, load_cases, run_cell
from tileloom.errors import OptionError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BARS = load_bars(BENCHMARKS / "attention_bars.json")


def test_every_cell_has_its_bars():
    names = [case.name for case in load_cases(BENCHMARKS / "attention_cases.json")]
    assert [bar.cell for bar in BARS if bar.kind == "at_least"] == names
    measured = [name for name in names if name.split("-")[1] in ("l1024", "l4096", "l16384")]
    assert [bar.cell for bar in BARS if bar.kind == "tflops"] == measured
    assert {bar.contender for bar in BARS} == {"tileloom"}
    assert {(bar.other, bar.value) for bar in BARS if bar.kind == "at_least"} == {
        ("efficient", 2.2)
    }
    assert [(bar.cell, bar.other) for bar in BARS if bar.kind == "faster_than"] == [
        (name, peer) for name in names for peer in ("cudnn", "fa4")
    ]


def test_numbers_may_lie_five_percent_under_what_was_measured():
    values = {bar.cell: bar.value for bar in BARS if bar.kind == "tflops"}
    assert values["d64-l1024"] == pytest.approx(0.95 * 361)
    assert values["d256-l16384-causal"] == pytest.approx(0.95 * 656)


def _bars(tmp_path, **cell):
    path = tmp_path / "bars.json"
    path.write_text(json.dumps({
        "schema": 1, "contender": "mine", "allowed_under": 0.05, "cells": {"small": cell},
    }))  # fmt: skip
    return load_bars(path)


def _cell(mine_ms, base_ms=2.0, **options):
    timer = FakeTimer()
    return run_cell(
        SMALL,
        [contender("base", timer, base_ms), contender("mine", timer, mine_ms, **options)],
        session(timer, baseline="base"),
    )


def _tflops(ms):
    return SMALL.flops / ms / 1e9


@pytest.mark.parametrize(("ms", "met"), [(1.0, True), (1.05, True), (1.06, False)])
def test_tflops(tmp_path, ms, met):
    bars = _bars(tmp_path, tflops=_tflops(1.0))
    assert [one.met for one in judge_bars(bars, [_cell(ms)])] == [met]


@pytest.mark.parametrize(("ms", "met"), [(0.9, True), (0.92, False)])
def test_at_least(tmp_path, ms, met):
    (one,) = judge_bars(_bars(tmp_path, at_least={"base": 2.2}), [_cell(ms)])
    assert one.met is met
    assert one.found.startswith("2.")
    assert str(one.bar) == "2.2 x base"


def test_faster_than_needs_the_whole_interval(tmp_path):
    bars = _bars(tmp_path, faster_than=["base"])
    (one,) = judge_bars(bars, [_cell(1.9)])
    assert one.met is True


def test_ahead_in_half_of_the_rounds_is_not_faster(tmp_path):
    bars = _bars(tmp_path, faster_than=["base"])
    timer = FakeTimer()
    plain = contender("mine", timer, 1.0)

    def prepare(case, inputs):
        inner = plain.prepare(case, inputs)

        def call():
            turn = max(0, len(timer.pauses) - 1) // 2
            timer.spend(2.0 if turn % 2 else 0.0)
            return inner()

        return call

    cell = run_cell(
        SMALL,
        [contender("base", timer, 2.0), Contender("mine", "ours", prepare)],
        session(timer, baseline="base"),
    )
    (one,) = judge_bars(bars, [cell])
    assert cell.entry("mine").ratios["base"].verdict == "unclear"
    assert one.met is False


def test_a_wrong_kernel_meets_no_bar(tmp_path):
    bars = _bars(tmp_path, tflops=1e-9, at_least={"base": 0.1}, faster_than=["base"])
    judged = judge_bars(bars, [_cell(0.01, spoil=lambda out, run: out * 0)])
    assert [(one.met, one.found) for one in judged] == [(False, "wrong")] * 3


def test_what_a_run_cannot_tell_is_neither_met_nor_missed(tmp_path):
    bars = _bars(tmp_path, at_least={"efficient": 2.2})
    assert [one.met for one in judge_bars(bars, [_cell(1.0)])] == [None]
    timer = FakeTimer()
    alone = run_cell(SMALL, [contender("base", timer, 1.0)], session(timer))
    assert [one.met for one in judge_bars(bars, [alone])] == [None]
    assert judge_bars(bars, []) == []


@pytest.mark.parametrize(
    "content",
    [
        {"schema": 2, "contender": "a", "allowed_under": 0, "cells": {}},
        {"schema": 1, "allowed_under": 0, "cells": {}},
        {"schema": 1, "contender": "a", "allowed_under": 0, "cells": {"x": {"speed": 3}}},
        {"schema": 1, "contender": "a", "allowed_under": 0, "cells": {"x": {"at_least": 3}}},
        [],
    ],
)
def test_a_file_that_is_no_bars_file(tmp_path, content):
    path = tmp_path / "bars.json"
    path.write_text(json.dumps(content))
    with pytest.raises(OptionError, match=r"cannot be read.*Try: benchmarks/attention_bars.json"):
        load_bars(path)
