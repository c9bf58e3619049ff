"""The fixture `emulated` and the marker `emulate`, in a pytest run of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

def test_default(emulated):
    x, y = torch.ones(100), torch.zeros(100)
    copy[(1,)](x, y, 100, 128)
    assert (y == 1).all() and emulated.reports == []

@pytest.mark.emulate(schedules=("random",), seeds=(1, 2), levels=("ttir", "ttgir"))
def test_marked(emulated):
    assert emulated.options.schedule == "random"

def test_finds(emulated):
    copy[(1,)](torch.ones(100), torch.ones(100), 128, 128)
"""


def run_pytest(folder, text):
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tileloom.emulator.pytest_plugin", "-q", "-rA",
         "-p", "no:cacheprovider", "test_it.py"],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:" + ":".join(sys.path), "PATH": "/usr/bin:/bin",
             "OPENBLAS_NUM_THREADS": "1", "HOME": str(folder)},
    )  # fmt: skip


def test_fixture_runs_each_schedule_and_raises_on_errors(tmp_path):
    out = run_pytest(tmp_path, FILE).stdout
    for way in ("ttgir-late", "ttgir-eager", "ttgir-random0"):
        assert f"PASSED test_it.py::test_default[{way}]" in out
        assert f"FAILED test_it.py::test_finds[{way}]" in out
    for way in ("ttir-random1", "ttir-random2", "ttgir-random1", "ttgir-random2"):
        assert f"PASSED test_it.py::test_marked[{way}]" in out
    assert "OutOfBoundsError" in out


@pytest.mark.parametrize("marker", ["schedule='late'", "'late'"])
def test_unknown_marker_arguments_are_refused(marker, tmp_path):
    text = f"import pytest\n@pytest.mark.emulate({marker})\ndef test_it(emulated):\n    pass\n"
    result = run_pytest(tmp_path, text)
    assert result.returncode != 0
    assert "is not known; accepted are schedules, levels, seeds" in result.stdout + result.stderr
