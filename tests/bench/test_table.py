import io

from rich.console import Console
from tests.bench.fakes import CAUSAL, SMALL, FakeTimer, contender, session

from tileloom.bench import Bar, judge_bars, run_cell
from tileloom.bench.ceilings import Ceilings
from tileloom.bench.machine import CardState
from tileloom.bench.table import bar_lines, choices, header, reasons, show

ABOUT = {"backend": "x", "config": "x:1,2", "source": "rule"}


def _cells():
    timer = FakeTimer()
    contenders = [
        contender("bad", timer, 1.0, spoil=lambda out, run: out * 0),
        contender("shy", timer, 1.0, refuse=lambda case, inputs: "no [such] thing"),
        contender("mine", timer, 1e-4, side="ours", describe=lambda case, inputs: ABOUT),
        contender("base", timer, 2e-4),
    ]
    card = CardState(1540.0, 1500.0, 695.0, 60.0, 10)
    how = session(
        timer, baseline="base", compare=("mine",), matmul_tflops=10.0, card=lambda start, end: card
    )
    return [run_cell(case, contenders, how) for case in (SMALL, CAUSAL)]


def _shown(cells, bars):
    console = Console(file=io.StringIO(), width=170)
    show(console, cells, "base", judge_bars(bars, cells))
    return console.file.getvalue()


def _row(text, *starts):
    return next(
        line.split() for line in text.splitlines() if line.split()[: len(starts)] == [*starts]
    )


def test_the_baseline_comes_first_and_wrong_is_said_instead_of_a_number():
    text = _shown(_cells(), [])
    assert _row(text, "case", "base") == ["case", "base", "bad", "mine", "SM", "MHz", "W"]
    speed = SMALL.flops / 1e-4 / 1e9
    row = _row(text, "small")
    assert row == ["small", f"{speed / 2:.0f}", "wrong", f"{speed:.0f}", "1540", "695"]


def test_one_that_refuses_some_cells_keeps_its_column():
    timer = FakeTimer()
    picky = contender(
        "picky", timer, 1e-4, refuse=lambda case, inputs: "no" if case.is_causal else None
    )
    cells = [run_cell(case, [picky], session(timer)) for case in (SMALL, CAUSAL)]
    text = _shown(cells, [])
    assert _row(text, "small")[1] == f"{SMALL.flops / 1e-4 / 1e9:.0f}"
    assert _row(text, "small-causal")[1] == "-"
    assert "picky refused in small-causal: no" in text


def test_ours_has_ratio_interval_share_and_host_time():
    row = _row(_shown(_cells(), []), "small", "mine")
    assert row[2:6] == ["2.000", "[2.000,", "2.000]", "faster"]
    share = SMALL.flops / 1e-4 / 1e9 / 10
    assert row[-2:] == [f"{share:.0%}", "5"]


def test_geometric_means_close_the_tables():
    text = _shown(_cells(), [])
    mean = (SMALL.flops * CAUSAL.flops) ** 0.5 / 1e-4 / 1e9
    assert f"{mean:.0f} (2)" in text
    assert _row(text, "geometric", "mean", "mine") == [
        "geometric", "mean", "mine", "2.000", "(2)",
    ]  # fmt: skip


def test_bars_are_shown_met_and_missed():
    bars = [
        Bar("small", "mine", "tflops", value=1e9),
        Bar("small", "mine", "at_least", "base", 1.9),
        Bar("small-causal", "mine", "faster_than", "gone"),
        Bar("small-causal", "mine", "faster_than", "base"),
    ]
    text = _shown(_cells(), bars)
    assert "1.9 x base: 2.00 met" in text
    assert "> base: 2.000 [2.000, 2.000] met" in text
    assert "MISSED" in text
    lines = bar_lines(judge_bars(bars, _cells()))
    assert lines[0] == "bars: 2 of 4 met"
    assert lines[1].startswith("  MISSED: small, 1000000000: ")
    assert lines[2] == "  not known: small-causal, > gone: gone has no number"


def test_each_reason_is_given_once():
    cells = _cells()
    lines = reasons(cells)
    assert lines[1] == "shy refused in all cells: no [such] thing"
    assert lines[0].startswith("bad wrong in small: out: an element is off by")
    assert reasons(cells[:1])[1] == "shy refused in all cells: no [such] thing"
    assert "no [such] thing" in _shown(cells, [])


def test_which_config_ran_is_said():
    cells = _cells()
    assert choices(cells) == ["mine: x:1,2 by rule in all cells"]
    cells[1] = type(cells[1])(**{**vars(cells[1]), "entries": ()})
    assert choices(cells) == ["mine: x:1,2 by rule in small"]


def test_nothing_to_show():
    assert _shown([], []) == ""
    assert bar_lines([]) == []


def test_header():
    machine = {
        "card": "H100", "sms": 132, "driver": "580", "power_limit_w": "700", "torch": "2.11",
        "cudnn": 91900, "packages": {"triton": "3.6.0"}, "python": "3.12",
    }  # fmt: skip
    ceilings = Ceilings(742.0, {"4096": 742.0, "8192": 690.0}, 1.9, 8.9)
    text = "\n".join(header(machine, {"commit": "abc", "dirty": True}, ceilings))
    for part in ("H100", "driver 580", "triton 3.6.0", "commit abc with changes", "742 TFLOP/s",
                 "690 at 8192", "launch floor 1.9 us", "8.9 us of host", "N(0, 1)"):  # fmt: skip
        assert part in text
    assert "changes unknown" in header(machine, {"commit": "abc", "dirty": None}, None)[1]
