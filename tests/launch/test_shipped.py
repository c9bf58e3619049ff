"""Every shipped config of every operator compiles and keeps its budget, on every Triton."""

from pathlib import Path

import pytest
from tests.launch import samples, shipped
from tests.launch.versions import KNOWN_FAULTS, OTHERS, triton_folder

import tileloom.ops
from tileloom.launch.aot import CompileFailure, compile_in_workers
from tileloom.launch.budget import faults, is_unfenced
from tileloom.launch.occupancy import LIMITS

# The first test of a version bears the whole pass over its kernels.
pytestmark = pytest.mark.timeout(2400)


def _id(value):
    return value if isinstance(value, str) else value.name


def _check(results, spec, arch, version=shipped.OWN):
    found = faults(spec, results[spec.name, arch])
    known = KNOWN_FAULTS.get((version, spec.name))
    if known is not None and arch == "sm_90":
        assert [known in text for text in found] == [True], "\n".join(found)
        return
    assert not found, "\n".join(found)


def _folder_of(version):
    if triton_folder(version) is None:
        pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")


@pytest.mark.parametrize(("spec", "arch"), shipped.pairs(shipped.OWN, full=False), ids=_id)
def test_on_the_own_triton(shipped_results, spec, arch):
    _check(shipped_results(shipped.OWN), spec, arch)


@pytest.mark.parametrize(
    ("version", "spec", "arch"),
    [(v, *pair) for v in OTHERS for pair in shipped.pairs(v, full=False)],
    ids=_id,
)
def test_sm_90_on_other_versions(shipped_results, version, spec, arch):
    _folder_of(version)
    results = shipped_results(version)
    assert results[spec.name, arch].error is not None or (
        results[spec.name, arch].triton == version
    )
    _check(results, spec, arch, version)


@pytest.mark.full
@pytest.mark.parametrize("version", [shipped.OWN, *OTHERS])
@pytest.mark.parametrize(("spec", "arch"), shipped.pairs(shipped.OWN, full=True), ids=_id)
def test_every_kernel_and_architecture(shipped_results, version, spec, arch):
    if version != shipped.OWN:
        _folder_of(version)
    _check(shipped_results(version, full=True), spec, arch, version)


def test_every_kernel_file_ships_something():
    root = Path(tileloom.ops.__path__[0])
    files = {
        ".".join(("tileloom.ops", *path.relative_to(root).with_suffix("").parts))
        for path in root.rglob("kernel_*.py")
    }
    assert files == {spec.function.partition(":")[0] for spec in shipped.SPECS.values()}


def test_a_pass_is_made_once_for_all_processes(tmp_path, monkeypatch):
    calls = []

    def compile_now(pairs, **options):
        calls.append(options["cache_dir"])
        return [CompileFailure("k", "sm_90", "no")]

    monkeypatch.setattr(shipped, "compile_in_workers", compile_now)
    for version in (shipped.OWN, shipped.OWN, "3.6.0"):
        found = shipped.compile_once(version, full=False, shared=tmp_path, cache=tmp_path / "c")
        assert found == {("k", "sm_90"): CompileFailure("k", "sm_90", "no")}
    assert calls == [tmp_path / "c" / shipped.OWN, tmp_path / "c" / "3.6.0"]


def test_the_quick_pass_leaves_out_little():
    """Each of a kernel's functions has quick specs, and the pattern of what is left out is used."""
    assert not all(map(shipped.is_quick, shipped.SPECS))
    quick = {spec.function for spec, _ in shipped.pairs(shipped.OWN, full=False)}
    assert quick == {spec.function for spec in shipped.SPECS.values()}


def test_specs_are_well_formed():
    for name, spec in shipped.SPECS.items():
        assert spec.archs, name
        assert set(spec.archs) <= set(LIMITS), name
        assert len(set(spec.archs)) == len(spec.archs), name
        assert not spec.spill_budget or spec.spill_reason, name


@pytest.mark.parametrize("version", OTHERS)
def test_a_pipeline_without_its_fence_is_found(version):
    """On 3.6.0 the sample multiplication has the fault that shipped kernels must not have."""
    _folder_of(version)
    one_stage = samples.matmul("one_stage", num_warps=8, num_stages=1)
    pairs = [(samples.MATMUL, "sm_90"), (one_stage, "sm_90"), (samples.WGMMA, "sm_90")]
    pipelined, plain, by_tma = compile_in_workers(
        pairs, timeout_s=400, triton_path=triton_folder(version)
    )
    assert "wgmma.mma_async" in pipelined.ptx
    assert "wgmma.mma_async" in plain.ptx
    assert "cp.async.cg." in pipelined.ptx
    assert "cp.async.bulk." in by_tma.ptx
    assert is_unfenced(pipelined) is (version == "3.6.0")
    assert not is_unfenced(plain)
    assert not is_unfenced(by_tma)
    said = any("no proxy fence" in text for text in faults(samples.MATMUL, pipelined))
    assert said is (version == "3.6.0")
