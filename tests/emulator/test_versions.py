"""The emulator on the other Triton releases, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.versions import OTHERS, triton_folder

ROOT = Path(__file__).parents[2]
CHOSEN = (
    "silent and (late-ttgir or random-machine) or not_inlined or missing_compiler "
    "or grouped_gemm or named_as_one_type or know_nothing_of "
    "or test_attention_in or test_clusters or test_costs or test_shared_ops or (reported_first and "
    "(cluster_specialised or ptx_mbarriers or shared_counts or polled_flags))"
)
FILES = tuple(
    f"tests/emulator/test_{name}.py"
    for name in ("corpus", "portable", "clusters", "shared_ops", "costs", "pointers", "stream")
)

# Fewer would mean that `CHOSEN` no longer finds what it names.
AT_LEAST = {"3.6.0": 56, "3.8.0": 83, "3.9.0": 112}


@pytest.mark.parametrize("version", OTHERS)
def test_cases_run_on_another_triton(version):
    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *FILES, "-q", "-k", CHOSEN, "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) >= AT_LEAST[version]
