"""docs/mutations.md says what is: every mutant of the kernels, each noticed or harmless."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulator import mutation_page
from tests.emulator.mutation_page import PAGE, SUBJECTS, Row
from tests.house import ROOT
from tileloom.emulator.judge import Verdict
from tileloom.emulator.mutate import mutants
from tileloom.emulator.synchronising import Helpers


def test_the_page_has_every_mutant_of_the_kernels():
    rows = mutation_page.read(PAGE.read_text())
    now = mutation_page.current()
    unjudged = [replace(row, noticed="") for row in rows]
    assert unjudged == now, f"run `{mutation_page.COMMAND} --new`"
    assert PAGE.read_text() == mutation_page.page(rows)


def test_every_mutant_is_noticed_or_harmless_for_a_reason():
    rows = mutation_page.read(PAGE.read_text())
    assert len(rows) > 60
    unnoticed = [r for r in rows if not r.noticed or r.noticed.strip("*").startswith("nobody")]
    assert [row.text() for row in unnoticed] == []
    assert [row.text() for row in rows if "does not run" in row.noticed] == []
    for subject in SUBJECTS:
        files = {path.relative_to(ROOT).as_posix() for path in subject.kernels}
        given = {
            (row.statement, row.mutation): row.noticed
            for row in rows
            if row.file in files and "harmless" in row.noticed
        }
        assert given == {key: f"harmless: {reason}" for key, reason in subject.harmless.items()}


def test_every_file_that_synchronises_is_on_the_page():
    there = {path for subject in SUBJECTS for path in subject.kernels}
    texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    texts = {path: text for path, text in texts.items() if "jit" in text}
    helpers = Helpers.of(texts.values())
    for path in texts.keys() - there:
        assert [m.source for m in mutants(texts[path], helpers)] == [], path


def test_rows_survive_being_written_and_read():
    row = Row(
        "src/a.py", 7, "load", 'mbarrier.wait(x | y, "|")', "phase inverted", "race at a.py:9; late"
    )
    text = f"### {row.file}\n\n{row.text()}\n"
    assert mutation_page.read(text) == [row]


def rows_of(*statements, function="load", first_line=10, noticed=""):
    """The rows of a function with these statements, a line each, every one removed."""
    lines = enumerate(statements, first_line)
    return [Row("src/a.py", line, function, s, f"removed {s}", noticed) for line, s in lines]


def unjudged(old, now):
    """The lines of rows whose verdict does not hold any more."""
    return [row.line for row in mutation_page.known(old, now) if not row.noticed]


def test_verdicts_move_with_their_statements():
    old = rows_of("wait", "fence", "arrive", noticed="race") + rows_of("wait", function="store")
    now = rows_of("wait", "fence", "arrive", first_line=30) + rows_of("wait", function="keep")
    assert mutation_page.known(old, now)[:3] == rows_of(
        "wait", "fence", "arrive", first_line=30, noticed="race"
    )
    assert unjudged(old, now) == [10]  # in another function it is another statement


def test_equal_statements_are_judged_again_when_one_is_inserted():
    """Whichever of them is the new one: the verdict of the old one may be wrong about it."""
    old = rows_of("init", "wait", "fence", "arrive", "exit", noticed="race")
    above = rows_of("init", "wait", "wait", "fence", "arrive", "exit")
    assert unjudged(old, above) == [11, 12]
    above = [replace(row, noticed="race") for row in above]
    assert unjudged(above, old) == [11]  # nor is it known which of them is gone
    below = rows_of("init", "wait", "fence", "arrive", "wait", "exit")
    assert unjudged(old, below) == [11, 13, 14, 15]  # and what has another neighbour
    moved = rows_of("init", "fence", "arrive", "wait", "exit")
    assert unjudged(old, moved) == [10, 11, 12, 13, 14]


def test_only_what_the_page_does_not_know_is_judged(monkeypatch):
    """`judged` asks for the verdicts that do not hold, and keeps the others."""
    subject = SUBJECTS[-1]
    monkeypatch.setattr(mutation_page, "SUBJECTS", (subject,))
    now = mutation_page.current()
    asked = []

    def verdicts(self, mutants, jobs):
        asked.extend(mutant.line for _, mutant in mutants)
        return [Verdict(path, mutant, "unnoticed") for path, mutant in mutants]

    monkeypatch.setattr(type(subject), "verdicts", verdicts)
    old = [replace(row, noticed="race") for row in now[:-1]]
    rows = mutation_page.judged(old, jobs=1)
    lost = mutation_page.known(old, now)
    assert 0 < len(asked) < len(now)
    assert asked == [row.line for row in lost if not row.noticed]
    assert [row.noticed for row in rows] == [row.noticed or "**nobody**" for row in lost]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_page_is_what_judging_every_mutant_gives():
    assert mutation_page.page(mutation_page.judged([], jobs=2)) == PAGE.read_text()
