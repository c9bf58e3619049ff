"""`tileloom inspect`: picking kernels, the table, JSON, texts, exit statuses."""

import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.launch import samples

import tileloom
import tileloom.launch.bundle_build  # it keeps the compiler that it finds, which a test replaces
from tileloom.cli import inspect
from tileloom.cli.main import main
from tileloom.errors import OptionError
from tileloom.launch import aot
from tileloom.launch.aot import CompiledKernel, CompileFailure, KernelSpec
from tileloom.launch.budget import faults


def _spec(name, archs=("sm_80", "sm_90"), **more):
    return KernelSpec(name, "module:function", False, {}, {}, archs, **more)


_SPECS = {
    s.name: s
    for s in (
        _spec("attention_fwd_triton[d64]"),
        _spec("attention_fwd_triton[d128]"),
        _spec("attention_fwd_gluon_sm90[d64]", ("sm_90",)),
        _spec("gemm[t128]"),
    )
}


def _kernel(name="gemm[t128]", arch="sm_90", **changes):
    kernel = CompiledKernel(
        name=name, arch=arch, registers=168, spill_bytes=0, shared_bytes=73752, stages=3,
        num_warps=12, threads=384, occupancy=1, compile_s=0.314, cached=False, ptxas_warnings=(),
        triton="3.7.1", launch=None, triton_folder=Path("/nowhere"), _packed={},
    )  # fmt: skip
    return dataclasses.replace(kernel, **changes)


@pytest.fixture
def canned(monkeypatch):
    """Make inspect see four kernels, and a compiler that answers at once."""
    answers, calls = {}, []

    def compile_now(pairs, **options):
        calls.append(options)
        return [answers.get((s.name, a), _kernel(s.name, a)) for s, a in pairs]

    monkeypatch.setattr(inspect, "shipped_specs", lambda: dict(_SPECS))
    monkeypatch.setattr(aot, "compile_in_workers", compile_now)
    return answers, calls


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ([], list(_SPECS)),
        (["gemm"], ["gemm[t128]"]),
        (["gemm[t128]", "gemm"], ["gemm[t128]"]),
        (["attention_fwd_triton"], ["attention_fwd_triton[d64]", "attention_fwd_triton[d128]"]),
        (["*[d64]"], ["attention_fwd_triton[d64]", "attention_fwd_gluon_sm90[d64]"]),
        (["gemm", "*triton[d64]"], ["attention_fwd_triton[d64]", "gemm[t128]"]),
    ],
)
def test_picking_kernels(wanted, names):
    assert [s.name for s in inspect.select(_SPECS, wanted)] == names


def test_a_wrong_name_gets_the_nearest_and_status_2(canned, capsys):
    assert main(["inspect", "atention_fwd_triton"]) == 2
    said = "there is no kernel 'atention_fwd_triton'. Did you mean 'attention_fwd_triton'?"
    assert said in capsys.readouterr().err
    assert main(["inspect", "gemm[t12]"]) == 2
    assert "Did you mean 'gemm[t128]'?" in capsys.readouterr().err
    assert main(["inspect", "#"]) == 2
    assert "Kernels: attention_fwd_triton, " in capsys.readouterr().err
    assert canned[1] == []


@pytest.mark.parametrize("name", ["nothing", "nokernel"])
def test_a_name_that_is_like_none_gets_all_of_them(name, capsys):
    assert main(["inspect", name]) == 2
    said = capsys.readouterr().err
    assert f"there is no kernel '{name}'. Kernels: attention_fwd_triton, attention_fwd_" in said


def test_operators_name_their_kernels():
    specs = inspect.shipped_specs()
    starts = {n.split("_")[0] for n in specs}
    assert starts == {start.split("_")[0] for start in inspect.OPERATORS}
    for start, names in inspect.OPERATORS.items():
        kernels = [n for n in specs if n.startswith(f"{start}_")]
        for name in names:
            assert name == "gemm" or name in tileloom.__all__
            assert [s.name for s in inspect.select(specs, [name])] == kernels
    assert inspect.select(specs, ["rms*"]) == inspect.select(specs, ["layer_norm"])


def test_list_prints_names_and_compiles_nothing(canned, tmp_path, capsys):
    assert main(["inspect", "--list", "gemm", "*sm90"]) == 0
    names = "attention_fwd_gluon_sm90[d64]\ngemm[t128]\n"
    assert capsys.readouterr() == (names, "2 kernels, 3 with each architecture\n")
    assert main(["bundle", "build", str(tmp_path / "b"), "gemm", "--list"]) == 0
    assert capsys.readouterr().out == "gemm[t128]\n"
    assert canned[1] == []
    assert list(tmp_path.iterdir()) == []


def test_progress_off_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    now = iter([0, 10, 31, 40, 70])
    monkeypatch.setattr(inspect, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with inspect.progress(5) as tell:
        for _ in range(4):
            tell(_kernel())
    assert capsys.readouterr().err.splitlines() == [
        "compiling 5 kernels",
        "2 of 5 kernels after 31 s",
        "4 of 5 kernels after 70 s",
    ]


def test_progress_on_a_terminal_has_count_and_name(monkeypatch):
    shown = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(inspect, "console", lambda to_stderr: shown)
    with inspect.progress(5) as tell:
        tell(_kernel("gemm[t128]"))
    assert "compiling 1/5" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.file.getvalue())
    assert "gemm[t128] sm_90" in shown.file.getvalue()


def test_architectures(canned, capsys):
    assert main(["inspect", "--json", "--arch", "sm_90a"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [(r["name"], r["arch"]) for r in rows] == [(n, "sm_90") for n in _SPECS]
    assert main(["inspect", "attention_fwd_gluon_sm90", "--arch", "sm_80"]) == 2
    assert "--arch is sm_80; the kernels asked for ship for sm_90." in capsys.readouterr().err
    assert main(["inspect", "--arch", "sm_70"]) == 2
    assert "arch is 'sm_70'; tileloom compiles for sm_80" in capsys.readouterr().err


def test_the_table(canned, capsys):
    answers, _ = canned
    c7514 = "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    answers["gemm[t128]", "sm_80"] = _kernel(arch="sm_80", stages=None, cached=True)
    answers["gemm[t128]", "sm_90"] = _kernel(spill_bytes=16, ptxas_warnings=(c7514, "odd."))
    answers["attention_fwd_gluon_sm90[d64]", "sm_90"] = _kernel(ptxas_warnings=("odd.",))
    assert main(["inspect", "gemm", "*sm90"]) == 1
    out = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in out if line.strip()]
    assert rows[0] == ["compiled", "with", "Triton", "3.7.1"]
    assert " ".join(rows[1]) == (
        "kernel arch regs spills shared stages warps blocks compile verdict"
    )
    cost = "168 0 B 72.0 KiB 3 12 1 0.31 s"
    assert [" ".join(row) for row in rows[2:]] == [
        "attention_fwd_gluon_sm90",
        f"[d64] sm_90 {cost} 1 warning",
        "gemm",
        "[t128] sm_80 168 0 B 72.0 KiB - 12 1 cached ok",
        f"sm_90 {cost.replace('0 B', '16 B')} 2 faults",
        "warning: attention_fwd_gluon_sm90[d64] sm_90 ptxas: odd.",
        "fault: gemm[t128] sm_90 spills 16 bytes, its budget is 0",
        f"fault: gemm[t128] sm_90 ptxas: {c7514}",
        "warning: gemm[t128] sm_90 ptxas: odd.",
    ]


def test_a_table_fits_a_terminal_of_100_columns():
    name = "attention_fwd_gluon_sm90[d128-causal-bf16]"
    spec = _spec(name, spill_budget=8, spill_reason="a measurement")
    kernel = _kernel(name, "sm_100", spill_bytes=8, shared_bytes=227 * 1024, compile_s=12.3)
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(inspect.table([(spec, "sm_100")], [kernel]))
    text = shown.export_text()
    assert "[d128-causal-bf16]      sm_100" in text
    assert "8/8 B" in text
    assert len([line for line in text.splitlines() if line.strip()]) == 4


def test_the_guide_explains_every_column():
    guide = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    explained = re.findall(r"^\| ([a-z]+) \|", guide, re.MULTILINE)[1:]
    headers = [str(column.header) for column in inspect.table([], []).columns]
    assert explained == headers[2:]


def test_a_failure_is_shown_in_full_below_the_table(canned, capsys):
    answers, _ = canned
    answers["gemm[t128]", "sm_80"] = CompileFailure("gemm[t128]", "sm_80", "compile: no.\nBecause.")
    assert main(["inspect", "gemm"]) == 1
    out = capsys.readouterr().out
    assert "fault: compile: no.\nBecause.\n" in out


def test_options_reach_the_compiler(canned, tmp_path, capsys):
    (tmp_path / "triton").mkdir()
    arguments = ["--triton", str(tmp_path), "--workers", "1", "--timeout", "7"]
    assert main(["inspect", "gemm", *arguments]) == 0
    (given,) = canned[1]
    assert callable(given.pop("on_result"))
    assert given == {"workers": 1, "timeout_s": 7.0, "triton_path": tmp_path}
    assert main(["inspect", "--triton", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "it must be a folder that holds 'triton'. Try: make setup, which makes" in said


def test_compiling_for_real(monkeypatch, capsys):
    specs = {s.name: s for s in (samples.SCALE, samples.SERIALISED)}
    monkeypatch.setattr(inspect, "shipped_specs", lambda: specs)
    arguments = ["inspect", "--arch", "sm_90a", "--json", "--ptx", "--timeout", "200"]
    assert main(arguments) == 1
    scale, serialised = json.loads(capsys.readouterr().out)["kernels"]
    assert (scale["name"], scale["faults"], scale["blocks_per_sm"]) == ("scale", [], 16)
    assert ".target sm_90a" in scale["ptx"]
    (fault,) = serialised["faults"]
    assert fault.startswith("ptxas: (C7514)")
    assert "ttir" not in scale


def test_texts_are_written_with_a_header(monkeypatch, capsys):
    monkeypatch.setattr(inspect, "shipped_specs", lambda: {"scale": samples.SCALE})
    arguments = ["inspect", "scale", "--arch", "sm_90", "--ttgir", "--sass", "--timeout", "200"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("// scale sm_90 ttgir\n")
    assert "// scale sm_90 sass\n" in out
    assert "EXIT" in out


@pytest.mark.parametrize(
    ("spec", "changes", "said"),
    [
        ({}, {}, None),
        ({"threads": 384}, {}, None),
        ({}, {"ptxas_warnings": ("Registers are reserved.",)}, None),
        ({"spill_budget": 8, "spill_reason": "H100, 2026-11-01: +3 %"}, {"spill_bytes": 8}, None),
        ({"spill_budget": 8, "spill_reason": " "}, {}, "names no measurement"),
        ({}, {"spill_bytes": 1}, "spills 1 bytes, its budget is 0"),
        ({}, {"shared_bytes": 227 * 1024 + 1, "occupancy": 0}, "a block of sm_90 may have 232448"),
        ({}, {"occupancy": 0}, "cannot be launched: 384 threads of 168 registers"),
        ({}, {"ptxas_warnings": ("(C7510) Potential",)}, "ptxas: (C7510) Potential"),
        ({"threads": 416}, {}, "has 384 threads, its spec says 416"),
    ],
)
def test_what_counts_as_a_fault(spec, changes, said):
    found = faults(_spec("gemm[t128]", **spec), _kernel(**changes))
    assert len(found) == (said is not None)
    assert all(said in text for text in found)


def test_shipped_kernels_have_unique_names(monkeypatch):
    specs = inspect.shipped_specs()
    assert all(name == spec.name for name, spec in specs.items())
    kernels = pytest.importorskip("tileloom.ops.attention.kernels")
    monkeypatch.setattr(kernels, "shipped", lambda: (_spec("twin"), _spec("twin")))
    with pytest.raises(OptionError, match="two shipped kernels have the name 'twin'"):
        inspect.shipped_specs()
