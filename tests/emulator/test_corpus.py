"""Correct cases run without a report under every schedule and level; bugs are reported."""

from __future__ import annotations

import pytest

from tests.emulator import corpus, support
from tileloom import emulator

RUNS = [("late", "ttgir", 0), ("eager", "ttgir", 0), ("random", "ttgir", 1), ("random", "ttgir", 2),
        ("late", "machine", 0), ("random", "machine", 3)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "level", "seed"), RUNS, ids=lambda x: str(x))
@pytest.mark.parametrize("case", corpus.CASES)
def test_correct_case_is_right_and_silent(case, schedule, level, seed):
    module = support.load_case(case)
    with emulator.run(schedule=schedule, level=level, seed=seed, collect=True) as run:
        result, expected = module.main()
    assert [r.text() for r in run.reports] == []
    assert support.close(result, expected)
    assert run.launches[0].global_accesses > 0


@pytest.mark.parametrize("bug", corpus.BUGS, ids=lambda bug: bug.id)
def test_planted_bug_is_reported_first(bug, tmp_path):
    module = support.planted(bug, tmp_path)
    with emulator.run(schedule="late", collect=True, level=bug.level) as run:
        module.main()
    found = [r for r in run.reports if r.severity == bug.severity]
    assert found, "nothing was reported"
    kinds = bug.kind.split("|")
    assert found[0].kind in kinds
    assert any(r.kind in kinds and bug.line in r.text() for r in found)
    assert bug.severity == "error" or run.errors == []


@pytest.mark.skipif(not corpus.MENDED, reason="this Triton's compiler mends none of the bugs")
def test_what_the_compiler_mends_is_no_bug(tmp_path):
    for bug in corpus.MENDED:
        module = support.planted(bug, tmp_path)
        with emulator.run(schedule="late", collect=True) as run:
            module.main()
        assert run.errors == []


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("bug", corpus.BUGS[::6], ids=lambda bug: bug.id)
def test_planted_bug_is_reported_under_any_schedule(bug, schedule, tmp_path):
    module = support.planted(bug, tmp_path)
    with emulator.run(schedule=schedule, collect=True, level=bug.level, seed=5) as run:
        module.main()
    found = [r for r in run.reports if r.severity == bug.severity]
    assert any(r.kind in bug.kind.split("|") for r in found)


def test_the_corpus_is_large_and_covers_every_kind():
    assert len({bug.id for bug in corpus.BUGS}) == len(corpus.BUGS) >= 60
    kinds = {kind for bug in corpus.BUGS for kind in bug.kind.split("|")}
    assert kinds >= {
        "race", "proxy", "deadlock", "barrier", "uninitialized", "out-of-bounds", "pending", "exit",
    }  # fmt: skip


def test_the_first_error_raises_with_its_report(tmp_path):
    bug = next(b for b in corpus.BUGS if b.name == "no-store-fence")
    module = support.planted(bug, tmp_path)
    with pytest.raises(emulator.ProxyError) as caught, emulator.run():
        module.main()
    assert caught.value.report.kind == "proxy"
    assert "fence_async_shared" in str(caught.value)
