import dataclasses

import pytest
from tests.launch import samples

from tileloom.launch import aot
from tileloom.report.compiled import compile_rows
from tileloom.report.findings import KernelRow


@pytest.mark.timeout(120)
def test_a_kernel_that_compiles_and_one_that_does_not():
    wrong = dataclasses.replace(samples.WRONG, name="wrong[d8]")
    seen = []
    rows, version, left_out = compile_rows(
        [(samples.SCALE, "sm_90"), (wrong, "sm_90")], seconds=60, on_result=seen.append
    )
    good, bad = rows
    assert (good.name, good.arch, good.spill_bytes, good.faults) == ("scale", "sm_90", 0, ())
    assert 8 <= good.registers <= 64
    assert good.blocks_per_sm >= 8
    assert good.compile_s > 0
    assert (bad.name, bad.registers) == ("wrong[d8]", None)
    assert bad.faults[0].startswith("compile: kernel 'wrong[d8]' failed for sm_90")
    assert len(bad.faults[0].splitlines()) == 1
    assert version.startswith("3.")
    assert left_out == 0
    assert {result.name for result in seen} == {"scale", "wrong[d8]"}


def test_when_the_time_is_up_no_further_round_begins(monkeypatch):
    rounds = []

    def compile_in_workers(pairs, **options):
        rounds.append(len(pairs))
        return [aot.CompileFailure(spec.name, arch, "no") for spec, arch in pairs]

    monkeypatch.setattr(aot, "compile_in_workers", compile_in_workers)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    pairs = [(dataclasses.replace(samples.SCALE, name=f"k{i}"), "sm_90") for i in range(25)]
    rows, version, left_out = compile_rows(pairs, seconds=0.0)
    assert (rounds, len(rows), version, left_out) == ([6], 6, "", 19)
    assert rows[5] == KernelRow("k5", "sm_90", faults=("no",))
    rounds.clear()
    assert compile_rows(pairs, seconds=60.0)[2] == 0
    assert rounds == [6, 6, 6, 6, 1]
