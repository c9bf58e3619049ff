"""A gather in a cluster reads the memory of the CTA that a place lies in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launch.versions import triton_folder
from tileloom.emulator.cluster import Spread, owners

ROOT = Path(__file__).parents[2]
HALVES = Spread((np.s_[:, 0:4], np.s_[:, 4:8]), (0, 1), 2)
COPIES = Spread((np.s_[:, :], np.s_[:, :]), (0, 0), 1)
ALONE = Spread((np.s_[:, :],), (0,), 1)


def test_places_belong_to_the_cta_that_holds_them():
    own = np.arange(8)[None, :]
    assert owners(own, (1, 8), 1, HALVES, HALVES) == [[0], [1]]
    assert owners(7 - own, (1, 8), 1, HALVES, HALVES) == [[1], [0]]
    assert owners(own * 0 + 3, (1, 8), 1, HALVES, HALVES) == [[0], [0]]
    assert owners(own, (1, 8), 1, COPIES, HALVES) == [[0, 1], [0, 1]]
    assert owners(7 - own, (1, 8), 1, HALVES, COPIES) == [[0], [1]]
    assert owners(7 - own, (1, 8), 1, ALONE, ALONE) == [[0]]


KERNEL = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def swap_halves(x_ptr, L: gl.constexpr):
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[0, 1]])
    rows = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, L)), 1)
    columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    box = gl.allocate_shared_memory(gl.int32, [2, 64], S)
    box.store(gl.load(x_ptr + rows * 64 + columns))
    AFTER_STORE
    x = box.gather((columns ^ 32) + rows * 0, axis=1)
    gl.barrier(cluster=True)
    gl.store(x_ptr + rows * 64 + columns, x)


def main():
    x = torch.arange(128, dtype=torch.int32).reshape(2, 64)
    y = x.clone()
    swap_halves[(1,)](y, gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=[[0, 1]]),
                      num_warps=4, num_ctas=2)
    assert (y == torch.cat([x[:, 32:], x[:, :32]], 1)).all()
"""


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("gl.barrier(cluster=True)", 0, "0 errors"),
        ("pass", 1, "by partition 'main, CTA 1'"),
    ],
)
def test_the_cluster_must_meet_between_store_and_gather(tmp_path, line, status, words):
    other = triton_folder("3.9.0")
    if other is None:
        pytest.skip("Triton 3.9.0 is not in .triton-versions; `make test` installs it")
    path = tmp_path / "swap_halves.py"
    path.write_text(KERNEL.replace("AFTER_STORE", line))
    result = subprocess.run(
        [sys.executable, "-m", "tileloom", "check", str(path), "--schedule", "late", "--level",
         "ttgir"],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(other), str(ROOT / "src")])},
    )  # fmt: skip
    assert (result.returncode, words in result.stdout) == (status, True), result.stdout
