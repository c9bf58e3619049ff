"""Which findings of a check stand in its list: alike ones of several cases, and rings."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.emulator import support
from tileloom.cli.main import main

LATE = ["--schedule", "late", "--level", "ttgir"]
GEMM = (support.CASES / "specialised_gemm.py").read_text()
CASES = """

CASES = {
    "two": lambda: main(stages=2), "three": lambda: main(stages=3),
    "again": lambda: main(stages=3, programs=2), "four": lambda: main(stages=4),
}
"""


def faulty(folder):
    """A file whose cases hang at the same line: too many bytes, no release (twice); one is good."""
    text = GEMM + CASES
    for old, new in (
        ("b_desc.block_type.nbytes)", "b_desc.block_type.nbytes + (64 if STAGES == 2 else 0))"),
        ("count=1, pred=k > 0)", "count=1, pred=(k > 0) & (STAGES != 3))"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "faulty.py"
    path.write_text(text)
    return path


def test_a_fault_of_another_case_that_looks_alike_is_shown(tmp_path, capsys):
    assert main(["check", str(faulty(tmp_path)), *LATE, "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)["reports"]
    hangs = [r for r in reports if r["kind"] == "deadlock"]
    assert len({(r["message"], r["at"]["loc"]["line"]) for r in hangs}) == 1
    assert [(r["case"], r["also_in"]) for r in hangs] == [("two", []), ("three", ["again"])]
    assert "mbarrier full[0] expects 64 bytes that no copy brings" in hangs[0]["hint"]
    assert "mbarrier empty[0] lacks 1 of the 1 arrivals" in hangs[1]["hint"]
    assert hangs[1]["command"].endswith("--case three")


def test_the_other_cases_of_a_finding_stand_in_text_and_annotation(tmp_path, capsys):
    path = faulty(tmp_path)
    assert main(["check", str(path), *LATE]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"    also in (.*)\n    again: .*--case (.*)\n", out) == [("again", "three")]
    assert main(["check", str(path), *LATE, "--github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("%0A    also in again") for line in lines if "deadlock" in line] == [
        False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["two", "three"])
def test_of_a_launch_that_hangs_nothing_is_said_that_its_end_would_tell(case, tmp_path, capsys):
    assert main(["check", str(faulty(tmp_path)), *LATE, "--case", case]) == 1
    out = capsys.readouterr().out
    assert "[deadlock]" in out
    assert "second phase" not in out
    assert "nobody waits for it" not in out


def test_a_ring_that_no_run_uses_twice_is_an_info(tmp_path, capsys):
    text = (support.CASES / "specialised_gemm.py").read_text()
    path = tmp_path / "short.py"
    path.write_text(text.replace("k=224, stages=3, programs=4", "k=32, stages=3, programs=6"))
    assert main(["check", str(path), *LATE]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "[barrier] info: no mbarrier of full (3 of them) completes a second phase in any run: what "
        "happens when the ring is reused is not tested\n    at   short.py:71  | full = "
    )
    assert "    hint take sizes with at least 7 steps\n" in out
    assert "2 warnings and infos" in out
    path.write_text(path.read_text() + '\n\nCASES = {"short": main}\n')
    assert main(["check", str(path), *LATE]) == 0
    (again,) = set(re.findall(r"again: tileloom (.*)", capsys.readouterr().out))
    assert again.endswith("--case short")
    assert main(shlex.split(again)) == 0
    assert capsys.readouterr().out.startswith(out[: out.index("    again:")])
    path.write_text(text)
    assert main(["check", str(path), *LATE]) == 0
    assert capsys.readouterr().out.startswith("specialised_gemm: 1 launches")
