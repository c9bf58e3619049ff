"""What loads and stores say to the caches changes nothing, in the spelling of each Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.versions import triton_folder

ROOT = Path(__file__).parents[2]
KERNEL = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def passed_on(x_ptr, y_ptr, n):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + at, mask=at < n, other=0, cache_modifier=".cg")
    x += gl.load(x_ptr + at, mask=at < n, other=0, volatile=True)
    gl.store(y_ptr + at, x, mask=at < n, cache_modifier=".wt")
    gl.store(y_ptr + n + at, x, mask=at < n, eviction_policy="evict_first")


def main():
    x = torch.arange(100)
    y = torch.zeros(200, dtype=torch.int64)
    passed_on[(1,)](x, y, 100, num_warps=4)
    assert (y == 2 * torch.cat([x, x])).all()
"""


@pytest.mark.parametrize("version", [None, "3.6.0", "3.9.0"])
def test_hints_to_the_caches(tmp_path, version):
    path = tmp_path / "passed_on.py"
    path.write_text(KERNEL)
    places = [str(ROOT / "src")]
    if version is not None:
        other = triton_folder(version)
        if other is None:
            pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
        places.insert(0, str(other))
    result = subprocess.run(
        [sys.executable, "-m", "tileloom", "check", str(path), "--schedule", "late"],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "passed_on: 2 launches in 2 runs; 0 errors, 0 warnings and infos" in result.stdout
