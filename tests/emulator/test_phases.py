"""Phases that a wait may miss, and barriers nobody waits for: how the reports read."""

from __future__ import annotations

import pytest

from tests.emulator import corpus, support
from tileloom import emulator


def text_of(name, tmp_path, severity="error"):
    bug = next(b for b in corpus.BUGS if b.id == name)
    module = support.planted(bug, tmp_path)
    with emulator.run(collect=True) as run:
        module.main()
    report = next(r for r in run.reports if r.severity == severity)
    return report.text().replace(module.__file__.rsplit("/", 1)[-1], f"{bug.case}.py").splitlines()


def test_text_of_a_phase_overrun(tmp_path):
    assert text_of("ticks-no-tock-wait", tmp_path) == [
        "[barrier] mbarrier tick completes its phase 1 before the wait for phase 0 is over: the "
        "wait knows the parity only, so it hangs, or passes with phase 2",
        "    at   ticks.py:19  | mbarrier.wait(tick, i & 1)   (mbarrier.wait by partition "
        "'listen', program (0, 0, 0))",
        "    vs   ticks.py:12  | mbarrier.arrive(tick, count=1)   (mbarrier.arrive by partition "
        "'strike', program (0, 0, 0))",
        "    hint let the waiter arrive, after this wait, at a barrier that is waited for before "
        "this one is signalled again",
        "    seen kernel ticks, schedule='late', seed=0, level='ttgir'",
    ]


def test_text_of_an_overrun_that_this_run_did_not_meet(tmp_path):
    first, *rest = text_of("specialised_gemm-wrong-slot-released", tmp_path)
    assert first == (
        "[barrier] mbarrier empty[1] may complete its phase 2 before the wait for phase 1, which "
        "nothing orders before it, is over: the wait knows the parity only, so it hangs, or passes "
        "with phase 3"
    )
    assert "mbarrier.wait(empty.index(slot), phase ^ 1)" in rest[0]


def test_text_of_a_parity_that_never_flips(tmp_path):
    *_, hint, _ = text_of("pipelined_gemm-phase-never-flips", tmp_path)
    assert hint == (
        "    hint this partition knows that phase to be over already: its parity is that of an old "
        "phase"
    )


def test_text_of_a_barrier_that_nobody_waits_for(tmp_path):
    assert text_of("ticks-nobody-waits-for-the-last", tmp_path, "warning") == [
        "[barrier] warning: mbarrier last is signalled, but nobody waits for it",
        "    at   ticks.py:22  | mbarrier.arrive(last, count=1)   (mbarrier.arrive by partition "
        "'listen', program (0, 0, 0))",
        "    vs   ticks.py:29  | last = gl.allocate_shared_memory(gl.int64, [1], "
        "mbarrier.MBarrierLayout())   (allocation)",
        "    hint it orders nothing: wait for it before what it guards is used, or leave it out",
        "    seen kernel ticks, schedule='late', seed=0, level='ttgir'",
    ]


def test_text_of_a_copy_that_nobody_waits_for(tmp_path):
    lines = text_of("specialised_gemm-loads-one-too-many", tmp_path)
    assert lines[0] == (
        "[exit] the program ends while a TMA load may still write its shared memory: nobody has "
        "waited for mbarrier full[2]"
    )
    assert "tma_load(a_desc" in lines[1]
    assert lines[2] == (
        "    hint wait for every copy that was issued, also one whose data is not needed"
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_a_load_passes_on_keeps_phases_apart(seed, monkeypatch):
    """The case is right only because a load completes after the wait that stands before it."""
    case = support.load_case("armed_copies")
    with emulator.run(schedule="random", seed=seed):
        case.main()
    monkeypatch.setattr("tileloom.emulator.phases.known", lambda partition: {})
    with pytest.raises(emulator.BarrierError, match="may complete its phase"):  # noqa: SIM117
        with emulator.run(schedule="random", seed=seed):
            case.main()
