"""The bandwidth report: what is printed, what is written, and that kernels still run."""

from __future__ import annotations

import pytest
import torch
from tests.launch.fake_cuda import DeviceTensor

from tileloom.tuning import bandwidth
from tileloom.tuning.bandwidth import Measured, bytes_moved, end_graph, start_graph
from tileloom.tuning.cached import cached_autotune
from tileloom.tuning.hints import HeuristicType

pytest.importorskip("triton")
from tests.tuning import tuned_kernels as kernels
from tests.tuning.replayed import CONFIGS, STREAM, ReplayedDebug, by_block
from tests.tuning.tuned_kernels import FACTS, meta


@pytest.fixture
def reporting(store, monkeypatch):
    class Mine(ReplayedDebug):
        times = staticmethod(by_block(b64=0.3, b128=0.2, b256=0.4))
        asked: list = []  # noqa: RUF012

    def make(**facts):
        known = FACTS | {"profile_bandwidth": True, "kernel_num_gb": 0.1} | facts
        return cached_autotune(
            {"x": 1024}, CONFIGS, meta(), HeuristicType.POINTWISE, inductor_meta=known,
            caching_autotuner_cls=Mine,
        )(kernels.scale)  # fmt: skip

    return make


def run(tuner):
    return tuner.run(DeviceTensor(), DeviceTensor(), 1000, stream=STREAM)


def test_the_report_is_printed_and_written(reporting, tmp_path, capsys):
    start_graph()
    first = reporting(kernel_name="triton_poi_small", kernel_num_gb=0.05)
    second = reporting(kernel_name="triton_poi_large")
    other = reporting(kernel_name="extern_other", profile_bandwidth_regex="triton_")
    run(first)
    run(second)
    run(other)
    run(second)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "0.200ms    \t0.050 GB \t  250.00GB/s \t triton_poi_small",
        "0.200ms    \t0.100 GB \t  500.00GB/s \t triton_poi_large",
    ]
    end_graph(str(tmp_path / "report"))
    here = __file__
    summary = f"SUMMARY ({here})\n0.60ms   \t 0.25 GB\t 416.67GB/s\n"
    assert capsys.readouterr().out == summary
    assert (tmp_path / "report").read_text() == (
        "====================\n"
        f"TRITON KERNELS BANDWIDTH INFO ({here})\n"
        "0.200ms    \t0.050 GB \t  250.00GB/s \t 33.33% \t triton_poi_small\n"
        "0.200ms    \t0.100 GB \t  500.00GB/s \t 33.33% \t triton_poi_large\n"
        "0.200ms    \t0.100 GB \t  500.00GB/s \t 33.33% \t triton_poi_large\n"
        f"{summary}\n"
    )
    start_graph()
    end_graph(str(tmp_path / "report"))
    assert capsys.readouterr().out == ""


def test_every_call_launches_the_kernel(reporting, store):
    """Inductor's own launches a reported kernel once, and leaves its outputs stale afterwards."""
    cuda = reporting()
    run(cuda)
    asked = len(type(cuda).asked)
    before = _launches()
    run(cuda)
    run(cuda)
    assert _launches() == before + 2
    assert len(type(cuda).asked) == asked


def _launches():
    from tests.launch.fake_cuda import _the_one

    return _the_one().count()


def test_the_longest_stands_first_and_a_slow_one_is_red(tmp_path, capsys):
    start_graph()
    bandwidth._calls.extend([Measured(1.0, 1.0, "short"), Measured(3.0, 9.0, "long")])
    end_graph(str(tmp_path / "r"))
    lines = (tmp_path / "r").read_text().splitlines()[2:4]
    assert [line.split("\t")[-2:] for line in lines] == [
        [" 75.00% ", " long"],
        [" 25.00% ", " short"],
    ]
    start_graph()
    assert Measured(1.0, 0.5, "").line(colour=True).startswith("\x1b[31m1.000ms")
    assert Measured(1.0, 0.7, "").line(colour=True).startswith("1.000ms")
    assert Measured(0.01, 0.001, "").line(colour=True).startswith("0.010ms")
    assert Measured(1.0, 0.5, "").line().startswith("1.000ms")


def test_bytes_moved():
    x = torch.zeros(8, 4)
    names = ["in_ptr0", "in_out_ptr0", "xnumel", "in_ptr1", "in_ptr2"]
    given = [x.expand(8, 4), x.half(), 32, torch.zeros(1, 4).expand(8, 4), torch.zeros(0, 4)]
    assert bytes_moved(given, names) == 128 + 2 * 64 + 16


def test_profile_bandwidth_chooses_the_class():
    facts = FACTS | {"profile_bandwidth": True}
    make = cached_autotune({"x": 8}, CONFIGS, meta(), HeuristicType.POINTWISE, inductor_meta=facts)
    assert isinstance(make(kernels.scale), bandwidth.DebugAutotuner)
