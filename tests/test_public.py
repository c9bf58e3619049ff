"""The public names: a change here is a change of the API, and belongs into CHANGELOG.md."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tileloom

ROOT = Path(__file__).parent.parent

GOLDEN = {
    "tileloom": [
        "__version__",
        "async_input_matmul",
        "attention",
        "attention_varlen",
        "check_signals",
        "cpasync",
        "cross_entropy",
        "emulator",
        "errors",
        "knobs",
        "launch",
        "layer_norm",
        "log",
        "masks",
        "matmul",
        "rms_norm",
        "scheduling",
        "softmax",
        "swiglu",
        "testing",
        "tuning",
    ],
    "tileloom.scheduling": [
        "AsyncInputScheduler",
        "DynamicPersistentScheduler",
        "RasterOrder",
        "Simulation",
        "Span",
        "StaticPersistentScheduler",
        "TileSchedulerParams",
        "WorkTileInfo",
        "simulate",
    ],
    "tileloom.testing": [
        "AccuracyError",
        "AccuracyReport",
        "CanaryError",
        "Case",
        "CaseError",
        "Guarded",
        "Layout",
        "MemoryGuard",
        "WeakCaseError",
        "assert_accurate",
        "dropout_mask",
        "dropout_uniforms",
        "laid_out",
        "poison_",
        "poisoned_memory",
    ],
    "tileloom.launch": [
        "Bundle",
        "KernelSpec",
        "Launcher",
        "Signature",
        "TensorDescriptor",
        "build_bundle",
        "compile_aot",
        "load_bundle",
        "prepare",
        "record_specs",
        "refresh",
        "specs_of",
        "use_bundle",
    ],
    "tileloom.ops": [
        "Choice",
        "PerformanceWarning",
        "attention",
        "gemm",
        "record_choices",
        "rowwise",
    ],
    "tileloom.ops.attention": [
        "attention",
        "attention_reference",
        "attention_varlen",
        "attention_varlen_reference",
        "masks",
    ],
    "tileloom.bench": [
        "AttentionCase",
        "Bar",
        "BarResult",
        "CellResult",
        "Contender",
        "DeviceTimer",
        "Entry",
        "Inputs",
        "PEERS",
        "Plan",
        "Ratio",
        "Sample",
        "Session",
        "Summary",
        "Timer",
        "affordable_rounds",
        "attention_peers",
        "document",
        "geometric_mean",
        "interleave",
        "judge_bars",
        "load",
        "load_bars",
        "load_cases",
        "ratio_of",
        "reference_pair",
        "run_cell",
        "save",
        "select",
        "summarise",
    ],
}


@pytest.mark.parametrize("module", GOLDEN)
def test_all_is_the_api(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == GOLDEN[module]
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_version_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tileloom.__version__ == project["version"]


def test_works_uninstalled():
    done = subprocess.run(
        [sys.executable, "-c", "import tileloom; print(tileloom.__version__, tileloom.__file__)"],
        env={"PYTHONPATH": str(ROOT / "src")},
        cwd="/",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stderr == ""
    version, file = done.stdout.strip().split(" ", 1)
    assert version == tileloom.__version__
    assert Path(file) == ROOT / "src" / "tileloom" / "__init__.py"


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'tileloom' has no attribute 'atention'"):
        _ = tileloom.atention


def test_dir_lists_the_api():
    assert dir(tileloom) == sorted(tileloom.__all__)
