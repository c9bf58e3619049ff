import argparse
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from tests.bench.fakes import CPU, right
from tests.bench.test_peers import CountingTimer

from tileloom import bench
from tileloom.bench import Inputs, ceilings, load, machine, watchdog
from tileloom.cli import bench as command
from tileloom.cli.bench_ours import DROPOUT_SEED
from tileloom.cli.main import main as tileloom_main
from tileloom.errors import OptionError
from tileloom.ops.attention import api
from tileloom.ops.attention.config import GluonSm90Config, TritonConfig
from tileloom.ops.attention.reference import attention_reference
from tileloom.target import H100, override

CASES = {
    "cases": [
        {
            "name": f"tiny{causal}", "batch": 1, "heads_q": 2, "heads_kv": 2, "len_q": 64,
            "len_k": 64, "head_dim": 64, "is_causal": bool(causal), "dtype_name": "bfloat16",
        }
        for causal in ("", "-causal")
    ]
}  # fmt: skip
WRONG, FAILING = TritonConfig(32, 32, 4, 1), TritonConfig(16, 16, 4, 1)
BARS = {
    "schema": 1,
    "contender": "tileloom",
    "allowed_under": 0.05,
    "cells": {"tiny": {"tflops": 1e-9, "faster_than": ["flash"]}},
}


class SlowTimer(CountingTimer):
    """Every call takes 20 ms, so that few are needed."""

    def warm(self, call, calls):
        super().warm(call, calls)
        self.spend(19.0 * calls)


class Timers:
    """Stands for `DeviceTimer`; `tileloom.attention` takes half of the time of a peer."""

    def __init__(self):
        self.made = []

    def __call__(self, device):
        self.made.append(SlowTimer())
        return self.made[-1]

    def refund(self):
        if self.made:
            self.made[-1].spend(-10.0)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A machine whose GPU is played by the CPU: the whole command runs, with a clock of its own."""
    timers = Timers()

    def attention(q, k, v, *, is_causal, config=None):
        timers.refund()
        if config == WRONG:
            return torch.zeros_like(q)
        if config == FAILING:
            raise RuntimeError("ptxas is unhappy")
        return right(Inputs(q, k, v), is_causal)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_device", lambda: CPU)
    monkeypatch.setattr(bench, "DeviceTimer", timers)
    monkeypatch.setattr(api, "attention", attention)
    monkeypatch.setattr(ceilings, "_SIZES", (16,))
    monkeypatch.setattr(ceilings.measure_ceilings, "__defaults__", ((16,),))
    monkeypatch.setattr(machine, "gpu_id", lambda device: "0")
    monkeypatch.setattr(machine, "_properties", lambda device: SimpleNamespace(
        name="a card", major=9, minor=0, multi_processor_count=132, total_memory=1,
        L2_cache_size=1000,
    ))  # fmt: skip
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    cases, bars = tmp_path / "cases.json", tmp_path / "bars.json"
    cases.write_text(json.dumps(CASES))
    bars.write_text(json.dumps(BARS))
    start = ["attention", "--cases-file", str(cases), "--bars", str(bars), "--rounds", "5"]

    def go(*args):
        with override(H100):
            return command.main([*start, *args])

    return go


def test_no_gpu_is_a_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for operator in ("attention", "gemm", "rowwise"):
        assert command.main([operator]) == 1
        assert tileloom_main(["bench", operator, "--rounds", "5"]) == 1
    err = capsys.readouterr().err
    assert err.count("no GPU that PyTorch can use") == 6
    assert "Try: a machine with an NVIDIA GPU, or `tileloom inspect`" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--peers", "cudn"], "--peers names 'cudn'"),
        (["attention", "--config", "triton:x"], "--config 'triton:x' is no config"),
        (["attention", "--baseline", "me"], "--baseline is 'me'; it must be one of"),
        (["attention", "--cases", "d65-*"], "--cases names 'd65-*', and there is no such case"),
        (["attention", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["gemm", "--budget", "nan"], "--budget is nan; it must be at least 0"),
        (["rowwise", "--step-limit", "-1"], "--step-limit is -1.0; it must be at least 0"),
        (["gemm", "--peers", "cudnn"], "--peers names 'cudnn'; for gemm it takes torch, "),
        (["gemm", "--config", "triton:x"], "--config 'triton:x' is no config"),
        (["gemm", "--cases", "square-*,x"], "--cases names 'x', and there is no such case"),
        (["rowwise", "--peers", "cudnn"], "--peers names 'cudnn'; for rowwise it takes eager, "),
        (["rowwise", "--cases", "x"], "--cases names 'x', and there is no such case"),
    ],
)
def test_options_are_checked_before_a_gpu_is_asked_for(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tileloom_main(["bench", *arguments]) == 2
    assert f"tileloom: bench: {said}" in capsys.readouterr().err


REFUSED = {
    "attention": [],
    "gemm": ["--baseline", "--backward", "--features", "--quick", "--bars"],
    "rowwise": ["--baseline", "--backward", "--features", "--quick", "--bars", "--config",
                "--strict"],
}  # fmt: skip


@pytest.mark.parametrize("operator", REFUSED)
def test_help_names_what_the_operator_takes_and_nothing_else(operator, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        tileloom_main(["bench", operator, "--help"])
    shown = capsys.readouterr().out.replace("[", " ").replace("]", " ")
    example = re.search(r"such as (\S+);", " ".join(shown.split()))[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tileloom_main(["bench", operator, "--cases", example]) == 1  # not 2: there are such
    for option in REFUSED["rowwise"]:
        assert (f"{option} " in shown or f"{option}\n" in shown) == (
            option not in REFUSED[operator]
        )
    for option in REFUSED[operator]:
        with pytest.raises(SystemExit) as caught:
            tileloom_main(["bench", operator, option])
        assert caught.value.code == 2
    assert "there is no option '--ba" in capsys.readouterr().err or not REFUSED[operator]


def test_features_are_measured(card, monkeypatch, tmp_path):
    """Dropout is judged by the mask that PyTorch's generator gives."""
    plain = CASES["cases"][0]
    features = ({}, {"bias": "heads"}, {"dropout_p": 0.1}, {"is_causal": True, "window": 9})
    cases = [plain | {"name": f"case{i}"} | feature for i, feature in enumerate(features)]
    path, out = tmp_path / "features.json", tmp_path / "run.json"
    path.write_text(json.dumps({"cases": cases}))

    def attention(q, k, v, *, config=None, dropout_p=0.0, **options):
        philox = (DROPOUT_SEED, 0) if dropout_p else None
        return attention_reference(q, k, v, dropout_p=dropout_p, philox=philox, **options)

    monkeypatch.setattr(api, "attention", attention)
    assert card("--features", "--cases-file", str(path), "--peers", "flash", "--out", str(out)) == 0
    record = load(out)
    assert record["operator"] == "attention_features_fwd"
    results = [{e["name"]: e for e in cell["entries"]} for cell in record["cells"]]
    assert [one["tileloom"]["status"] for one in results] == ["ok"] * 4
    assert results[3]["flash"]["reason"] == "SDPA has no windows"


def test_a_whole_run(card, tmp_path, capsys):
    out = tmp_path / "results" / "run.json"
    config, portable = GluonSm90Config(2, 64, 2).encode(), TritonConfig().encode()
    status = card(
        *("--peers", "flash,cudnn", "--config", config, "--config", f"*-causal@{portable}"),
        *("--baseline", "flash", "--out", str(out), "--commit", "0123abc"),
    )
    text = capsys.readouterr()
    assert status == 0, text
    record = load(out)
    assert record["finished"] is True
    assert record["code"] == {"commit": "0123abc", "dirty": None}
    names = [[entry["name"] for entry in cell["entries"]] for cell in record["cells"]]
    everywhere = ["flash", "cudnn", "tileloom", config]
    assert names == [everywhere, [*everywhere, portable]]
    flash, cudnn, ours, explicit = record["cells"][0]["entries"]
    assert cudnn["status"] == "failed"  # there is no cuDNN here, and it says so
    assert ours["about"]["backend"] == "gluon_sm90"
    assert ours["about"]["source"] == "rule"
    assert explicit["about"]["config"] == config
    assert explicit["about"]["source"] == "explicit"
    assert ours["ratios"]["flash"]["value"] == pytest.approx(2.0)
    assert explicit["ratios"]["tileloom"]["verdict"] == "unclear"
    assert flash["time_ms"]["rounds"] == 5
    assert [bar["met"] for bar in record["bars"]] == [True, True]
    assert record["ceilings"]["matmul_by_size"].keys() == {"16"}
    assert ours["of_matmul"] == ours["tflops"] / record["ceilings"]["matmul_tflops"]
    assert "tiny-causal (5 rounds" in text.err
    assert "bars: 2 of 2 met" in text.out
    assert "cudnn failed in all cells: RuntimeError" in text.out
    assert f"record: {out}" in text.out
    assert "clock and power are not known: nvidia-smi is not on the path" in text.out


def test_one_wrong_kernel_of_ours_gives_status_1(card, capsys):
    assert card("--peers", "flash", "--config", WRONG.encode(), "--bars", "none") == 1
    text = capsys.readouterr().out
    assert "wrong" in text
    assert f"{WRONG.encode()} wrong in tiny: out: an element is off by" in text
    assert "no record is kept; --out FILE keeps one" in text


def test_one_failing_kernel_of_ours_gives_status_1(card, capsys):
    assert card("--peers", "flash", "--config", FAILING.encode(), "--cases", "tiny") == 1
    assert "failed in all cells: RuntimeError: ptxas is unhappy" in capsys.readouterr().out


def test_a_failing_peer_is_no_fault_of_ours(card):
    assert card("--peers", "cudnn", "--bars", "none") == 0


def test_strict_wants_every_bar(card, tmp_path):
    bars = tmp_path / "high.json"
    bars.write_text(json.dumps({**BARS, "cells": {"tiny": {"tflops": 1e9}}}))
    assert card("--peers", "flash", "--bars", str(bars)) == 0
    assert card("--peers", "flash", "--bars", str(bars), "--strict") == 1
    bars.write_text(json.dumps({**BARS, "cells": {"tiny": {"faster_than": ["fa4"]}}}))
    assert card("--peers", "flash", "--bars", str(bars), "--strict") == 1  # not known is not met


def test_the_reference_is_no_contender(card, capsys, tmp_path):
    """In float32 on an emulated card without Triton only the reference would take the case."""
    cases = tmp_path / "wide.json"
    wide = {**CASES["cases"][0], "head_dim": 640}
    cases.write_text(json.dumps({"cases": [wide]}))
    assert card("--cases-file", str(cases), "--peers", "flash", "--bars", "none") == 0
    out = capsys.readouterr().out
    assert "tileloom refused in all cells: only the reference takes it, which is no kernel" in out
    assert "triton: head dims 640 and 640 exceed 512" in out


def test_a_config_that_cannot_run_gives_its_reasons(card, capsys):
    config = GluonSm90Config(2, 128, 99).encode()
    assert card("--peers", "flash", "--config", config) == 0
    out = capsys.readouterr().out
    assert f"{config} refused in all cells: attention: config=" in out
    assert "bytes of shared memory" in out


def test_a_lost_device_keeps_what_is_there(card, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run.json"
    real = bench.run_cell

    def run_cell(case, contenders, session):
        if case.is_causal:
            session.step("tiny-causal: checking tileloom")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(case, contenders, session)

    monkeypatch.setattr(bench, "run_cell", run_cell)
    assert card("--peers", "flash", "--out", str(out)) == 1
    record = load(out)
    assert record["finished"] is False
    assert [cell["case"]["name"] for cell in record["cells"]] == ["tiny"]
    assert record["notes"][-1].startswith(
        "the run ended early, after 1 of 2 cases, in the step 'tiny-causal: checking tileloom': "
        "RuntimeError: CUDA error"
    )
    assert "ended early" in capsys.readouterr().out


def test_a_hanging_kernel_ends_the_process_and_keeps_what_is_there(
    card, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "run.json"
    ended = []
    real = bench.run_cell

    def run_cell(case, contenders, session):
        if not case.is_causal:
            return real(case, contenders, session)
        session.step("tiny-causal: timing tileloom")
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_cell", run_cell)
    monkeypatch.setattr(watchdog, "end_process", ended.append)
    assert card("--peers", "flash", "--out", str(out), "--step-limit", "3") == 130
    assert "tiny-causal: timing tileloom" in ended[0]
    record = load(out)
    assert [cell["case"]["name"] for cell in record["cells"]] == ["tiny"]
    assert record["notes"][-1] == ended[0]
    assert "tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--peers", "fa3"], "--peers names 'fa3'"),
        (["--cases", "d64"], "--cases names 'd64'"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--baseline", "me"], "--baseline is 'me'; it must be one of the contenders: "),
        (["--config", "gluon_sm90"], "--config 'gluon_sm90' is no config"),
        (["--bars", "/nowhere.json"], "the bars file /nowhere.json cannot be read"),
        (["--cases-file", "/nowhere.json"], "the cases file /nowhere.json cannot be read"),
    ],
)
def test_wrong_arguments(card, capsys, args, text):
    assert card(*args) == 2
    assert text in capsys.readouterr().err


def test_few_rounds_are_noted(card, capsys):
    assert card("--peers", "flash", "--rounds", "2", "--cases", "tiny", "--bars", "none") == 0
    assert "2 rounds are too few to call anything faster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "config", "cases"),
    [
        ("triton:64,32,8,2", TritonConfig(64, 32, 8, 2), "*"),
        (GluonSm90Config().encode(), GluonSm90Config(), "*"),
        ("d64-*@triton:64,32,8,2", TritonConfig(64, 32, 8, 2), "d64-*"),
    ],
)
def test_read_config(text, config, cases):
    assert command.read_config(text) == (config, cases)


GLUON = GluonSm90Config().encode()


@pytest.mark.parametrize(
    "text",
    ["", "triton", "triton:a,b,c,d", "x:1", f"{GLUON},", GLUON.replace("tma", "cp"), f"{GLUON}@"],
)
def test_a_text_that_is_no_config(text):
    with pytest.raises(OptionError, match=r"is no config.*Try: --config"):
        command.read_config(text)


def test_quick_takes_less():
    def arguments(*args):
        parser = argparse.ArgumentParser()
        command._add_arguments(parser)
        return parser.parse_args(["attention", *args])

    full, quick = command._plan(arguments()), command._plan(arguments("--quick"))
    assert (full.rounds, quick.rounds) == (9, 5)
    assert quick.sample_ms < full.sample_ms
    names = [contender.name for contender, _ in command._contenders(arguments("--quick"))]
    assert names == ["cudnn", "efficient", "tileloom"]
    names = [contender.name for contender, _ in command._contenders(arguments())]
    assert names == ["cudnn", "flash", "efficient", "fa4", "tileloom"]
    assert [c.name for c, _ in command._contenders(arguments("--peers", "none"))] == ["tileloom"]


def test_the_shipped_files_are_found_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command._shipped("attention_cases.json").is_file()
    with pytest.raises(OptionError, match=r"is neither in .* nor in .*Try: run from a clone"):
        command._shipped("nothing.json")
