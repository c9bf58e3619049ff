"""The ahead-of-time compiler reports costs, warnings and failures of sample kernels."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch import samples
from tests.launch.versions import OTHERS, triton_folder

from tileloom.errors import CompileError, OptionError
from tileloom.launch.aot import (
    CompiledKernel,
    _failure_text,
    compile_aot,
    compile_in_workers,
    read_assembler_log,
    serialises_wgmma,
)
from tileloom.launch.workers import quote

_PAIRS = [
    *((samples.SCALE, arch) for arch in samples.ALL),
    *((samples.MATMUL, arch) for arch in samples.ALL),
    (samples.SPILLS, "sm_90"),
    (samples.ABORTS, "sm_90"),
    (samples.TOO_MUCH_SHARED, "sm_80"),
    (samples.WRONG, "sm_90"),
    (samples.WGMMA, "sm_90a"),
    (samples.SERIALISED, "sm_90"),
]


@pytest.fixture(scope="module")
def results():
    seen = []
    compiled = compile_in_workers(_PAIRS, workers=2, timeout_s=200, on_result=seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, compiled))
    return {(r.name, r.arch): r for r in compiled}


def test_results_come_in_the_order_of_the_pairs(results):
    wanted = [(spec.name, arch.removesuffix("a")) for spec, arch in _PAIRS]
    assert list(results) == wanted


@pytest.mark.parametrize("arch", samples.ALL)
def test_costs_of_a_small_kernel(results, arch):
    kernel = results["scale", arch]
    assert kernel.error is None
    assert 16 <= kernel.registers <= 32
    assert (kernel.spill_bytes, kernel.shared_bytes) == (0, 0)
    assert (kernel.num_warps, kernel.threads, kernel.occupancy) == (4, 128, 16)
    assert (kernel.cached, kernel.ptxas_warnings) == (False, ())
    assert 0.01 < kernel.compile_s < 100


@pytest.mark.parametrize("arch", samples.ALL)
def test_texts_are_those_of_the_architecture(results, arch):
    kernel = results["matmul", arch]
    number = arch.removeprefix("sm_")
    assert "tt.dot" in kernel.ttir
    assert f'"cuda:{number}"' in kernel.ttgir
    assert f".target {arch}" in kernel.ptx
    multiply = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[arch]
    assert multiply in kernel.sass
    assert kernel.cubin.startswith(b"\x7fELF")


def test_a_gluon_kernel_has_no_ttir(results):
    kernel = results["wgmma", "sm_90"]
    assert kernel.ttir == ""
    assert "warp_group_dot" in kernel.ttgir
    assert kernel.stages == 3
    # Three stages of a 64 x 64 and a 128 x 64 tile in bf16, and three barriers of 8 bytes.
    assert kernel.shared_bytes == 3 * (64 * 64 + 128 * 64) * 2 + 3 * 8


def test_spills_are_counted(results):
    kernel = results["spills", "sm_90"]
    assert kernel.registers == 255
    assert kernel.spill_bytes > 100


def test_serialised_wgmma_is_reported(results):
    assert results["wgmma", "sm_90"].ptxas_warnings == ()
    (warning,) = results["serialised", "sm_90"].ptxas_warnings
    assert serialises_wgmma(warning)
    assert "reading accumulator registers" in warning
    assert results["serialised", "sm_90"].spill_bytes == 0


def test_a_kernel_that_exceeds_shared_memory_fits_no_sm(results):
    kernel = results["too_much_shared", "sm_80"]
    assert kernel.shared_bytes > 163 * 1024
    assert kernel.occupancy == 0


def test_an_error_names_kernel_stage_and_cause(results):
    error = results["wrong", "sm_90"].error
    assert error.startswith("compile: kernel 'wrong' failed for sm_90 in the front end")
    assert "tl.store(x, tl.no_such_function(1))" in error
    assert "has no attribute 'no_such_function'" in error
    assert "Reproduce" not in error  # `inspect` knows no kernel of another package


def test_an_error_of_a_kernel_of_the_package_says_how_to_see_it_again():
    ours = dataclasses.replace(
        samples.WRONG, name="ours[a]", function="tileloom.ops.made_up.kernels:kernel"
    )
    assert _failure_text(ours, "sm_90", ValueError("one\ntwo")) == (
        "compile: kernel 'ours[a]' failed for sm_90 in lowering: ValueError.\n  one\n  two\n"
        "Reproduce: tileloom inspect 'ours[a]' --arch sm_90"
    )


def test_an_abort_of_the_compiler_becomes_an_error(results):
    error = results["aborts", "sm_90"].error
    assert error.startswith("compile: the compiler of kernel 'aborts' for sm_90 died of SIGABRT.")
    assert "LLVM ERROR: Layout is expected to be surjective" in error


@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_triton(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not in .triton-versions")
    specs = (samples.SCALE, samples.WGMMA, samples.SERIALISED, samples.ABORTS)
    pairs = [(spec, "sm_90") for spec in specs]
    compiled = compile_in_workers(pairs, workers=2, timeout_s=200, triton_path=folder)
    scale, wgmma, serialised, aborts = compiled
    for kernel in (scale, wgmma, serialised):
        assert kernel.error is None
        assert kernel.triton == version
        assert kernel.spill_bytes == 0
        assert kernel.sass
    assert 16 <= scale.registers <= 32
    assert wgmma.ptxas_warnings == ()
    assert any(map(serialises_wgmma, serialised.ptxas_warnings))
    assert "died of SIGABRT" in aborts.error


@pytest.fixture
def hung_assembler(tmp_path, monkeypatch):
    """Put an assembler in Triton's way that writes its process number and sleeps."""
    pid_file = tmp_path / "pid"
    script = tmp_path / "ptxas"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "release 12.8, V12.8.93"; exit 0; fi\n'
        f"echo $$ > '{pid_file}.new'; mv '{pid_file}.new' '{pid_file}'; sleep 600; exit 1\n"
    )
    script.chmod(0o755)
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(variable, str(script))
    return pid_file


def test_a_hung_assembler_is_killed(hung_assembler):
    started = time.monotonic()
    (result,) = compile_in_workers([(samples.SCALE, "sm_90")], timeout_s=12)
    assert time.monotonic() - started < 90
    assert result.error.startswith(
        "compile: the compiler of kernel 'scale' for sm_90 took longer than 12 s and was killed."
    )
    assert _wait(lambda: not _runs(int(hung_assembler.read_text())), 5)


def test_a_hung_assembler_does_not_outlive_a_killed_parent(hung_assembler):
    code = (
        "from tileloom.launch.aot import compile_in_workers; from tests.launch import samples; "
        "compile_in_workers([(samples.SCALE, 'sm_90')], timeout_s=300)"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        assert _wait(hung_assembler.exists, 120)
        assert _runs(int(hung_assembler.read_text()))
    finally:
        parent.kill()
        parent.wait()
    assert _wait(lambda: not _runs(int(hung_assembler.read_text())), 20)


def _wait(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_cache_is_used_only_when_asked(tmp_path):
    pair = [(samples.MATMUL, "sm_90")]
    (first,) = compile_in_workers(pair, cache_dir=tmp_path, timeout_s=200)
    (second,) = compile_in_workers(pair, cache_dir=tmp_path, timeout_s=200)
    assert (first.cached, second.cached) == (False, True)
    assert second.compile_s < first.compile_s
    same = ("registers", "spill_bytes", "shared_bytes", "ptxas_warnings", "occupancy", "threads")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]
    assert first.cubin == second.cubin


def test_what_another_assembler_left_in_the_cache_is_compiled_again(tmp_path):
    """As Inductor's later TRITON_PTXAS_PATH leaves it: a newer PTX under the key of the older."""
    pair = [(samples.SCALE, "sm_90")]
    (first,) = compile_in_workers(pair, cache_dir=tmp_path, timeout_s=200)
    (text,) = tmp_path.rglob("*.ptx")
    text.write_text(re.sub(r"\.version \d+\.\d+", ".version 99.0", text.read_text()))
    (second,) = compile_in_workers(pair, cache_dir=tmp_path, timeout_s=200)
    assert second.error is None
    assert (second.cached, second.registers) == (False, first.registers)


def test_interpreter_mode_of_the_caller_does_not_reach_the_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (result,) = compile_in_workers([(samples.SCALE, "sm_90")], timeout_s=200)
    assert result.error is None


def test_a_triton_that_cannot_be_imported_fails_every_job(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('built for a toaster')")
    pairs = [(samples.SCALE, arch) for arch in samples.ALL]
    for result in compile_in_workers(pairs, workers=2, triton_path=tmp_path):
        assert result.error.startswith(
            "compile: no compiler came up for kernel 'scale': its process ended with exit status 1."
        )
        assert "built for a toaster" in result.error


def test_nothing_to_compile():
    assert compile_in_workers([]) == []


def test_compiling_in_this_process(capsys):
    from triton import knobs

    before = (knobs.cache.dir, knobs.nvidia.dump_ptxas_log, dict(os.environ))
    kernel = compile_aot(samples.SCALE, "sm_90a")
    assert isinstance(kernel, CompiledKernel)
    assert (kernel.arch, kernel.occupancy, kernel.cached) == ("sm_90", 16, False)
    # Nothing is printed, and Triton's settings are those of before.
    assert capsys.readouterr() == ("", "")
    assert (knobs.cache.dir, knobs.nvidia.dump_ptxas_log, dict(os.environ)) == before


def _children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_no_process_is_left_when_the_caller_stops():
    def stop(result):
        raise RuntimeError("enough")

    before = _children()
    with pytest.raises(RuntimeError, match="enough"):
        compile_in_workers(_PAIRS, workers=2, timeout_s=200, on_result=stop)
    assert _children() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be a number of seconds"),
        ({"timeout_s": float("nan")}, "timeout_s is nan; it must be a number of seconds"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(OptionError) as caught:
        compile_in_workers([(samples.SCALE, "sm_90")], **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"signature": {"x": "*fp32"}}, "signature of kernel 'scale'"),
        ({"constexprs": {}}, "differ in BLOCK; the parameters are x, y, n, factor, BLOCK"),
        ({"aligned": ("z",)}, "aligned of kernel 'scale'"),
        ({"layouts": {"z": {}}}, "layouts of kernel 'scale'"),
        ({"gluon": True}, "a function made by gluon.jit is needed"),
        ({"function": "tests.launch.kernel_samples:nothing"}, "in importing the kernel"),
        ({"function": "tests.launch.samples:matmul"}, "is a function; a function made by"),
    ],
)
def test_a_spec_that_does_not_fit_its_function(change, said):
    with pytest.raises(CompileError) as caught:
        compile_aot(dataclasses.replace(samples.SCALE, **change), "sm_90")
    assert said in str(caught.value)


def test_an_unknown_architecture():
    with pytest.raises(OptionError, match=r"arch is 'sm_70'; tileloom compiles for sm_80, sm_90,"):
        compile_in_workers([(samples.SCALE, "sm_70")])


def test_compiling_loads_no_torch_and_in_the_parent_no_triton(tmp_path):
    """It costs each process seconds; a torch that cannot be imported stands in its way here."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is not needed')")
    code = (
        "import sys; from tileloom.launch import aot; from tests.launch import samples; "
        "(result,) = aot.compile_in_workers([(samples.SCALE, 'sm_90')], timeout_s=200); "
        "sys.exit(result.error or 'triton' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tmp_path, root / "src", root)))
    environment = {**os.environ, "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


_LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas /tmp/x.ptx, line 70; warning : Advisory: Modifier '.sp::ordered_metadata' is deprecated
ptxas warning : Value of threads per SM for entry k is out of range.
"""


def test_reading_the_log_of_the_assembler():
    registers, spill_bytes, warnings = read_assembler_log(_LOG + _LOG.splitlines()[0])
    assert (registers, spill_bytes) == (168, 32)
    assert [serialises_wgmma(w) for w in warnings] == [True, False, False]
    assert warnings[1].startswith("Advisory:")
    assert warnings[2].startswith("Value of threads")


def test_quoting_takes_the_cause_and_not_the_dump_after_it():
    dump = "\n".join(f"  %{i} = arith.constant {i}" for i in range(1000))
    lines = quote(f"start\nk.py:7:3: error: it does not fit\n  there\n    ^\n{dump}\n")
    assert lines[0] == "k.py:7:3: error: it does not fit"
    assert lines[1:] == ["  there", "    ^"]
    assert quote("\n".join(f"line {i}" for i in range(50)))[-1] == "line 49"
    assert len(quote(dump)) == 12
    assert all(len(line) <= 200 for line in quote("x" * 5000))
