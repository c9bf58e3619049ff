"""The house rules of the design page, applied to every file; and planted breaches of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import house

SOURCES = house.package_sources()
MODULES = frozenset(source.module for source in SOURCES)
ids = pytest.mark.parametrize(
    "source", SOURCES, ids=[str(s.path.relative_to(house.PACKAGE)) for s in SOURCES]
)

VERSION_FILES = ("launch.compat", "device.compat", "emulator.dialect")
DEVICE_UNITS = ("target", "launch", "emulator", "integrations")


@ids
def test_imports_follow_the_diagram(source):
    assert house.wrong_imports(source, MODULES) == []


@ids
def test_devices_come_from_tensors(source):
    if house.unit(source.module) not in DEVICE_UNITS:
        assert house.literal_devices(source) == []


@ids
def test_environment_is_read_in_knobs_only(source):
    if source.module != "knobs":
        assert house.environment_reads(source) == []


@ids
def test_version_of_triton_is_read_in_compat_files_only(source):
    if source.module not in VERSION_FILES:
        assert house.triton_versions(source) == []


def repository_files():
    for folder in ("src", "tests", "benchmarks", "examples", "scripts"):
        yield from sorted((house.ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    "path", list(repository_files()), ids=lambda path: str(path.relative_to(house.ROOT))
)
def test_files_and_functions_are_short(path):
    assert house.too_long(house.parse(path.read_text(), path)) == []


def planted(text, module="ops.attention.api", file="api.py"):
    return house.parse(text, file, module)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("ops.attention.api", "launch.launcher", True),
        ("ops.attention.api", "ops._op", True),
        ("ops.attention.api", "ops.attention.config", True),
        ("ops.attention.api", "ops.gemm.api", False),
        ("ops.attention.api", "ops", False),
        ("ops.collective.api", "ops.gemm.api", True),
        ("ops.gemm.api", "ops.collective.api", False),
        ("ops._op", "ops.attention.api", False),
        ("ops", "ops.attention.autograd", True),
        ("ops.attention.api", "testing.accuracy", False),
        ("ops.attention.api", "emulator.machine", False),
        ("ops.attention.api", "cli.main", False),
        ("launch.aot", "target", True),
        ("launch.aot", "tuning.measure", False),
        ("launch.aot", "ops.attention.kernels", False),
        ("tuning.autotuner", "launch.launcher", True),
        ("tuning.autotuner", "device.barriers", False),
        ("device.tma", "scheduling.params", False),
        ("scheduling.host", "device.clock", True),
        ("errors", "log", False),
        ("knobs", "errors", False),
        ("testing.accuracy", "ops.attention.reference", True),
        ("testing.accuracy", "ops.attention.api", False),
        ("testing.accuracy", "emulator.machine", True),
        ("testing.accuracy", "tuning.measure", True),
        ("testing.accuracy", "tuning.store", False),
        ("bench.run", "ops.attention.reference", False),
        ("bench.run", "launch.aot", True),
        ("emulator.machine", "testing.accuracy", False),
        ("cli.demo", "integrations.hf_attention", True),
        ("cli.demo", "bench.run", True),
        ("cli.demo", "report.page", True),
        ("report.page", "cli.demo", False),
        ("report.page", "bench.store", True),
        ("integrations.hf_attention", "ops.attention.api", True),
        ("integrations.hf_attention", "testing.accuracy", False),
        ("integrations.hf_attention", "report.page", False),
    ],
)
def test_the_diagram(importer, imported, allowed):
    assert house.may_import(importer, imported) is allowed


def test_a_new_package_must_be_put_into_the_diagram():
    with pytest.raises(KeyError, match="newcomer stands in no row"):
        house.may_import("cli.main", "newcomer.module")


@pytest.mark.parametrize(
    "text",
    [
        "import tileloom.cli.main",
        "from tileloom.cli import main",
        "from tileloom import testing",
        "from tileloom.testing.accuracy import assert_accurate",
        "from ... import testing",
        "from ...cli.main import main",
        "def f():\n    from tileloom.bench import run",
        "import importlib\nimportlib.import_module('tileloom.cli.main')",
    ],
)
def test_planted_import_is_found(text):
    known = MODULES | {"testing", "cli", "cli.main", "bench", "bench.run", "testing.accuracy"}
    complaints = house.wrong_imports(planted(text), known)
    assert len(complaints) == 1
    assert complaints[0].startswith(f"api.py:{text.count(chr(10)) + 1}: ops.attention.api may not")


def test_harmless_imports_pass():
    text = "from tileloom import knobs, log\nfrom . import config\nimport torch.testing\n"
    assert house.wrong_imports(planted(text), MODULES) == []


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_planted_device_is_found(name):
    kinds = 'if t.kind == "cuda": pass\nt = Target("cuda", (9, 0), 132, 0, "H100")\ny = "cudart"'
    text = f'"""On "{name}"."""\nx = make(device="{name}")\n{kinds}'
    assert len(house.literal_devices(planted(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['X']",
        "import os\nos.environ.get('X')",
        "import os\nos.getenv('X')",
        "from os import getenv",
        "from os import environ as e",
    ],
)
def test_planted_environment_read_is_found(text):
    assert len(house.environment_reads(planted(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import triton\nif triton.__version__ > '3.6': pass",
        "from triton import __version__",
        "from importlib.metadata import version\nversion('triton')",
        "import importlib.metadata\nimportlib.metadata.version('triton')",
    ],
)
def test_planted_triton_version_is_found(text):
    assert len(house.triton_versions(planted(text))) == 1


def test_planted_long_file_and_functions_are_found():
    def function(size, decorator=""):
        docstring = '    """Says.\n\n    More.\n    """\n'
        return f"{decorator}\ndef f():\n{docstring}" + "    pass\n" * (size - 1)

    assert house.too_long(planted("x = 1\n" * 500)) == []
    assert len(house.too_long(planted("x = 1\n" * 501))) == 1
    assert house.too_long(planted(function(80))) == []
    assert (
        "f has 81 lines beside its docstring; at most 80"
        in house.too_long(planted(function(81)))[0]
    )
    for decorator in ("@triton.jit", "@gluon.jit", "@jit", "@triton.jit(do_not_specialize=['n'])"):
        assert house.too_long(planted(function(250, decorator))) == []
        assert len(house.too_long(planted(function(251, decorator)))) == 1


HEAVY = {"triton", "rich", "matplotlib", "transformers", "tokenizers", "threadpoolctl", "numpy"}

# What the package's import adds to torch's, and what the leaves add to that. The time is that of
# an import from the files: the first of the repetitions may have to compile them.
IMPORTS = """
import importlib, json, os, statistics, sys, time
import torch

def added(before):
    return sorted(set(sys.modules) - before)

before, environment, times = set(sys.modules), dict(os.environ), []
for _ in range(9):
    for name in added(before):
        del sys.modules[name]
    importlib.invalidate_caches()
    start = time.perf_counter()
    import tileloom
    times.append(time.perf_counter() - start)
found = {"package": added(before), "median_s": statistics.median(times)}
from tileloom import errors, knobs, log, target, testing
target.target_of(torch.zeros(1))
found["leaves"] = added(before)
found["gpu"] = torch.cuda.is_initialized()
found["environment"] = dict(os.environ) == environment
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS],
        env={"PYTHONPATH": str(house.ROOT / "src"), "PATH": "/usr/bin:/bin"},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_nothing_but_itself(imported):
    ours = [name for name in imported["package"] if name.startswith("tileloom")]
    assert ours == ["tileloom"]
    assert not HEAVY & set(imported["package"])


def test_leaves_load_nothing_heavy(imported):
    assert "tileloom.testing.accuracy" in imported["leaves"]
    assert not HEAVY & set(imported["leaves"])


def test_import_touches_neither_gpu_nor_environment(imported):
    assert imported["gpu"] is False
    assert imported["environment"] is True


def test_import_costs_at_most_30_ms_on_top_of_torch(imported):
    assert imported["median_s"] <= 0.030


def test_design_page_and_rows_agree():
    """Where the design page is at hand, every box of its diagram stands in ROWS or SIDES."""
    page = Path(house.ROOT.parent / "shared" / "design" / "architecture.md")
    if not page.exists():
        pytest.skip("the design page is not beside this checkout")
    diagram = page.read_text().split("## Who may import whom")[1].split("```")[1]
    boxes = {
        word for line in diagram.splitlines() for word in line.split("|")[0].split("(")[0].split()
    } | set(house.SIDES)
    known = {name for row in house.ROWS for name in row} | set(house.SIDES)
    assert boxes <= known
    assert known - boxes == {"ops._op", "ops._plans", "ops._counters", "ops"}
