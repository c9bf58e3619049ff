"""docs/mutations.md says what is: every mutant of the kernels, each noticed or harmless."""

from __future__ import annotations

import pytest

from tests.emulator import mutation_page
from tests.emulator.mutation_page import PAGE, SUBJECTS, Row
from tests.house import ROOT


def test_the_page_has_every_mutant_of_the_kernels():
    rows = mutation_page.read(PAGE.read_text())
    now = [row.place for row in mutation_page.current()]
    assert [row.place for row in rows] == now, f"run `{mutation_page.COMMAND} --new`"
    assert PAGE.read_text() == mutation_page.page(rows)


def test_every_mutant_is_noticed_or_harmless_for_a_reason():
    rows = mutation_page.read(PAGE.read_text())
    assert len(rows) > 60
    assert [row.text() for row in rows if not row.noticed or "nobody**" in row.noticed] == []
    assert [row.text() for row in rows if "does not run" in row.noticed] == []
    for subject in SUBJECTS:
        files = {path.relative_to(ROOT).as_posix() for path in subject.kernels}
        given = {
            (row.statement, row.mutation): row.noticed
            for row in rows
            if row.file in files and "harmless" in row.noticed
        }
        assert given == {key: f"harmless: {reason}" for key, reason in subject.harmless.items()}


def test_rows_survive_being_written_and_read():
    row = Row("src/a.py", 7, 'mbarrier.wait(x | y, "|")', "phase inverted", "race at a.py:9; late")
    text = f"### {row.file}\n\n{row.text()}\n"
    assert mutation_page.read(text) == [row]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_page_is_what_judging_every_mutant_gives():
    assert mutation_page.page(mutation_page.judged([], jobs=2)) == PAGE.read_text()
