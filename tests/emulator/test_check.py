"""`tileloom check`: files of each kind, CUDA devices mapped, mutants judged, output forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.emulator import support
from tileloom.cli.main import main
from tileloom.emulator import LaunchError
from tileloom.emulator.check import Setting, check_file, settings
from tileloom.emulator.devices import cuda_on_cpu
from tileloom.emulator.mutate import judge, mutants
from tileloom.target import H100

KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def shift(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < LIMIT, other=5.0)
    tl.store(y_ptr + at, x + 1, mask=at < n)

"""
SCRIPT = """
x = torch.zeros(100, device="cuda")
y = torch.empty_like(x)
assert x.is_cuda and torch.cuda.is_available()
shift[(1,)](x, y, 100, 128)
torch.cuda.synchronize()
assert (y == 1).all()
"""
TEST = """
def test_shift():
    x = torch.zeros(100).to("cuda")
    y = torch.zeros(100, device=torch.device("cuda", 0))
    shift[(1,)](x, y, 100, 128)
    torch.testing.assert_close(y, torch.ones(100, device="cuda"))
"""
MAIN = """
def main():
    x = torch.zeros(100).cuda()
    y = torch.zeros_like(x)
    shift[(1,)](x, y, 100, 128)
"""
FORMS = {"script.py": SCRIPT, "test_shift.py": TEST, "module.py": MAIN}
ONCE = [Setting("late", 0, "ttgir")]


def write(folder, name, body, limit="n"):
    path = folder / name
    path.write_text(KERNEL.replace("LIMIT", limit) + body)
    return path


@pytest.mark.parametrize("name", FORMS)
def test_a_correct_file_passes(name, tmp_path):
    result = check_file(write(tmp_path, name, FORMS[name]), ONCE)
    assert (result.findings, result.failures) == ([], [])
    assert result.kernels == {"shift"}


@pytest.mark.parametrize("name", FORMS)
def test_a_bug_is_found_whatever_the_form(name, tmp_path):
    result = check_file(write(tmp_path, name, FORMS[name], limit="n + 9"), ONCE)
    assert [f.report.kind for f in result.errors] == ["out-of-bounds"]
    assert result.errors[0].report.line == 9


def test_a_failing_assertion_of_the_file_is_a_failure(tmp_path):
    result = check_file(write(tmp_path, "script.py", SCRIPT, limit="n - 9"), ONCE)
    assert result.errors == []
    assert "AssertionError" in result.failures[0][1]


def test_a_file_without_a_launch_is_refused(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("def main():\n    pass\n")
    with pytest.raises(LaunchError, match="launched no kernel"):
        check_file(path, ONCE)
    with pytest.raises(LaunchError, match="there is no file"):
        check_file(tmp_path / "missing.py", ONCE)


def test_reports_are_kept_once_over_all_settings(tmp_path):
    path = write(tmp_path, "module.py", MAIN, limit="n + 9")
    ways = settings(["late", "random"], [1, 2], ["ttir", "ttgir"])
    assert len(ways) == 6
    result = check_file(path, ways)
    assert len(result.errors) == 1
    assert result.launches == 6
    assert result.errors[0].setting == ways[0]


def test_kernel_filter(tmp_path):
    path = write(tmp_path, "module.py", MAIN, limit="n + 9")
    assert check_file(path, ONCE, kernel="other").findings == []
    assert len(check_file(path, ONCE, kernel="shift").findings) == 1


def test_command_line_exit_status_and_the_command_to_repeat(tmp_path, capsys):
    good = write(tmp_path, "module.py", MAIN)
    bad = write(tmp_path, "bad.py", MAIN, limit="n + 9")
    assert main(["check", str(good), "--schedule", "late", "--level", "ttgir"]) == 0
    assert "shift: 1 launches in 1 runs; 0 errors, 0 warnings and infos" in capsys.readouterr().out
    assert main(["check", str(bad), "--schedule", "random", "--seed", "5", "--level", "ttir"]) == 1
    text = capsys.readouterr().out
    assert (
        f"again: tileloom check {bad} --schedule random --seed 5 --level ttir --arch sm_90a --sms 4"
        in text
    )
    assert main(["check", str(tmp_path / "none.py")]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_json_and_github_output(tmp_path, capsys):
    bad = write(tmp_path, "bad.py", MAIN, limit="n + 9")
    options = ["--schedule", "late", "--level", "ttgir"]
    assert main(["check", str(bad), *options, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["kernels"] == ["shift"]
    assert data["reports"][0]["at"]["loc"]["line"] == 9
    assert data["reports"][0]["command"].startswith("tileloom check ")
    assert main(["check", str(bad), *options, "--github"]) == 1
    assert capsys.readouterr().out.startswith(
        f"::error file={bad},line=9,title=tileloom out-of-bounds"
    )


def test_timeline_option_writes_a_trace(tmp_path):
    good = write(tmp_path, "module.py", MAIN)
    out = tmp_path / "trace.json"
    assert (
        main(["check", str(good), "--schedule", "late", "--level", "ttgir", "--timeline", str(out)])
        == 0
    )
    assert json.loads(out.read_text())["traceEvents"]


def test_cuda_devices_mean_the_cpu_inside_only():
    with cuda_on_cpu(H100):
        x = torch.ones(2, 3, device="cuda:0", pin_memory=False)
        assert x.device.type == "cpu"
        assert x.is_cuda
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.empty_like(x, device="cuda").shape == (2, 3)
        assert x.to("cuda", torch.float16).dtype == torch.float16
        torch.manual_seed(0)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
    assert not torch.ones(1).is_cuda
    assert torch.cuda.Event is not type(start)


CASE = Path(support.CASES)


def changes_of(case):
    return mutants((CASE / f"{case}.py").read_text())


def test_mutants_cover_every_synchronising_statement():
    found = changes_of("specialised_gemm")
    assert len(found) == len({m.text for m in found})
    changes = {m.change for m in found}
    assert changes >= {
        "removed wait", "removed arrive", "removed expect", "removed init",
        "removed fence_async_shared",
        "removed store_wait", "phase inverted", "predicate removed", "count of init one higher",
        "count of arrive one higher", "store_wait leaves one more in flight",
        "warpgroup_mma_wait leaves one more in flight", "half the bytes expected",
    }  # fmt: skip
    assert {"ld.acquire made relaxed", "st.release made relaxed"} <= {
        m.change for m in changes_of("flag_chain")
    }
    assert "memory order made relaxed" in {m.change for m in changes_of("split_sum")}


def test_mutants_leave_the_rest_of_the_file_alone():
    text = (CASE / "shared_exchange.py").read_text()
    for mutant in changes_of("shared_exchange"):
        before, after = text.splitlines(), mutant.text.splitlines()
        differing = [i for i, (a, b) in enumerate(zip(before, after), 1) if a != b]
        assert differing == [mutant.line]
        assert len(before) == len(after)


WAYS = settings(["late", "random"], [0], ["ttgir"])


@pytest.mark.parametrize("case", ["shared_exchange", "flag_chain", "split_sum"])
def test_every_mutant_of_a_case_is_noticed(case, tmp_path):
    path = CASE / f"{case}.py"
    verdicts = [judge(m, path, WAYS, tmp_path) for m in mutants(path.read_text())]
    assert len(verdicts) >= 1
    assert [(v.mutant.line, v.mutant.change) for v in verdicts if v.outcome != "reported"] == []


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ["pipelined_gemm", "specialised_gemm", "copied_gemm", "named_barriers"]
)
def test_every_mutant_of_a_large_case_is_noticed_or_harmless(case, tmp_path):
    path = CASE / f"{case}.py"
    verdicts = [judge(m, path, WAYS, tmp_path) for m in mutants(path.read_text())]
    assert [(v.mutant.line, v.mutant.change) for v in verdicts if not v.noticed] == []
    assert sum(v.outcome == "reported" for v in verdicts) > 0.8 * len(verdicts)


def test_mutants_of_a_module_that_the_file_imports(tmp_path, monkeypatch, capsys):
    library = tmp_path / "borrowed_kernels.py"
    text = (CASE / "shared_exchange.py").read_text()
    library.write_text(text[: text.index("def main(")])
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import borrowed_kernels, torch\n"
        + text[text.index("def main(") :].replace(
            "shared_exchange[", "borrowed_kernels.shared_exchange["
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--schedule", "late", "--level", "ttgir", "--mutate", "--kernels", str(library)]
    assert main(["check", str(driver), *options]) == 0
    out = capsys.readouterr().out
    assert "borrowed_kernels.py:14  removed wait" in out
    assert out.strip().endswith("12 mutants, 0 that nobody notices")
    assert main(["check", str(driver), "--schedule", "late", "--level", "ttgir"]) == 0


def test_kernels_that_the_file_does_not_import_are_refused(tmp_path, capsys):
    path = write(tmp_path, "module.py", MAIN)
    options = ["--mutate", "--schedule", "late", "--level", "ttgir"]
    assert main(["check", str(path), *options, "--kernels", str(CASE / "names.py") + "x"]) == 1
    assert "is not a module that the checked file imports" in capsys.readouterr().err


def test_an_unnoticed_mutant_fails_the_command_unless_it_is_marked(tmp_path, capsys):
    body = """
import torch, triton, triton.language as tl

@triton.jit
def lonely(x_ptr):
    tl.atomic_add(x_ptr, 1, sem="release")MARK

def main():
    lonely[(1,)](torch.zeros(1, dtype=torch.int32))
"""
    options = ["--mutate", "--schedule", "late", "--level", "ttgir"]
    path = tmp_path / "lonely.py"
    path.write_text(body.replace("MARK", ""))
    assert main(["check", str(path), *options]) == 1
    assert "UNNOTICED" in capsys.readouterr().out
    path.write_text(body.replace("MARK", "  # tileloom: harmless(nobody reads x)"))
    assert main(["check", str(path), *options]) == 0
    assert "harmless: nobody reads x" in capsys.readouterr().out
