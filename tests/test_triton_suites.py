"""scripts/triton_suites.py, on a checkout with tests of our own in the form of Triton's."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "triton_suites.py"

TUTORIAL = """
import pytest
import torch
import triton
from triton._C.libtriton import nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

nvidia.cublas.CublasLt(torch.empty(4, device="cuda"))  # as Triton's tutorials do


@gluon.jit
def copy_kernel(x_ptr, y_ptr, n, N: gl.constexpr, MASKED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, N, layout)
    mask = at < n if MASKED else at >= 0
    gl.store(y_ptr + at, gl.load(x_ptr + at, mask=mask, other=0.0), mask=at < n)


def is_hopper():
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(not is_hopper(), reason="Requires Hopper")
@pytest.mark.parametrize("masked", [True, False])
def test_copy(masked):
    x = torch.randn(100, device="cuda")
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y, 100, 128, masked)
    torch.testing.assert_close(y, x)


def test_wrong():
    x = torch.ones(100, device="cuda")
    copy_kernel[(1,)](x, torch.empty_like(x), 100, 128, True)
    assert x.sum() == 99


@pytest.mark.skipif(is_hopper(), reason="Requires another card")
def test_elsewhere():
    raise AssertionError
"""

CONSAN = """
import multiprocessing

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


def run_in_process(function, args):
    raise AssertionError("no process is started")


@gluon.jit
def reader(smem, bar, out_ptr, WAIT: gl.constexpr, L: gl.constexpr):
    if WAIT:
        mbarrier.wait(bar, 0)
    gl.store(out_ptr + gl.arange(0, 128, L), smem.load(L))


@gluon.jit
def writer(smem, bar, L: gl.constexpr, ARRIVE: gl.constexpr):
    smem.store(gl.arange(0, 128, L))
    if ARRIVE:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def handoff(out_ptr, WAIT: gl.constexpr, ARRIVE: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.int32, [128], S)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [(reader, (smem, bar, out_ptr, WAIT, L)), (writer, (smem, bar, L, ARRIVE))], [4], [32]
    )


def launch(device, wait, arrive):
    handoff[(1,)](torch.empty(128, dtype=torch.int32, device=device), wait, arrive)


WORDS = "Buffer being accessed has outstanding writes"


@pytest.mark.parametrize("FAILURE", [True, False])
def test_handoff(FAILURE, device):
    result = run_in_process(launch, (device, not FAILURE, True))
    if FAILURE:
        assert "device-side assert" in str(result.exc)
        assert WORDS in result.driver_stderr_output
    else:
        assert result.exc is None
        assert result.driver_stderr_output == ""


def test_expects_a_bug_where_there_is_none(device):
    result = run_in_process(launch, (device, True, True))
    assert "device-side assert" in str(result.exc)


def test_expects_another_bug(device):
    result = run_in_process(launch, (device, True, False))
    assert "device-side assert" in str(result.exc)
    assert WORDS in result.driver_stderr_output


def test_expects_nothing(device):
    result = run_in_process(launch, (device, False, True))
    assert result.exc is None


def test_looks_at_nothing(device):
    run_in_process(launch, (device, False, True))


def test_launches_nothing(device):
    run_in_process(int, ())


def test_never_ends(device):
    while True:
        pass
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("triton_suites", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_suites"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("triton")
    tutorials = root / "python" / "tutorials" / "gluon"
    suite = root / "python" / "test" / "gluon"
    for folder in (tutorials, suite):
        folder.mkdir(parents=True)
    (tutorials / "01-copy.py").write_text(TUTORIAL)
    (suite / "test_consan.py").write_text(CONSAN)
    return root


def rows(script, checkout, file, expression="", seconds=60.0):
    plugin = script.Plugin(script.settings(["late", "random"], [0], ["ttgir"]), seconds)
    script.run_suite(checkout, [checkout / file], plugin, expression)
    return {row.test: (row.outcome, row.detail) for row in plugin.rows}


def test_tutorials_are_judged(script, checkout):
    found = rows(script, checkout, "python/tutorials/gluon/01-copy.py")
    assert {test: outcome for test, (outcome, _) in found.items()} == {
        "test_copy[True]": "clean",
        "test_copy[False]": "reported",
        "test_wrong": "failed",
        "test_elsewhere": "skipped",
    }
    assert found["test_copy[False]"][1].startswith("[out-of-bounds] load outside of 'x_ptr'")
    assert found["test_elsewhere"][1] == "Skipped: Requires another card"


def test_what_a_test_of_consan_expects_is_compared_with_the_reports(script, checkout):
    found = rows(script, checkout, script.CONSAN, "not ends")
    assert {test: outcome for test, (outcome, _) in found.items()} == {
        "test_handoff[True]": "found",
        "test_handoff[False]": "clean",
        "test_expects_a_bug_where_there_is_none": "missed",
        "test_expects_another_bug": "other kind",
        "test_expects_nothing": "false report",
        "test_looks_at_nothing": "false report",
        "test_launches_nothing": "refused",
    }
    assert found["test_handoff[True]"][1].startswith("[race] shared buffer smem")
    assert found["test_expects_another_bug"][1].startswith("[deadlock]")


def test_a_test_that_takes_too_long_is_stopped(script, checkout):
    found = rows(script, checkout, script.CONSAN, "ends", seconds=0.2)
    assert found == {"test_never_ends": ("too long", "over 0.2 s")}


def test_the_table_goes_to_a_file_and_the_status_says_whether_all_is_well(
    script, checkout, tmp_path, capsys
):
    good = tmp_path / "good.md"
    arguments = [str(checkout), "--only", "consan", "--markdown", str(good)]
    assert script.main([*arguments, "-k", "test_handoff"]) == 0
    assert "| file | clean | found |\n|---|---|---|\n| test_consan.py | 1 | 1 |" in good.read_text()
    assert script.main([*arguments, "-k", "test_looks"]) == 1
    printed = capsys.readouterr().out
    assert "- test_consan.py, false report: [race] shared buffer smem" in printed
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "has no python/tutorials/gluon" in capsys.readouterr().err
