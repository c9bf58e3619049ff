"""What only a real card can show about the timer; the rest is tested on the CPU."""

import json
import time

import pytest
import torch

from tileloom.bench import AttentionCase, DeviceTimer, Plan, Session, attention_peers, run_cell
from tileloom.bench.machine import Watch, describe_machine, l2_bytes
from tileloom.bench.stats import quantile
from tileloom.bench.timer import Runner, interleave
from tileloom.cli import bench as command
from tileloom.testing import assert_accurate

pytestmark = pytest.mark.gpu
PLAN = Plan(5, sample_ms=5.0, warm_ms=5.0, pause_s=0.01)


def _device():
    return torch.device("cuda", torch.cuda.current_device())


def _matmul(size):
    a = torch.randn(size, size, device=_device(), dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda i: torch.mm(a, a, out=out)


def test_host_time_is_not_in_the_sample():
    """A matmul whose host side takes ten times as long as the device's has the same device time."""
    quick = _matmul(2048)

    def slow(i):
        deadline = time.perf_counter() + 3e-4
        while time.perf_counter() < deadline:
            pass
        quick(i)

    timed = interleave([Runner("quick", quick), Runner("slow", slow)], PLAN, DeviceTimer(_device()))
    assert {one.error for one in timed.values()} == {None}
    device = {n: quantile([s.device_ms for s in one.samples], 0.5) for n, one in timed.items()}
    host = {n: quantile([s.host_us for s in one.samples], 0.5) for n, one in timed.items()}
    assert host["slow"] >= 300 > host["quick"]
    assert device["slow"] < 0.15
    assert device["slow"] == pytest.approx(device["quick"], rel=0.15)


def test_twice_the_work_takes_twice_the_time():
    one = _matmul(4096)

    def two(i):
        one(i)
        one(i)

    timed = interleave([Runner("one", one), Runner("two", two)], PLAN, DeviceTimer(_device()))
    ms = {n: quantile([s.device_ms for s in t.samples], 0.5) for n, t in timed.items()}
    assert ms["two"] / ms["one"] == pytest.approx(2.0, rel=0.1)


def test_pytorchs_backends_and_ours_pass_the_gate():
    case = AttentionCase("gpu", 2, 4, 4, 1024, 1024, 64, True)
    session = Session(
        _device(), DeviceTimer(_device()), PLAN, judge=assert_accurate, l2_bytes=l2_bytes(_device())
    )
    contenders = [*attention_peers(["flash", "efficient"]), command.ours("tileloom", None)]
    with torch.no_grad():
        cell = run_cell(case, contenders, session)
    assert [(entry.status, entry.reason) for entry in cell.entries] == [("ok", None)] * 3
    assert cell.sets > 2  # the inputs are far smaller than the cache


def test_products_are_measured_beside_pytorchs(tmp_path):
    sizes = {"m": 512, "n": 1024, "k": 1024}
    cases = [
        {"name": "plain", **sizes},
        {"name": "fused", **sizes, "bias": True, "activation": "gelu"},
        {"name": "chunks", **sizes, "chunks": 4},
    ]
    path, out = tmp_path / "cases.json", tmp_path / "run.json"
    path.write_text(json.dumps({"cases": cases}))
    arguments = ["gemm", "--cases-file", str(path), "--rounds", "5", "--peers", "torch,seed"]
    assert command.main([*arguments, "--out", str(out)]) == 0
    for cell in json.loads(out.read_text())["cells"]:
        entries = {entry["name"]: entry for entry in cell["entries"]}
        assert {name: e["reason"] for name, e in entries.items()} == dict.fromkeys(entries)
        assert entries["tileloom"]["about"]["backend"] == "gluon_sm90"


def test_the_machine_is_described():
    found = describe_machine(_device())
    assert found["card"] == torch.cuda.get_device_name()
    assert found["l2_bytes"] > 2**20
    watch = Watch(_device())
    try:
        if watch.reason is None:
            start = time.perf_counter()
            while watch.between(start, time.perf_counter()) is None:
                assert time.perf_counter() - start < 30, "nvidia-smi writes nothing"
                time.sleep(0.1)
            state = watch.between(start, time.perf_counter())
            assert state is not None
            assert state.clock_mhz > 100
            assert state.power_w > 10
    finally:
        watch.close()
