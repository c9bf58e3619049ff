"""`tileloom bench gemm`: its cases, formulas and bars, and a whole run with a clock of its own."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.bench.fakes import CPU, FakeTimer, OneMs

import tileloom
from tileloom import bench, emulator
from tileloom.bench import machine
from tileloom.bench.function_run import FunctionContender, FunctionSession, run_function_cell
from tileloom.bench.gemm_bars import judge_gemm, least_ratio, mean_ratio
from tileloom.bench.gemm_case import GemmCase, load_gemm_cases
from tileloom.bench.gemm_peers import GEMM_PEERS, takes_part
from tileloom.bench.timer import Plan
from tileloom.cli import bench as command
from tileloom.cli import bench_functions
from tileloom.cli.bench_gemm import _columns, contenders
from tileloom.errors import OptionError
from tileloom.ops.gemm.config import GluonSm90Config, TritonConfig
from tileloom.testing import assert_accurate

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "gemm_cases.json"
PLAN = Plan(rounds=5, sample_ms=1.0, warm_ms=1.0, pause_s=0.0)
SMALL = GemmCase("small", 48, 40, 32)
FUSED = replace(SMALL, name="fused", bias=True, activation="gelu", residual=True)
CHUNKS = replace(SMALL, name="chunks", chunks=3)


def _session(timer):
    return FunctionSession(CPU, timer, PLAN, assert_accurate, l2_bytes=1000, copy_gbps=2.0)


def test_the_shipped_cases_cover_the_shapes_that_are_asked_for():
    cases = {case.name: case for case in load_gemm_cases(SHIPPED)}
    assert {f"square-{2**i}" for i in range(10, 15)} <= set(cases)
    rows = {case.m for case in cases.values() if case.name.startswith("8b-down-")}
    assert rows == {1, 16, 64, 512, 4096, 8192}
    assert cases["70b-gate-up-m16"].flops == 2 * 16 * 57344 * 8192
    assert cases["square-1024"].bytes_moved == 3 * 2**20 * 2
    assert cases["fused-bias-4096"].bytes_moved == (3 * 2**24 + 4096) * 2
    assert sum(case.chunks > 0 for case in cases.values()) >= 6
    assert cases["host"].judged == "call"
    assert GEMM_PEERS["seed"].refuse(cases["async-odd-chunks"]) == (
        "its chunks are multiples of 128 rows"
    )
    assert GEMM_PEERS["seed"].refuse(cases["async-4096"]) is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"cases": [{"name": "a", "m": 1, "n": 1, "k": 0}]}',
        '{"cases": [{"name": "a", "m": 1, "n": 1, "k": 1, "activation": "tanh"}]}',
        '{"cases": [{"name": "a", "m": 1, "n": 1, "k": 1, "judged": "never"}]}',
        '{"cases": [{"name": "a", "m": 1, "n": 1, "k": 1, "colour": 3}]}',
        '{"cases": [{"name": "a", "m": 1, "n": 1, "k": 1}, {"name": "a", "m": 2, "n": 1, "k": 1}]}',
    ],
)
def test_a_bad_cases_file_is_refused(tmp_path, content):
    path = tmp_path / "cases.json"
    path.write_text(content)
    with pytest.raises(OptionError, match="cannot be read"):
        load_gemm_cases(path)


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_ours_computes_what_the_case_says(activation, bias, residual):
    for chunks in (0, 3):
        case = replace(
            SMALL, activation=activation, bias=bias, residual=residual, chunks=chunks,
            b_flips=bias,
        )  # fmt: skip
        ours = contenders("torch", [])[-1]
        entries = run_function_cell(case, [GEMM_PEERS["torch"], ours], _session(OneMs())).entries
        assert [(e.status, e.reason) for e in entries] == [("ok", None)] * 2
        assert entries[1].about["backend"] == "reference"


def _quack():
    """A package with QuACK's names; what is not given must not be asked for."""
    acts = {
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu_tanh_approx": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    known = []

    def gemm(a, b, bias=None, tuned=True):
        known.append(tuned)
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)

    def gemm_add(a, b, c, bias=None, tuned=True):
        return gemm(a, b, bias, tuned) + c

    def gemm_act(a, b, bias=None, activation=None, store_preact=True, tuned=True):
        assert not store_preact
        return None, acts[activation](gemm(a, b, bias, tuned))

    return types.SimpleNamespace(gemm=gemm, gemm_add=gemm_add, gemm_act=gemm_act), known


def test_quack_takes_part_where_it_can_and_says_why_not(monkeypatch):
    package, known = _quack()
    for name, tuned in (("quack", False), ("quack-tuned", True)):
        for case, reason in (
            (SMALL, None),
            (replace(SMALL, bias=True), None),
            (replace(SMALL, residual=True), None),
            (replace(SMALL, bias=True, residual=True), None),
            (replace(SMALL, activation="relu"), None),
            (replace(SMALL, bias=True, activation="gelu_tanh"), None),
            (replace(SMALL, activation="gelu"), "QuACK has no gelu epilogue"),
            (FUSED, "QuACK adds what is added before the activation"),
            (CHUNKS, "it waits for no chunk"),
        ):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "quack", types.SimpleNamespace())
                patch.setitem(sys.modules, "quack.gemm_interface", package)
                (entry,) = run_function_cell(case, [GEMM_PEERS[name]], _session(OneMs())).entries
            assert (entry.status, entry.reason) == ("refused" if reason else "ok", reason)
        assert set(known) == {tuned}
        known.clear()
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    reason = GEMM_PEERS["quack"].refuse(SMALL)
    assert reason is not None
    assert reason.startswith("quack.gemm_interface cannot be imported (ModuleNotFoundError: ")


def test_the_seed_is_called_by_its_schema_and_its_padding_tiles_find_flags(monkeypatch):
    seen = []

    def original(a, b, flags, pivot):
        behind = torch.as_strided(flags.view(torch.int32), (flags.numel() + 200,), (1,))
        seen.append((flags.dtype, flags.numel(), pivot, bool((behind == 1).all())))
        return torch.mm(a, b)

    monkeypatch.setattr(torch.ops.symm_mem, "_async_input_mm", original, raising=False)
    case = replace(CHUNKS, m=768, chunks=2)
    (entry,) = run_function_cell(case, [GEMM_PEERS["seed"]], _session(OneMs())).entries
    assert (entry.status, entry.reason) == ("ok", None)
    assert set(seen) == {(torch.uint32, 2, 0, True)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunks": 0}, "it only multiplies chunks that are waited for"),
        ({"bias": True}, "it has no epilogue"),
        ({"dtype_name": "float16"}, "it takes bfloat16, not float16"),
        ({"chunks": 7}, "its chunks are multiples of 128 rows"),
        ({"n": 12}, "its rows and columns are multiples of 8 elements"),
        ({}, None),
    ],
)
def test_where_the_seed_refuses(change, reason):
    case = replace(GemmCase("c", 1024, 64, 64, chunks=4), **change)
    assert GEMM_PEERS["seed"].refuse(case) == reason


def test_columns_are_those_that_could_do_something():
    every = contenders(None, [TritonConfig().encode()])
    explicit = TritonConfig().encode()
    names = {
        case.name: [one.name for one in _columns(every, case)] for case in (SMALL, FUSED, CHUNKS)
    }
    assert names == {
        "small": ["torch", "triton", "quack", "tileloom", explicit],
        "fused": ["torch", "compile", "quack", "plain", "tileloom", explicit],
        "chunks": ["torch", "seed", "plain", "tileloom", explicit],
    }
    assert not takes_part("compile-max", SMALL)
    assert GEMM_PEERS["compile"].refuse(SMALL) == "it is torch.mm: nothing to fuse"


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(OptionError, match="--peers names 'cudnn'; for gemm it takes torch, comp"):
        contenders("cudnn", [])
    for text in ("triton:x", "gluon_sm90:a", "nothing", "triton:1,2,3,4,5,x"):
        with pytest.raises(OptionError, match="is no config of a matrix product; it must be a tex"):
            contenders("none", [text])
    assert [one.name for one in contenders("none", [])] == ["plain", "tileloom"]
    assert contenders("none", ["gluon_sm90:64,128"])[-1].name == "gluon_sm90:64,128"


def test_tritons_persistent_kernel_multiplies():
    case = GemmCase("c", 200, 328, 136)
    a, b = case.inputs(CPU, 0)
    peer = GEMM_PEERS["triton"]
    assert peer.refuse(case) is None
    with emulator.run(level="machine", sms=2) as run:
        out = peer.make(case)(a, b)
    assert run.launches
    assert_accurate(out, case.formula(a.double(), b.double()), case.formula(a, b))
    assert peer.refuse(replace(case, bias=True)) == "it has no epilogue"
    assert peer.refuse(replace(case, k=100)).startswith("it takes half precision, b by columns")


def _cell(case, **ms):
    """A cell whose contenders take so many milliseconds on the device."""
    timer = FakeTimer()

    def column(name, time):
        def make(case):
            def f(*inputs):
                timer.spend(time)
                return case.formula(*inputs)

            return f

        return FunctionContender(name, make)

    columns = [column(name, time) for name, time in ms.items()]
    return run_function_cell(case, columns, _session(timer))


@pytest.mark.parametrize(
    ("case", "ms", "asked", "met"),
    [
        (SMALL, {"torch": 1.0, "tileloom": 1.04}, "at least 0.952 x torch", True),
        (SMALL, {"torch": 1.0, "tileloom": 1.06}, "at least 0.952 x torch", False),
        (SMALL, {"tileloom": 1.0}, "at least 0.952 x torch", None),
        (FUSED, {"plain": 1.0, "tileloom": 1.02}, "at least 0.971 x plain", True),
        (FUSED, {"plain": 1.0, "tileloom": 1.04}, "at least 0.971 x plain", False),
        (FUSED, {"compile": 1.0, "tileloom": 0.9}, "faster than 1.000 x compile", True),
        (FUSED, {"compile": 1.0, "tileloom": 1.0}, "faster than 1.000 x compile", False),
        (CHUNKS, {"plain": 1.0, "tileloom": 1.005}, "at least 0.990 x plain", True),
        (CHUNKS, {"plain": 1.0, "tileloom": 1.02}, "at least 0.990 x plain", False),
        (CHUNKS, {"plain": 0.01, "tileloom": 0.0109}, "at most 1 us more than plain", True),
        (CHUNKS, {"plain": 0.01, "tileloom": 0.0112}, "at most 1 us more than plain", False),
    ],
)
def test_bars(case, ms, asked, met):
    bars = {bar.asked: bar for bar in judge_gemm([_cell(case, **ms)])}
    assert bars[asked].met is met
    assert bars[asked].case == case.name


def test_which_bar_a_case_has_and_the_mean():
    large, middle = GemmCase("l", 4096, 4096, 4096), GemmCase("m", 512, 4096, 4096)
    assert least_ratio(large) == ("torch", 1.02)
    assert least_ratio(middle) == ("torch", 1.0)
    assert least_ratio(replace(SMALL, judged="call")) == ("torch", 1 / 1.2)
    cells = [_cell(SMALL, torch=1.0, tileloom=0.5), _cell(SMALL, torch=1.0, tileloom=2.0)]
    cells.append(_cell(FUSED, torch=1.0, tileloom=0.1))
    assert mean_ratio(cells) == (pytest.approx(1.0), 2)
    assert judge_gemm(cells)[-1].case == "geometric mean"
    assert judge_gemm(cells)[-1].met is False


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A machine whose GPU is played by the CPU: the whole command runs, with a clock of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_device", lambda: CPU)
    monkeypatch.setattr(bench, "DeviceTimer", lambda device: OneMs())
    monkeypatch.setattr(bench_functions, "copy_bandwidth", lambda device, timer, plan: 2.0)
    monkeypatch.setattr(machine, "gpu_id", lambda device: "0")
    monkeypatch.setattr(machine, "_properties", lambda device: SimpleNamespace(
        name="a card", major=9, minor=0, multi_processor_count=132, total_memory=1,
        L2_cache_size=1000,
    ))  # fmt: skip
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    sizes = {"m": 48, "n": 40, "k": 32}
    cases = [
        {"name": "plain", **sizes},
        {"name": "fused", **sizes, "bias": True, "activation": "gelu"},
        {"name": "chunks", **sizes, "chunks": 3},
        {"name": "host", **sizes, "judged": "call"},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": cases}))

    def go(*args):
        return command.main(["gemm", "--cases-file", str(path), "--rounds", "5", *args])

    return go


def test_a_whole_run(card, tmp_path, capsys):
    out = tmp_path / "run.json"
    assert card("--peers", "torch", "--out", str(out), "--commit", "0123abc") == 0
    text = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["kind"] == "tileloom-bench-gemm"
    assert record["finished"] is True
    assert record["code"]["commit"] == "0123abc"
    assert [cell["case"]["name"] for cell in record["cells"]] == [
        "plain",
        "fused",
        "chunks",
        "host",
    ]
    for cell in record["cells"]:
        assert {entry["status"] for entry in cell["entries"]} == {"ok"}
        assert cell["flops"] == 2 * 48 * 40 * 32
    ours = record["cells"][1]["entries"][-1]
    assert ours["about"]["config"] == "reference"
    assert ours["ratios"]["plain"]["value"] == 1.0
    assert "us on the device (TFLOP/s), us a call with the host" in text
    assert "not known: fused, faster than 1.000 x compile: compile has no number" in text
    assert "MISSED: geometric mean, at least 1.03 x torch: 1.000 (1 cases)" in text
    assert card("--peers", "torch", "--strict") == 1


def test_a_wrong_product_has_no_number_and_fails_the_run(card, monkeypatch, tmp_path, capsys):
    out = tmp_path / "run.json"
    right = tileloom.matmul
    monkeypatch.setattr(tileloom, "matmul", lambda a, b, **options: right(a, b, **options) * 1.02)
    assert card("--peers", "torch", "--cases", "plain", "--out", str(out)) == 1
    entry = json.loads(out.read_text())["cells"][0]["entries"][-1]
    assert (entry["name"], entry["status"], entry["time_ms"]) == ("tileloom", "wrong", None)
    assert "plain: tileloom wrong: " in capsys.readouterr().out


def test_a_config_that_cannot_run_says_why(card, capsys):
    config = GluonSm90Config().encode()
    assert card("--peers", "none", "--cases", "plain", "--config", config) == 1
    assert f"plain: {config} failed: ConfigError: matmul: config=" in capsys.readouterr().out
