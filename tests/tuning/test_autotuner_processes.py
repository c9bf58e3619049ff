"""Many processes that tune one kernel at once: one measures, all launch the same config."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

pytest.importorskip("triton")
from tests.tuning.children import in_children, wait
from tests.tuning.replayed import CONFIGS, make, run


@pytest.fixture
def compiled(tuned, store):
    """The configs lie in Triton's cache, as after a first process; no winner is known."""
    make(tuned).precompile()
    assert store.files() == []


def test_60_processes_agree_and_measure_once(tuned, compiled, store, tmp_path):
    """Each would choose another config by its own times."""

    def work(number):
        tuned.times = staticmethod(lambda c: 0.1 if c == CONFIGS[number % 3] else 0.2)
        tuned.asked = []
        tuner = make(tuned)
        run(tuner)
        (tmp_path / f"{number}.winner").write_text(json.dumps(tuner.winner.to_dict()))
        if tuned.asked:
            (tmp_path / f"{number}.measured").write_text("")

    assert wait(in_children(60, work)) == [0] * 60
    winners = {path.read_text() for path in tmp_path.glob("*.winner")}
    assert len(winners) == 1
    assert len(list(tmp_path.glob("*.winner"))) == 60
    assert len(list(tmp_path.glob("*.measured"))) == 1
    assert len(store.files()) == 1


def test_a_process_killed_while_it_measures_leaves_the_next_one_to_it(
    tuned, compiled, store, tmp_path
):
    began = tmp_path / "began"

    def hang(number):
        def times(config):
            began.write_text("")
            time.sleep(600)

        tuned.times = staticmethod(times)
        run(make(tuned))

    (child,) = in_children(1, hang)
    while not began.exists():
        time.sleep(0.01)
    others = in_children(2, lambda number: run(make(tuned)))
    time.sleep(0.2)
    assert store.files() == []
    os.kill(child, signal.SIGKILL)
    wait([child])
    assert wait(others) == [0, 0]
    again = make(tuned)
    tuned.asked.clear()
    run(again)
    assert again.winner == CONFIGS[1]
    assert tuned.asked == []
