"""The Gluon vocabulary on the emulator: values under every schedule and level, planted bugs."""

# ruff: noqa: E501
from __future__ import annotations

import importlib
import inspect
import re
import runpy

import pytest
import torch

from tests.cpasync import gluon_cases
from tests.emulator.support import load_text
from tests.house import ROOT
from tileloom import emulator
from tileloom.cpasync import gluon as cp

TEXT = inspect.getsource(gluon_cases)
RUNS = [("late", "ttgir", 0), ("eager", "ttgir", 0), ("random", "ttgir", 1),
        ("late", "machine", 0), ("eager", "machine", 0), ("random", "machine", 2)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "level", "seed"), RUNS, ids=str)
@pytest.mark.parametrize("case", gluon_cases.CASES)
def test_values(case, schedule, level, seed):
    with emulator.run(schedule=schedule, level=level, seed=seed, collect=True) as run:
        result, right = gluon_cases.CASES[case]()
    assert [r.text() for r in run.reports] == []
    assert torch.equal(result, right)


@pytest.mark.parametrize(("kind", "dtype"), gluon_cases.combined(), ids=str)
def test_every_reduction(kind, dtype):
    with emulator.run() as run:
        result, right = gluon_cases.reduce(kind, dtype)
    assert run.reports == []
    assert torch.equal(result, right)


@pytest.mark.parametrize("corner", gluon_cases.CORNERS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank_may_lie_partly_outside(rank, corner):
    with emulator.run() as run:
        result, right = gluon_cases.boxes(rank, corner)
    assert run.errors == []
    assert torch.equal(result, right)


@pytest.mark.parametrize("n", [0, 1, 3, 511, 512, 513, 1023, 1024])
def test_tails_are_zeros(n):
    with emulator.run() as run:
        result, right = gluon_cases.tails(n)
    assert run.reports == []
    assert torch.equal(result, right)


BUGS = [
    # the case, what is replaced, by what, the kind of the report and a part of its line
    ("ring", "        cp.mbarrier_wait(full.index(slot), (i // STAGES) & 1)\n", "", "race",
     "tile.index(slot).load"),
    ("ring", "        cp.tma_store_wait(0)\n        out.store", "        out.store", "race",
     "out.store(value + 1)"),
    ("ring", "        cp.fence_proxy_async()\n        cp.thread_barrier()\n",
     "        cp.thread_barrier()\n", "proxy", "TMA load"),
    ("ring", "        cp.fence_proxy_async()\n        cp.tma_store(y_desc", "        cp.tma_store(y_desc",
     "proxy", "cp.tma_store(y_desc"),
    ("ring", "    cp.fence_barrier_init()\n    for i in gl.static_range(STAGES):\n",
     "    for i in gl.static_range(STAGES):\n", "barrier", "cp.tma_load(x_desc, [i * ROWS"),
    ("ring", "x_desc.block_type.nbytes, pred=more", "8, pred=more", "race|deadlock", "full.index(slot)"),
    ("tails", "    cp.cp_async_wait(1)\n", "", "race", "tile.index(0).load"),
    ("tails", "    cp.cp_async_wait(0)\n", "", "race", "tile.index(1).load"),
    ("tails", "        cp.cp_async_commit()\n", "", "race", "tile.index(0).load"),
    ("tails", ", mask=i * SIZE + at < n", "", "out-of-bounds", "cp.cp_async(tile"),
    ("arrivals", "    cp.mbarrier_wait(bars.index(0), 0)\n", "", "race", "piece.index(0).load"),
    ("arrivals", "    cp.mbarrier_cp_async_arrive_noinc(bars.index(0))\n", "", "deadlock",
     "cp.mbarrier_wait(bars.index(0)"),
    ("arrivals", "    cp.mbarrier_cp_async_arrive(bars.index(1))\n", "", "race",
     "piece.index(1).load"),
    ("arrivals", "    cp.mbarrier_arrive(bars.index(1), count=1)\n", "", "deadlock",
     "cp.mbarrier_wait(bars.index(1)"),
    ("arrivals", "bars.index(0), count=128", "bars.index(0), count=127", "barrier|race", "bars.index(0)"),
    ("hand_on", "read=False", "read=True", "race", "cp.tma_load(desc"),
    ("hand_on", "    cp.store_release(flag, 1)", "    gl.store(flag, 1)", "race", "flag"),
    ("publish", 'cp.fence_proxy_async("global")\n', 'cp.fence_proxy_async("shared")\n', "proxy",
     "cp.tma_load(desc"),
    ("publish", '    cp.fence_proxy_async("global")\n', "", "proxy", "cp.tma_load(desc"),
    ("meet", "    cp.named_barrier_sync(8, 256)\n", "", "race|deadlock|uninitialized|exit", "piece"),
    ("meet", "    cp.named_barrier_sync(9, 256)\n", "", "race|deadlock|exit", "piece"),
    ("meet", "    cp.mbarrier_wait(done.index(0), 0)\n    piece.store", "    piece.store", "race",
     "piece.store(gl.load(x_ptr + at))"),
    ("meet", "    cp.mbarrier_arrive_each_thread(done.index(0))\n", "", "deadlock", "cp.mbarrier_wait(done.index(0)"),
    ("meet", "    cp.named_barrier_arrive(9, 256)\n", "", "deadlock", "cp.named_barrier_sync(9, 256)"),
    ("meet", "cp.named_barrier_arrive(8, 256)", "cp.named_barrier_arrive(8, 128)", "barrier|deadlock|race", "8"),
    ("hand_on", "cp.load_acquire(flag)", "gl.load(flag, volatile=True)", "race", "cp.tma_load(desc"),
    ("ring", "        cp.mbarrier_invalidate(full.index(i))\n",
     "        cp.mbarrier_invalidate(full.index(i))\n        cp.mbarrier_wait(full.index(i), 0)\n", "barrier",
     "cp.mbarrier_wait(full.index(i), 0)"),
    ("slow_arrival", "    cp.mbarrier_wait(ready.index(0), 0)\n", "",
     "race|uninitialized|exit", "piece"),
    ("boxes", "    cp.mbarrier_wait(full.index(0), 0)\n    if rank == 1:\n        cp.tma_store", "    if rank == 1:\n        cp.tma_store", "race",
     "cp.tma_store(target, [0, 0], tile)"),
    ("reduce", "    cp.fence_proxy_async()\n    cp.tma_reduce", "    cp.tma_reduce", "proxy",
     "cp.tma_reduce"),
    ("reduce", "    cp.tma_reduce(desc, [0, 0], tile, KIND)\n", "    cp.tma_store(desc, [0, 0], tile)\n",
     "race", "cp.tma_store"),
]  # fmt: skip


# The file imports the vocabulary: reports name its functions, and barriers by their variable.
GLUON_NAMES = re.compile(r"fence_async_shared|tma\.|mbarrier\.|async_copy\.|bar\.|\bsmem\b")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug[0]}-{bug[1].strip()[:40]}")
def test_planted_bug_is_reported(bug, tmp_path):
    case, old, new, kinds, line = bug
    assert TEXT.count(old) >= 1
    module = load_text(case, TEXT.replace(old, new), tmp_path)
    with emulator.run(schedule="late", level="ttgir", collect=True) as run:
        module.CASES[case]()
    found = [r for r in run.reports if r.kind in kinds.split("|")]
    assert found, [r.text() for r in run.reports]
    assert any(line in r.text() for r in found), found[0].text()
    for r in run.reports:
        assert not GLUON_NAMES.search(r.message + r.hint + r.at.what), r.text()


def test_every_name_is_there_and_used_by_a_case():
    for name in cp.__all__:
        assert callable(getattr(cp, name))
        assert f"cp.{name}(" in TEXT, name
    assert importlib.import_module("tileloom.cpasync.gluon") is cp


def test_the_page_shows_the_example_and_what_it_is_told():
    page = (ROOT / "docs" / "cpasync_gluon.md").read_text()
    path = ROOT / "examples" / "07_asynchronous_copies.py"
    text = path.read_text()
    assert text[text.index("@gluon.jit") : text.index("\n\n\ndef main")] in page
    with emulator.run(collect=True) as run:
        runpy.run_path(str(path))["add_one"](torch.zeros(100, 200).half(), waits=False)
    assert f"```\ntileloom.emulator.report.RaceError: {run.errors[0].text()}\n```" in page
