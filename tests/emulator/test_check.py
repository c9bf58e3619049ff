"""`tileloom check`: files of each kind, CUDA devices mapped, output forms, processes that die."""

from __future__ import annotations

import itertools
import json
import re
import shlex

import pytest
import torch

from tileloom.cli.main import main
from tileloom.emulator.check import Playing, check_file, check_in_child
from tileloom.emulator.devices import cuda_on_cpu
from tileloom.emulator.findings import Setting, settings
from tileloom.emulator.report import annotation
from tileloom.errors import OptionError
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
OTHER = """
@triton.jit
def other(y_ptr):
    tl.store(y_ptr, 2.0)
"""
FORMS = {"script.py": SCRIPT, "test_shift.py": TEST, "module.py": MAIN}
ONCE = [Setting("late", 0, "ttgir")]
LATE = ["--schedule", "late", "--level", "ttgir"]


_count = itertools.count()


def write(folder, name, body, limit="n"):
    """A file of a name of its own: pytest imports one of a name only, in one process."""
    path = folder / name.replace(".py", f"_{next(_count)}.py")
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


FIXTURE = """
import pytest
pytest_plugins = ["tileloom.emulator.pytest_plugin"]

@pytest.mark.emulate(schedules=("eager",), sms=3)
def test_shift(emulated):
    assert (emulated.options.schedule, emulated.target.sms) == ("late", 4)
    y = torch.zeros(100)
    shift[(1,)](torch.zeros(100), y, 100, 128)

@pytest.mark.emulate
def test_marker_alone():
    y = torch.zeros(100)
    shift[(1,)](torch.zeros(100), y, 100, 128)
"""


@pytest.mark.parametrize("text", [FIXTURE, FIXTURE.replace("pytest_plugins", "unused")])
def test_a_file_with_the_fixture_serves_both(text, tmp_path):
    """The check has chosen the schedule: the fixture gives its run, the marker says nothing."""
    good = check_file(write(tmp_path, "test_fixture.py", text), ONCE)
    assert (good.findings, good.failures, good.launches) == ([], [], 2)
    bad = check_file(write(tmp_path, "test_fixture.py", text, limit="n + 9"), ONCE)
    assert [(f.report.kind, f.case) for f in bad.errors] == [("out-of-bounds", "test_shift")]
    assert bad.failures == []


def test_a_failing_assertion_of_the_file_is_a_failure(tmp_path):
    result = check_file(write(tmp_path, "script.py", SCRIPT, limit="n - 9"), ONCE)
    assert result.errors == []
    assert result.failures[0].kind == "wrong"
    assert "AssertionError" in result.failures[0].text


def test_a_file_without_a_launch_is_refused(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("def main():\n    pass\n")
    with pytest.raises(OptionError) as caught:
        check_file(path, ONCE)
    assert str(caught.value) == (
        f"emulator: {path} launched no kernel. Try: a main() or CASES that do, or a test."
    )
    with pytest.raises(OptionError, match="there is no file"):
        check_file(tmp_path / "missing.py", ONCE)


@pytest.mark.parametrize(
    "made", ["CUDAGraph()", "graph(None)", "make_graphed_callables(print, ())"]
)
def test_cuda_graphs_are_refused_by_name(tmp_path, made):
    path = tmp_path / "graphs.py"
    path.write_text(f"import torch\n\n\ndef main():\n    torch.cuda.{made}\n")
    (failure,) = check_file(path, ONCE).failures
    assert failure.kind == "raised"
    assert failure.text.endswith(
        "UnsupportedError: emulator: CUDA graphs (torch.cuda.CUDAGraph, graph, "
        "make_graphed_callables) are not emulated: each launch is played when it is made. Try: "
        "call what the graph would capture.\n"
    )


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("def main(:", [], "FILE is not Python: invalid syntax (odd.py, line 1)."),
        ("\xff", [], "FILE is not Python: (unicode error) 'utf-8' codec can't decode byte 0xff"),
        ("CASES = [1]", [], "CASES of FILE is a list; it must map names to functions without"),
        ("def main():\n    pass", ["--case", "a"], "FILE has no CASES, so no case 'a'. Try: no"),
        ("CASES = {}", ["--case", "a"], "FILE has no CASES, so no case 'a'. Try: no --case."),
        ("1", ["--case", "a"], "FILE has no CASES, so no case 'a'. Try: no --case."),
        ("1", ["--timeline", "/none/t.json"], "there is no folder /none to write the timeline to."),
        ("1", ["--mutate", "--kernels", "none.py"], "there is no file none.py."),
        ("def main(:", ["--mutate"], "FILE is not Python: invalid syntax (odd.py, line 1)."),
        ("\xff", ["--mutate"], "FILE is not Python: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_sentence(text, options, sentence, tmp_path, capsys):
    path = tmp_path / "odd.py"
    path.write_bytes(text.encode("latin-1"))
    assert main(["check", str(path), *LATE, *options]) == 2
    said = capsys.readouterr()
    assert sentence.replace("FILE", str(path)) in said.err


def test_a_path_that_is_no_file_gets_the_nearest(tmp_path):
    (tmp_path / "ring.py").write_text("")
    with pytest.raises(OptionError, match=r"there is no file .*/ring\. Try: .*/ring\.py\.$"):
        check_file(tmp_path / "ring", ONCE)
    for far in ("nope.py", "nope"):  # what all files' names end with makes no two alike
        with pytest.raises(OptionError, match=rf"there is no file .*/{far}\.$"):
            check_file(tmp_path / far, ONCE)
    with pytest.raises(OptionError, match=r"is a folder\. Try: one of its files\.$"):
        check_file(tmp_path, ONCE)


FAILING = """
def main():
    y = torch.zeros(100)
    shift[(1,)](torch.zeros(100), y, 100, 128)
    assert y[0] == 7, "seven"
"""


def test_a_files_own_failure_shows_its_frames_and_is_annotated_once(tmp_path, capsys):
    path = write(tmp_path, "failing.py", FAILING)
    assert main(["check", str(path), "--level", "ttgir", "--seeds", "1", "--github"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "AssertionError: seven" in line
    assert line.endswith("under schedule late, level ttgir and 2 other settings")
    assert "emulator/check.py" not in line


def test_a_kernel_that_nobody_launched_is_told_after_one_run(tmp_path):
    path = write(tmp_path, "module.py", MAIN)
    runs = []
    with pytest.raises(OptionError, match="launched no kernel 'shft'"):
        check_file(path, settings(["late", "eager"], [0], ["ttgir"]), kernel="shft",
                   say=runs.append)  # fmt: skip
    assert sum(isinstance(run, Playing) and not run.kernel for run in runs) == 1


def test_reports_are_kept_once_over_all_settings(tmp_path):
    path = write(tmp_path, "module.py", MAIN, limit="n + 9")
    ways = settings(["late", "random"], [1, 2], ["ttir", "ttgir"])
    assert len(ways) == 6
    result = check_file(path, ways)
    assert len(result.errors) == 1
    assert result.launches == 6
    assert result.errors[0].setting == ways[0]


def test_kernel_filter(tmp_path):
    path = write(tmp_path, "two.py", OTHER + MAIN + "    other[(1,)](y)\n", limit="n + 9")
    assert check_file(path, ONCE, kernel="other").findings == []
    (finding,) = check_file(path, ONCE, kernel="shift").findings
    assert str(finding.report) == finding.report.text()
    with pytest.raises(
        OptionError, match=r"launched no kernel 'shft'; it launched other, shift\. Try: .*:shift\.$"
    ):
        check_file(path, ONCE, kernel="shft")
    assert main(["check", f"{path}:shft", *LATE]) == 2


def test_command_line_exit_status(tmp_path, capsys):
    good = write(tmp_path, "module.py", MAIN)
    assert main(["check", str(good), *LATE]) == 0
    assert "shift: 1 launches in 1 runs; 0 errors, 0 warnings and infos" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_options_out_of_range_are_refused(tmp_path, capsys):
    good = str(write(tmp_path, "module.py", MAIN))
    for option in ("--seeds", "--sms", "--jobs", "--timeout"):
        with pytest.raises(SystemExit, match="2"):
            main(["check", good, option, "0"])
        assert f"{option}: '0' is not a whole number of at least 1" in capsys.readouterr().err
    assert main(["check", good, "--line", "3"]) == 2
    said = capsys.readouterr().err
    assert "check: --kernels and --line choose mutants. Try: --mutate with them." in said
    assert main(["check", f"{good}::test_it[a]"]) == 2
    assert f"names a test. Try: {good} --case test_it[a]." in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["check", good, "--json", "--github"])
    assert "argument --github: not allowed with argument --json" in capsys.readouterr().err


RANDOM_BUG = """
import torch, triton, triton.language as tl

@triton.jit
def meet(x_ptr, y_ptr):
    if tl.program_id(0) == 0:
        tl.store(y_ptr, 1)
        tl.atomic_add(x_ptr, 1)
    elif tl.atomic_add(x_ptr, 1) == 0:  # whoever comes first
        tl.store(y_ptr + 1 + tl.program_id(0), 2)

def meeting():
    meet[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(2))

CASES = {"never fails": lambda: meet[(1,)](torch.zeros(1, dtype=torch.int32), torch.zeros(2)),
         "a meeting": meeting}
"""


def test_the_printed_command_repeats_the_report_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = folder / "races.py"
    path.write_text(RANDOM_BUG)
    assert main(["check", str(path), "--level", "ttir", "--seeds", "8"]) == 1
    first = capsys.readouterr().out
    assert first.count("[out-of-bounds]") == 1
    command = shlex.split(re.search(r"again: tileloom (.*)", first)[1])
    assert command[:2] == ["check", str(path)]
    assert command[command.index("--schedule") + 1] == "random"  # in order, nothing happens
    assert command[-2:] == ["--case", "a meeting"]
    assert main(command) == 1
    again = capsys.readouterr().out
    report = first[: first.index("    again:")]
    assert again.startswith(report)
    assert "meet: 1 launches in 1 runs; 1 errors" in again
    seed = command.index("--seed") + 1
    quiet = [main([*command[:seed], str(s), *command[seed + 1 :]]) for s in range(8)]
    assert set(quiet) == {0, 1}  # it takes the right seed
    assert quiet.index(1) == int(command[seed])


def test_json_and_github_output(tmp_path, capsys):
    bad = write(tmp_path, "bad.py", MAIN, limit="n + 9")
    assert main(["check", str(bad), *LATE, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["kernels"] == ["shift"]
    report = data["reports"][0]
    assert report["at"]["loc"]["line"] == 9
    assert (report["schedule"], report["seed"], report["level"]) == ("late", 0, "ttgir")
    assert report["command"] == (
        f"tileloom check {bad} --schedule late --level ttgir --arch sm_90a --sms 4"
    )
    assert main(["check", str(bad), *LATE, "--github"]) == 1
    assert capsys.readouterr().out.startswith(
        f"::error file={bad},line=9,title=tileloom out-of-bounds"
    )
    assert annotation("notice", "a: b, c", "1 %\nx: y", "d,e.py") == (
        "::notice file=d%2Ce.py,title=a%3A b%2C c::1 %25%0Ax: y"
    )


SLOW = """
import torch
from tests.emulator.test_costs import PLAIN, turned

def test_slow(emulated):
    turned[(1,)](torch.zeros(64, 32), torch.zeros(64, 32), PLAIN, num_warps=4)
    assert not emulated.reports

def test_wrong(emulated):
    assert emulated.reports
"""


def test_what_is_slow_is_not_in_the_fixtures_reports_and_a_failure_names_its_test(tmp_path, capsys):
    path = tmp_path / f"test_slow_{next(_count)}.py"
    path.write_text(SLOW)
    assert main(["check", str(path), *LATE]) == 1
    said = capsys.readouterr().out
    assert "[cost] warning: shared memory is read with bank conflicts" in said
    assert "the file itself fails (schedule late, level ttgir, case test_wrong):" in said
    assert said.count("    again: ") == 2
    assert (
        f"again: tileloom check {path} --schedule late --level ttgir --arch sm_90a --sms 4 " in said
    )
    assert "--case test_wrong\n" in said
    assert main(["check", str(path), *LATE, "--case", "test_slow"]) == 0


def test_a_line_suppresses_a_report_with_a_reason_only(tmp_path, capsys):
    for mark, status in (("allow(out-of-bounds)", 1), ("allow(race) padded", 1),
                         ("allow(out-of-bounds) the pool is padded", 0)):  # fmt: skip
        path = write(tmp_path, "bad.py", MAIN, limit="n + 9")
        path.write_text(path.read_text().replace("other=5.0)", f"other=5.0)  # tileloom: {mark}"))
        assert main(["check", str(path), *LATE]) == status
        out = capsys.readouterr().out
        assert ("suppressed [out-of-bounds] at line 9: the pool is padded" in out) == (status == 0)


def test_timeline_option_writes_a_trace(tmp_path):
    good = write(tmp_path, "module.py", MAIN)
    out = tmp_path / "trace.json"
    assert main(["check", str(good), *LATE, "--timeline", str(out)]) == 0
    assert json.loads(out.read_text())["traceEvents"]


def test_cases_are_named_and_chosen(tmp_path, capsys):
    good = "lambda: shift[(1,)](torch.zeros(100), torch.zeros(100), 100, 128)"
    bad = good.replace("torch.zeros(100), 100", "torch.zeros(99), 100")
    path = write(tmp_path, "cases.py", f"CASES = {{'good': {good}, 'bad': {bad}}}\n")
    assert [f.case for f in check_file(path, ONCE).errors] == ["bad"]
    assert check_file(path, ONCE, case="good").findings == []
    with pytest.raises(OptionError, match=r"no case 'god'; it has good, bad\. Try: --case good\.$"):
        check_file(path, ONCE, case="god")
    assert main(["check", str(path), *LATE, "--case", "god"]) == 2
    test = write(tmp_path, "test_two.py", f"def test_good():\n    ({good})()\n{TEST}", "n + 9")
    result = check_file(test, ONCE, case="test_shift")
    assert (result.launches, [f.case for f in result.errors]) == (1, ["test_shift"])
    with pytest.raises(OptionError, match="ERROR: not found: "):
        check_file(test, ONCE, case="test_ugly")
    assert main(["check", str(test), *LATE, "--case", "test_ugly"]) == 2


def test_a_case_that_raises_keeps_no_other_from_running(tmp_path):
    text = "import torch\nCASES = {'raises': lambda: 1 / 0, 'runs': lambda: main()}\n"
    path = write(tmp_path, "cases.py", text + MAIN.replace("zeros_like(x)", "zeros(99)"))
    result = check_file(path, ONCE)
    assert [(f.case, f.kind, f.text.splitlines()[-1]) for f in result.failures] == [
        ("raises", "raised", "ZeroDivisionError: division by zero")
    ]
    assert [f.case for f in result.errors] == ["runs"]


ENDS = {
    "os.abort()": "died of SIGABRT",
    "import ctypes; ctypes.string_at(0)": "died of SIGSEGV",
    "os._exit(7)": "ended with exit status 7",
    "import time; time.sleep(60)": "took longer than 3 s and was killed",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_dies_is_a_sentence(end, tmp_path, capfd):
    body = f"\nimport os\ndef main():\n    print('started')\n    {end}\n"
    path = write(tmp_path, "ends.py", body.replace("main", "dies") + MAIN + "    dies()\n")
    limit = "3" if "sleep" in end else "200"
    assert main(["check", str(path), *LATE, "--timeout", limit]) == 1
    said = capfd.readouterr().out
    assert said == (
        f"emulator: the process that ran kernel 'shift' of {path} {ENDS[end]}, under schedule "
        "late, level ttgir. Nothing after it was run.\n"
        f"    again: tileloom check {path} --schedule late --level ttgir --arch sm_90a --sms 4\n\n"
    )


def test_a_compiler_that_aborts_is_reported_with_kernel_and_schedule(tmp_path):
    """An LLVM assertion ends the process below Python, while a kernel is being compiled."""
    path = write(tmp_path, "aborts.py", MAIN)
    text = path.read_text().replace("import triton\n", ABORTING)
    path.write_text(text)
    result = check_in_child(path, settings(["eager"], [0], ["machine"]))
    assert [(f.kind, f.setting.schedule) for f in result.failures] == [("died", "eager")]
    assert "ran kernel 'shift' of" in result.failures[0].text
    assert "died of SIGABRT, under schedule eager, level machine." in result.failures[0].text


ABORTING = """import os, triton
from triton.compiler import ASTSource
ASTSource.make_ir = lambda *args, **kwargs: os.abort()
"""


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


def test_every_spelling_of_a_device_is_mapped():
    before = torch.get_default_device()
    with cuda_on_cpu(H100):
        assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 0
        assert torch.device(torch.cuda.current_device()) == torch.device("cuda:0")
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.is_available()
        assert not torch.cuda.is_current_stream_capturing()
        torch.optim.AdamW([torch.ones(2, device=0, requires_grad=True)]).step()
        for device in (0, "cuda", "cuda:0", torch.device(0), torch.device("cuda")):
            generator = torch.Generator(device)
            assert isinstance(generator, torch.Generator)
            x = torch.randn(2, device=device, generator=generator.manual_seed(3))
            again = torch.Generator(device=device).manual_seed(3)
            assert torch.equal(torch.randn(2, generator=again, device=device), x)
            assert x.to(device).to(device=device).to(device, torch.float16).is_cuda
            assert x.to(x).new_zeros(2, 3, device=device).shape == (2, 3)
            assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
            with torch.device(device):
                assert torch.ones(2).is_cuda
        torch.set_default_device("cuda")
        assert torch.ones(2).pin_memory().is_cuda
        torch.cuda.manual_seed(5)
        x, state = torch.rand(2), torch.cuda.get_rng_state()
        y = torch.rand(2)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(2), y)
        torch.cuda.manual_seed_all(5)
        assert torch.equal(torch.rand(2), x)
    assert torch.get_default_device() == before
    assert not isinstance(torch.ones(1), torch.Generator)
    assert type(torch.Generator()) is torch.Generator
