"""What is right but slow: bank conflicts, spills and serialised wgmma, as warnings."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.emulator import support
from tileloom import emulator
from tileloom.cli.main import main
from tileloom.emulator import costs
from tileloom.emulator.costs import Assembled
from tileloom.emulator.irtext import read_module
from tileloom.emulator.lower import Program
from tileloom.emulator.report import Reporter
from tileloom.errors import OptionError


@gluon.jit
def turned(x_ptr, out_ptr, SHARED: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    cols: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    buf = gl.allocate_shared_memory(gl.float32, [2, 64, 32], SHARED)
    m = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, rows)), 1)
    n = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, rows)), 0)
    buf.index(1).store(gl.load(x_ptr + m * 32 + n))
    value = buf.index(1).load(cols)
    m = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, cols)), 1)
    n = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, cols)), 0)
    gl.store(out_ptr + m * 32 + n, value)


def run_turned(layout, **options):
    x, out = torch.randn(64, 32), torch.zeros(64, 32)
    with emulator.run(**options) as run:
        turned[(1,)](x, out, layout, num_warps=4)
    assert torch.equal(x, out)
    return run


PLAIN = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
SWIZZLED = gl.SwizzledSharedLayout(1, 1, 32, [1, 0])
HALF = gl.SwizzledSharedLayout(1, 1, 8, [1, 0])


@pytest.mark.parametrize("level", ["ttgir", "machine"])
@pytest.mark.parametrize(("layout", "factor"), [(PLAIN, 32), (HALF, 4), (SWIZZLED, None)])
def test_bank_conflicts_are_warnings_with_their_factor(level, layout, factor):
    run = run_turned(layout, level=level, costs=["conflicts"])
    assert [r.severity for r in run.reports] == (["warning"] if factor else [])
    if factor is None:
        return
    name = __file__.rsplit("/", 1)[-1]
    line = turned.fn.__code__.co_firstlineno + 8
    assert run.reports[0].text().splitlines() == [
        f"[cost] warning: shared memory is read with bank conflicts: {factor} accesses in place of "
        "one for each wavefront",
        f"    at   {name}:{line}  | value = buf.index(1).load(cols)   (local load)",
        "    hint a shared layout that swizzles, or a register layout whose threads lie along the "
        "contiguous dimension",
        f"    seen kernel turned, schedule='late', seed=0, level='{level}'",
    ]


def test_costs_are_told_only_if_asked_for():
    assert run_turned(PLAIN).reports == []
    assert run_turned(PLAIN, costs=["conflicts"], ignore=["cost"]).reports == []
    with pytest.raises(OptionError, match="costs='time' is not known; accepted are"):
        run_turned(PLAIN, costs=["time"])


@triton.jit
def crowded(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    product = tl.load(x_ptr + at) * tl.load(x_ptr + N + at)
    tl.store(out_ptr + at, product + tl.sum(product))


def run_crowded(**options):
    with emulator.run(level="machine", costs=["registers"]) as run:
        crowded[(1,)](torch.randn(4096), torch.zeros(2048), 2048, num_warps=1, **options)
    return run


def test_spills_are_warnings_with_bytes_and_registers():
    assert run_crowded().reports == []
    (report,) = run_crowded(maxnreg=32).reports
    assert (report.kind, report.severity) == ("cost", "warning")
    assert report.message.startswith("the assembler spills ")
    assert report.message.endswith(" bytes (stores and loads together) at 32 registers a thread")
    assert int(report.message.split()[3]) > 0
    assert report.line == crowded.fn.__code__.co_firstlineno + 1


@pytest.mark.parametrize("case", ["specialised_gemm", "named_barriers"])
def test_good_kernels_cost_nothing(case):
    with emulator.run(level="machine", costs=costs.COSTS) as run:
        support.load_case(case).main()
    assert run.reports == []


def reports_of(assembled):
    reporter = Reporter(True, frozenset(), "late", 0, "machine")
    dump = support.CASES.parent / "dumps" / "3.7.1" / "split_sum.machine.mlir"
    program = Program(read_module(dump.read_text()), level="machine")
    program.assembled = assembled
    costs.check(program, ("registers",), reporter)
    return [(r.severity, r.message) for r in reporter.reports]


def test_serialised_wgmma_and_a_missing_assembler():
    note = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert reports_of(Assembled(168, 0, (note, "something else"))) == [
        ("warning", f"the assembler lets no wgmma overlap: {note}"),
    ]
    assert reports_of(Assembled(problem="RuntimeError: no ptxas")) == [
        ("info", "registers and spills are not known: RuntimeError: no ptxas"),
    ]


def test_a_compiler_that_fails_is_no_failure_of_the_run(monkeypatch):
    def fail(*_):
        raise RuntimeError("Cannot find ptxas\nmore")

    monkeypatch.setattr("tileloom.launch.compat.assemble_again", fail)
    (report,) = run_crowded(maxnreg=40).reports
    assert report.severity == "info"
    assert report.message.endswith("are not known: RuntimeError: Cannot find ptxas")


def test_check_looks_for_conflicts_and_asks_the_assembler_on_demand(tmp_path, capsys):
    path = tmp_path / "slow.py"
    text = "import torch\nfrom tests.emulator import test_costs\n\ndef main():\n"
    path.write_text(text + "    test_costs.run_crowded_here()\n")
    ways = ["--schedule", "late", "--level", "machine"]
    assert main(["check", str(path), *ways]) == 0
    assert "32 accesses in place of one" in (out := capsys.readouterr().out)
    assert "spills" not in out
    assert main(["check", str(path), *ways, "--registers"]) == 0
    out = capsys.readouterr().out
    assert "[cost] warning: the assembler spills" in out
    assert "--arch sm_90a --sms 4 --registers\n" in out


def run_crowded_here():
    turned[(1,)](torch.randn(64, 32), torch.zeros(64, 32), PLAIN, num_warps=4)
    crowded[(1,)](torch.randn(4096), torch.zeros(2048), 2048, num_warps=1, maxnreg=32)
