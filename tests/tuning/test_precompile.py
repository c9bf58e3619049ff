"""Compiling candidates: real ones for sm_90 in workers, failures, a hung assembler, progress."""

import io
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.launch.versions import OTHERS, triton_folder
from tests.tuning.children import in_children, wait
from tests.tuning.tuned_kernels import meta

from tileloom import errors, knobs
from tileloom.launch.aot import CompileFailure
from tileloom.tuning import precompile as of_precompile
from tileloom.tuning.config import Config
from tileloom.tuning.precompile import Kernel, precompile, progress

pytest.importorskip("triton")
kernels = pytest.importorskip("tests.tuning.tuned_kernels")


def config(xblock, num_warps=4, **more):
    return Config({"XBLOCK": xblock, **more}, num_warps=num_warps, num_stages=1)


def kernel_of(fn, file=None, facts=None, **changes):
    return Kernel.of(fn, meta(**changes), facts or {}, file)


@pytest.fixture
def cache(tmp_path):
    from triton import knobs as of_triton

    with of_triton.cache.scope():
        of_triton.cache.dir = str(tmp_path / "triton")
        yield tmp_path / "triton"


def test_what_generated_code_states_becomes_a_spec():
    kernel = kernel_of(
        kernels.add_to,
        facts={"assert_indirect_indexing": True},
        signature={"in_out_ptr0": "*bf16", "in_ptr0": "*fp32", "xnumel": "i64",
                   "scale": "constexpr", "XBLOCK": "constexpr", "EXTRA": "constexpr"},
        constants={"scale": 1, "EXTRA": 3},
        enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
    spec = kernel.spec(Config({"XBLOCK": 64}, num_warps=8, maxnreg=64), "sm_90")
    assert spec.function == "tests.tuning.tuned_kernels:add_to"
    assert spec.signature == {
        "in_out_ptr0": "*bf16", "in_ptr0": "*fp32", "xnumel": "i64", "scale": "constexpr",
        "XBLOCK": "constexpr", "EXTRA": "constexpr",
    }  # fmt: skip
    assert spec.constexprs == {"scale": 1, "EXTRA": 3, "XBLOCK": 64}
    assert spec.aligned == ("in_out_ptr0", "in_ptr0")
    assert (spec.num_warps, spec.num_stages) == (8, 3)
    assert spec.options == {
        "debug": True, "sanitize_overflow": False, "enable_fp_fusion": False,
        "launch_cooperative_grid": False, "launch_pdl": True, "maxnreg": 64,
    }  # fmt: skip
    problem = kernel.problem({"x": 64})
    assert problem.kernel == spec.function
    assert problem.constants == {"scale": 1, "EXTRA": 3}
    assert "num_warps" not in problem.options


def test_the_source_of_what_a_kernel_calls_is_part_of_the_problem(monkeypatch):
    before = kernel_of(kernels.scale).problem(None)
    monkeypatch.setattr(kernels.twice, "_src", kernels.twice.src.replace("* 2", "* 3"))
    assert kernel_of(kernels.scale).problem(None).source != before.source


def test_a_parameter_that_nobody_gives_is_named():
    with pytest.raises(errors.OptionError) as caught:
        kernel_of(kernels.scale).spec(Config({}), "sm_90")
    assert str(caught.value) == (
        "tuning: XBLOCK of 'scale' has neither a type in triton_meta['signature'] nor a value in "
        "the config num_warps: 4, num_stages: 3. Try: add it to the config, or to "
        "triton_meta['constants']."
    )


def test_a_config_of_another_kernel_is_refused():
    with pytest.raises(errors.OptionError) as caught:
        kernel_of(kernels.scale).spec(config(64, YBLOCK=2), "sm_90")
    assert str(caught.value) == (
        "tuning: the config XBLOCK: 64, YBLOCK: 2, num_warps: 4, num_stages: 1 sets YBLOCK, which "
        "is no constexpr parameter of 'scale'; those are XBLOCK. Try: a config of these."
    )


def made(cache):
    return sorted(path.name for path in cache.rglob("*.cubin"))


def test_workers_compile_into_the_cache_that_this_process_takes_from(cache):
    configs = [config(64), config(128), config(128, 8)]
    kernel = kernel_of(kernels.scale)
    found = precompile(kernel, configs, "sm_90", workers=2)
    assert list(found) == configs
    assert [one.error for one in found.values()] == [None] * 3
    assert [one.num_warps for one in found.values()] == [4, 4, 8]
    assert all(0 < one.registers < 100 for one in found.values())
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    for each in configs:
        compiled = kernel.compile(each, 90)
        assert compiled.metadata.num_warps == each.num_warps
        assert bytes(compiled.asm["cubin"]) == found[each].cubin
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert len(made(cache)) == 3


def test_a_config_that_does_not_compile_costs_only_itself(cache):
    kernel = kernel_of(kernels.wide)
    found = precompile(kernel, [config(1024), config(256)], "sm_90", workers=1)
    failed, good = found.values()
    assert good.error is None
    assert failed.error.startswith(
        "compile: kernel 'wide[XBLOCK: 1024, num_warps: 4, num_stages: 1]' failed for sm_90 in the "
        "front end (Python to Triton IR)"
    )
    assert "blocks are at most 512" in failed.error


def is_running(process):
    try:
        status = Path("/proc", process, "status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status  # what nobody has waited for yet has ended all the same


HANGS = """#!/bin/sh
for name in "$@"; do
  if [ -f "$name" ] && grep -q "reqntid 256" "$name"; then echo $$ >> "{pids}"; sleep 600; fi
done
exec "{ptxas}" "$@"
"""


def test_a_hung_assembler_is_killed(cache, tmp_path, monkeypatch):
    """A fake assembler hangs on the kernel of 8 warps; the others are compiled by the real one."""
    from triton.backends.nvidia.compiler import get_ptxas

    pids = tmp_path / "pids"
    fake = tmp_path / "ptxas"
    fake.write_text(HANGS.format(pids=pids, ptxas=get_ptxas(90).path))
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(fake))
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(fake))
    began = time.monotonic()
    found = precompile(
        kernel_of(kernels.scale), [config(64), config(64, 8), config(32)], "sm_90",
        workers=2, timeout_s=8,
    )  # fmt: skip
    first, hung, last = found.values()
    assert first.error is None
    assert last.error is None
    assert hung.error.startswith(
        "compile: the compiler of kernel 'scale[XBLOCK: 64, num_warps: 8, num_stages: 1]' for "
        "sm_90 took longer than 8 s and was killed"
    )
    assert time.monotonic() - began < 60
    (process,) = pids.read_text().split()
    assert not is_running(process)


def test_generated_code_is_compiled_from_its_file(cache, tmp_path):
    """A module that no import finds, as those that Inductor writes."""
    from importlib import util

    text = Path(kernels.__file__).read_text()
    file = tmp_path / "c0ffee.py"
    file.write_text(text)
    made_of = util.spec_from_file_location("generated.c0ffee", file)
    module = util.module_from_spec(made_of)
    sys.modules["generated.c0ffee"] = module
    try:
        made_of.loader.exec_module(module)
        kernel = kernel_of(module.scale, file=str(file))
        assert kernel.is_importable
        (found,) = precompile(kernel, [config(64)], "sm_90", workers=1).values()
        assert found.error is None
        before = made(cache)
        kernel.compile(config(64), 90)
        assert made(cache) == before
        assert not kernel_of(module.scale).is_importable
    finally:
        del sys.modules["generated.c0ffee"]


def test_a_kernel_that_no_other_process_can_import_is_left_to_this_one(cache):
    import triton

    @triton.jit
    def local(x):
        pass

    kernel = Kernel.of(local, {"signature": {"x": "*fp32"}}, {}, None)
    assert precompile(kernel, [Config({})], "sm_90") == {}
    assert made(cache) == []
    assert kernel_of(kernels.scale).is_importable


# Workers that are kept


def pids():
    pool = of_precompile._pools._pool
    return [] if pool is None else sorted(worker.process.pid for worker in pool._workers)


@pytest.fixture
def no_workers():
    of_precompile._pools.close()
    yield
    of_precompile._pools.close()


def test_workers_are_kept_for_the_next_kernel(cache, no_workers, monkeypatch):
    precompile(kernel_of(kernels.scale), [config(64), config(128)], "sm_90", workers=1)
    (first,) = pids()
    precompile(kernel_of(kernels.wide), [config(64), config(1024)], "sm_90", workers=1)
    assert pids() == [first]
    os.kill(first, 9)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    (found,) = precompile(kernel_of(kernels.scale), [config(32)], "sm_90", workers=1).values()
    assert found.error is None
    (second,) = pids()
    assert second != first
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/assembler")  # what only a new one can see
    monkeypatch.setattr(of_precompile, "_KEPT_S", 0.2)
    precompile(kernel_of(kernels.scale), [config(16)], "sm_90", workers=1)
    assert not is_running(str(second))
    while pids():
        time.sleep(0.05)  # the others end by themselves


def test_workers_see_a_module_that_has_changed(cache, no_workers, tmp_path, monkeypatch):
    """An edit and a reload, as in a notebook: first a kernel that is broken, then two that work."""
    import importlib

    file = tmp_path / "edited_kernels.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    text = Path(kernels.__file__).read_text()

    def edited(change):
        file.write_text(text.replace("return value * 2", change))
        importlib.invalidate_caches()
        module = sys.modules.get("edited_kernels")
        module = importlib.reload(module) if module else importlib.import_module("edited_kernels")
        kernel = kernel_of(module.scale)
        found = precompile(kernel, [config(64)], "sm_90", workers=1)
        return kernel, found[config(64)]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        assert edited("tl.static_assert(False, 'broken'); return value")[1].error is not None
        for change in ("return value * 3", "return value * 4"):
            kernel, found = edited(change)
            assert found.error is None
            assert bytes(kernel.compile(config(64), 90).asm["cubin"]) == found.cubin
    finally:
        sys.modules.pop("edited_kernels", None)


def test_a_forked_child_has_workers_of_its_own(cache, no_workers):
    precompile(kernel_of(kernels.scale), [config(64)], "sm_90", workers=1)
    before = pids()

    def work(number):
        assert pids() == []
        precompile(kernel_of(kernels.wide), [config(64)], "sm_90", workers=1)
        assert pids() not in ([], before)
        of_precompile._pools.close()

    assert wait(in_children(1, work)) == [0]
    precompile(kernel_of(kernels.scale), [config(128)], "sm_90", workers=1)
    assert pids() == before


# Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_one_line_that_goes_again(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with progress("compiling add", 3) as step:
        step(False)
        step(True)
    lines = shown.getvalue().split("\r")
    assert [line.rstrip() for line in lines[1:3]] == [
        "tileloom: compiling add: 1 of 3",
        "tileloom: compiling add: 2 of 3, 1 failed",
    ]
    assert lines[-1] == ""
    assert "\n" not in shown.getvalue()


def test_no_terminal_sees_nothing_and_the_log_all(monkeypatch, caplog):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with caplog.at_level(logging.INFO, logger="tileloom.tuning"), progress("compiling add", 1) as s:
        s(False)
    assert shown.getvalue() == ""
    assert [r.getMessage() for r in caplog.records] == ["compiling add: 1 of 1"]


# Other versions of Triton


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_workers_and_cache_on_another_triton(version, tmp_path):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not installed")
    names = [
        "test_workers_compile_into_the_cache_that_this_process_takes_from",
        "test_a_hung_assembler_is_killed",
    ]
    here = str(Path(__file__).relative_to(Path.cwd()))
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider",
         f"--basetemp={tmp_path / 'base'}", *(f"{here}::{name}" for name in names)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_time_out_is_a_knob(cache, monkeypatch):
    failed = CompileFailure("scale", "sm_90", "no")
    monkeypatch.setattr(
        "tileloom.tuning.precompile.compile_in_workers",
        lambda pairs, **options: [failed] * len(pairs),
    )
    with knobs.scope({"tuning.timeout": 7.0}):
        assert precompile(kernel_of(kernels.scale), [config(64)], "sm_90") == {config(64): failed}
    pool = of_precompile._pools._pool
    assert pool._timeout_s == 7.0
    assert pool._cache_dir == cache


def test_configs_compile_side_by_side_as_one_after_the_other(cache, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    kernel = kernel_of(kernels.wide)
    listed = [config(64), config(1024), config(128), config(2048), config(256)]
    found = kernel.compile_all(listed, 90)
    assert list(found) == listed
    for one in listed:
        if one.kwargs["XBLOCK"] > 512:
            assert "blocks are at most 512" in str(found[one])
        else:
            assert found[one].hash == kernel.compile(one, 90).hash
