"""`tileloom bench rowwise`: its formulas, what it counts, and no number for what is wrong."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from tests.bench.fakes import CPU, FakeTimer, OneMs

from tileloom.bench.function_run import (
    FunctionContender,
    FunctionSession,
    copy_bandwidth,
    run_function_cell,
)
from tileloom.bench.rowwise_case import WORKS, RowwiseCase, load_rowwise_cases
from tileloom.bench.timer import Plan
from tileloom.cli.bench_rowwise import contenders
from tileloom.errors import OptionError
from tileloom.testing import assert_accurate

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "rowwise_cases.json"
PLAN = Plan(rounds=5, sample_ms=1.0, warm_ms=1.0, pause_s=0.0)


@pytest.mark.parametrize("operator", WORKS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_formula_is_what_pytorch_offers(operator, direction):
    case = RowwiseCase("c", operator, 6, 40, direction, "float64")
    inputs = case.inputs(CPU, 0)
    results = []
    for f in (case.work.formula, case.work.eager):
        out = f(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        results.append(torch.autograd.grad(out.sum(), wanted) if wanted else (out,))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def _session(timer: FakeTimer) -> FunctionSession:
    return FunctionSession(CPU, timer, PLAN, assert_accurate, l2_bytes=1000, copy_gbps=2.0)


def _spending(timer: FakeTimer, ms: float, change=lambda out: out):
    def make(case):
        def f(*inputs):
            timer.spend(ms)
            return change(case.work.eager(*inputs))

        return f

    return make


def test_a_cell_has_numbers_for_those_that_are_right_and_reasons_for_the_others():
    def failing(case):
        raise ValueError("no")

    timer = FakeTimer()
    case = RowwiseCase("c", "softmax", 64, 50, "forward", "float32")
    columns = [
        FunctionContender("twice", _spending(timer, 2.0)),
        FunctionContender("once", _spending(timer, 1.0)),
        FunctionContender("wrong", _spending(timer, 0.1, lambda out: out * 1.01)),
        FunctionContender("failing", failing),
    ]
    cell = run_function_cell(case, columns, _session(timer))
    twice, once, wrong, failed = cell.entries
    assert [e.status for e in cell.entries] == ["ok", "ok", "wrong", "failed"]
    assert once.time_ms is not None
    assert once.time_ms.median == pytest.approx(1.0)
    assert once.ratios["twice"].value == pytest.approx(2.0)
    assert once.call_ratios["twice"].value == pytest.approx(2.0)
    assert twice.ratios["once"].value == pytest.approx(0.5)
    # 2 x 64 x 50 x 4 bytes in 1 ms are 0.0256 GB/s, of 2 GB/s.
    assert once.of_copy == pytest.approx(0.0256 / 2)
    assert wrong.time_ms is None
    assert wrong.reason
    assert failed.reason == "ValueError: no"


def test_results_are_judged_again_after_the_timed_calls():
    timer, case = FakeTimer(), RowwiseCase("c", "softmax", 64, 50, "forward", "float32")
    calls = []

    def make(case):
        def f(*inputs):
            timer.spend(1.0)
            calls.append(None)
            return case.work.eager(*inputs) * (1.01 if len(calls) > 20 else 1.0)

        return f

    columns = [FunctionContender("tires", make)]
    (entry,) = run_function_cell(case, columns, _session(timer)).entries
    assert (entry.status, entry.time_ms) == ("wrong", None)
    assert entry.reason is not None
    assert entry.reason.startswith("right at first, wrong after the timed calls: ")


def test_the_backward_is_judged_by_every_gradient():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    timer = OneMs()
    case = RowwiseCase("c", "rms_norm", 32, 64, "backward", "float32")
    columns = [
        FunctionContender("right", lambda case: case.work.eager),
        FunctionContender("half", lambda case: lambda x, w: case.work.eager(x, Halved.apply(w))),
    ]
    cell = run_function_cell(case, columns, _session(timer))
    assert [e.status for e in cell.entries] == ["ok", "wrong"]


def test_quack_takes_part_where_it_has_the_operator_and_says_why_not(monkeypatch):
    """With a package of its names: what is called, with what, and both gradients of layer norm."""
    F = torch.nn.functional

    def layernorm_fwd(x, weight, bias, eps, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32
        out, mean, rstd = torch.native_layer_norm(x.float(), weight.shape, weight, bias, eps)
        return (out, rstd.flatten(), mean.flatten()) if return_rstd else out

    def layernorm_bwd(x, weight, dout, rstd, mean):
        xhat = (x - mean[:, None]) * rstd[:, None]
        a = dout * weight
        across = a.mean(1, keepdim=True) + xhat * (a * xhat).mean(1, keepdim=True)
        return (a - across) * rstd[:, None], (dout * xhat).sum(0), dout.sum(0)

    norms = types.SimpleNamespace(layernorm_fwd=layernorm_fwd, layernorm_bwd=layernorm_bwd)
    package = types.SimpleNamespace(
        rmsnorm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        softmax=lambda x: torch.softmax(x, -1),
        cross_entropy=lambda x, target, reduction: F.cross_entropy(x, target, reduction=reduction),
    )
    (column,) = contenders("quack")[:-1]
    for operator in WORKS:
        for direction in ("forward", "backward"):
            case = RowwiseCase("c", operator, 32, 64, direction, "float32")
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "quack", package)
                patch.setitem(sys.modules, "quack.rmsnorm", norms)
                (entry,) = run_function_cell(case, [column], _session(OneMs())).entries
            if operator == "swiglu":
                assert entry.status == "refused"
                assert entry.reason == "QuACK has swiglu only as a part of its GEMMs"
            else:
                assert entry.status == "ok", entry.reason
    monkeypatch.setitem(sys.modules, "quack", None)
    case = RowwiseCase("c", "softmax", 32, 64, "forward", "float32")
    (entry,) = run_function_cell(case, [column], _session(OneMs())).entries
    assert entry.status == "refused"
    assert entry.reason is not None
    assert entry.reason.startswith("quack cannot be imported (ModuleNotFoundError: ")


def test_a_copy_counts_reads_and_writes():
    assert copy_bandwidth(CPU, OneMs(), PLAN, megabytes=1) == pytest.approx(2 * 2**20 / 1e6)


def test_the_shipped_cases_load_and_have_different_names():
    cases = load_rowwise_cases(SHIPPED)
    assert len({case.name for case in cases}) == len(cases) >= 20
    assert {case.operator for case in cases} == set(WORKS)
    by_name = {case.name: case for case in cases}
    assert by_name["rms_norm-4096-forward"].bytes_moved == 2 * 16384 * 4096 * 2
    assert by_name["swiglu-4096-backward"].bytes_moved == 5 * 16384 * 4096 * 2


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"cases": [{"operator": "tanh", "rows": 1, "columns": 1}]}',
     '{"cases": [{"operator": "softmax", "rows": 1, "columns": 1, "direction": "up"}]}',
     '{"cases": [{"operator": "softmax", "rows": 1, "columns": 1, "colour": 3}]}'],
)  # fmt: skip
def test_a_bad_cases_file_is_refused(tmp_path, content):
    path = tmp_path / "cases.json"
    path.write_text(content)
    with pytest.raises(OptionError, match="cannot be read"):
        load_rowwise_cases(path)
