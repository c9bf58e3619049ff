"""The fixture `emulated` and the marker `emulate`, in a pytest run of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

@pytest.mark.emulate(schedules=("late",), map_cuda=True)
def test_as_on_a_gpu():
    x, y = torch.ones(100, device="cuda"), torch.zeros(100).cuda()
    copy[(1,)](x, y, 100, 128)
    assert (y == 1).all()

@pytest.mark.emulate(schedules=("random",), seeds=(1, 2), levels=("ttir", "ttgir"))
def test_marked(emulated):
    assert emulated.options.schedule == "random"

def test_finds(emulated):
    copy[(1,)](torch.ones(100), torch.ones(100), 128, 128)

@pytest.mark.emulate(levels=("ttir",), schedules=("late",), sms=3)
class TestMarkerAlone:
    def test_alone(self):
        copy[(1,)](torch.ones(100), torch.ones(100), 100, 128)

    @pytest.mark.emulate(levels=("machine",))
    @pytest.mark.parametrize("n", [1, 100])
    def test_closest(self, n, emulated):
        copy[(1,)](torch.ones(n), torch.ones(n), n, 128)
        assert (emulated.options.level, emulated.target.sms) == ("machine", 3)
"""


def run_pytest(folder, text, *arguments):
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tileloom.emulator.pytest_plugin", "-q", "-rA",
         "-p", "no:cacheprovider", *(arguments or ["test_it.py"])],
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
    assert "PASSED test_it.py::test_as_on_a_gpu[ttgir-late]" in out
    assert "PASSED test_it.py::TestMarkerAlone::test_alone[ttir-late]" in out
    for n in (1, 100):
        assert f"PASSED test_it.py::TestMarkerAlone::test_closest[machine-late-{n}]" in out


REFUSED = {
    "schedule='late'": "'schedule' is not known; accepted are schedules, levels, seeds, arch, sms",
    "'late'": "'late' is not known; accepted are schedules, levels, seeds, arch, sms",
    "schedules='late'": "schedules is 'late'; it must be a tuple. Try: schedules=('late',).",
    "seeds=3": "seeds is 3; it must be a tuple. Try: seeds=(3,).",
    "levels=()": "levels is (); it must be a tuple. Try: levels=('ttgir',).",
    "schedules=('soon',)": "schedule='soon' is not known; accepted are late, eager, random.",
}


def test_wrong_marker_arguments_are_refused(tmp_path):
    for number, marker in enumerate(REFUSED):
        text = f"import pytest\n@pytest.mark.emulate({marker})\ndef test_it(emulated):\n    pass\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    said = run_pytest(
        tmp_path, "def test_it():\n    pass\n", ".", "--continue-on-collection-errors"
    )
    for marker, sentence in REFUSED.items():
        assert sentence in said.stdout, marker
    assert "1 passed, 6 errors" in said.stdout
