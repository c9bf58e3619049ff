"""What a checked file prints is shown once, and of other runs what differs."""

from __future__ import annotations

import os

import pytest

from tileloom.cli.main import main
from tileloom.emulator.findings import settings
from tileloom.emulator.prints import Prints

FILE = """
import os
import sys
import torch
import triton
import triton.language as tl

print("imported")
runs = 0

@triton.jit
def add_one(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    tl.debug_barrier()
    tl.store(y + at, a + 1)

def main():
    global runs
    runs += 1
    x = torch.zeros(32, device="cuda")
    print("begun")
    y = torch.empty_like(x)
    add_one[(1,)](x, y, 32)
    print("to stderr", file=sys.stderr)
    os.system("echo from a process")
    AFTER
"""
SAME = "imported\nbegun\nto stderr\nfrom a process\n"
WAYS = settings(["late", "eager", "random"], [0], ["ttgir"])


def _check(tmp_path, after, *options):
    path = tmp_path / "prints.py"
    path.write_text(FILE.replace("AFTER", after))
    return main(["check", str(path), *options])


def test_what_each_run_prints_alike_is_shown_once(tmp_path, capsys):
    assert _check(tmp_path, "pass") == 0
    out, err = capsys.readouterr()
    assert err == SAME
    assert out == "add_one: 8 launches in 8 runs; 0 errors, 0 warnings and infos\n"


def test_a_run_that_differs_shows_how_and_each_way_once(tmp_path, capsys):
    after = "print('odd' if runs % 2 else 'even')"
    assert _check(tmp_path, after, "--level", "ttgir") == 0
    assert capsys.readouterr().err == (
        f"{SAME}odd\n[schedule eager, level ttgir: differs from the first run]\n-odd\n+even\n"
    )


def test_a_run_that_fails_shows_all_of_it(tmp_path, capsys):
    assert _check(tmp_path, "assert runs < 2", "--level", "ttgir") == 1
    out, err = capsys.readouterr()
    assert "(schedule eager, level ttgir):" in out
    rest = SAME.removeprefix("imported\n")
    assert err == f"{SAME}[schedule eager, level ttgir: this run failed, and printed]\n{rest}"


def test_what_was_printed_before_a_death_is_not_lost(tmp_path, capsys):
    assert _check(tmp_path, "if runs == 3: os.abort()", "--level", "ttgir") == 1
    _, err = capsys.readouterr()
    rest = SAME.removeprefix("imported\n")
    head = f"{SAME}[schedule random (seed 0), level ttgir: this run failed, and printed]\n{rest}"
    assert err.startswith(f"{head}Fatal Python error: Aborted\n")


def test_mutants_print_nothing(tmp_path, capsys):
    assert _check(tmp_path, "print(torch.is_tensor(y))", "--mutate", "--jobs", "1") == 1
    out, err = capsys.readouterr()
    assert out.endswith("1 mutants, 1 that nobody notices\n")
    assert err == f"{SAME}True\n"


def _shown(text, show, step=1 << 16):
    """Show a text with `<` and `>` for the begin and the end of a run, `!` for one that failed."""
    with Prints(WAYS, show) as prints:
        for letter, word in zip("<>!", ("begin", "end", "failed"), strict=True):
            text = text.replace(letter, f"\x1e{prints.nonce} {word}\x1e")
        data = text.encode()
        for at in range(0, len(data), step):
            os.write(prints.pipe.fileno(), data[at : at + step])


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_marks_and_letters_may_be_cut_anywhere(step):
    parts = []
    _shown(
        "before <import\n<één\x1e\n>between\n<één\x1e\n>\x1e<één\x1e\n!after\x1e",
        parts.append,
        step,
    )
    assert "".join(parts) == (
        "before import\néén\x1e\nbetween\n\x1e"
        "[schedule random (seed 0), level ttgir: this run failed, and printed]\néén\x1e\nafter\x1e"
    )


def test_long_texts_that_differ_are_shown_whole():
    long = "".join(f"{n}\n" for n in range(2001))
    parts = []
    _shown(f"<a\n>< {long}>", parts.append)
    where = "[schedule eager, level ttgir: differs from the first run]\n"
    assert "".join(parts) == f"a\n{where} {long}"


def test_nobody_who_reads_stops_nobody_who_prints():
    """More than a pipe holds, shown to one that is closed, and to none."""

    def closed(text):
        raise BrokenPipeError(text[:1])

    for show in (closed, None):
        _shown("<x" + "y\n" * 200_000 + ">", show)
