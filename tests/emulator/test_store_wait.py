"""A message sent by a TMA store: waiting until it was read is not waiting until it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.versions import triton_folder

ROOT = Path(__file__).parents[2]
MESSAGE = """
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.device.compat import tma_load, tma_store


@gluon.jit
def pass_on(desc, x_ptr, flag_ptr, out_ptr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    box = gl.allocate_shared_memory(gl.int32, [128], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    if gl.program_id(0) == 0:
        box.store(gl.arange(0, 128, L))
        fence_async_shared()
        tma_store(desc, [0], box)
        tma.store_wait(WAIT)
        if WHOLE:  # Triton lets the threads meet behind it
            at = gl.arange(0, 128, L)
            gl.store(out_ptr + 128 + at, gl.load(x_ptr + at))
        gl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        seen = 0
        while seen == 0:
            seen = gl.atomic_add(flag_ptr, 0, sem="acquire")
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, [0], full, box)
        mbarrier.wait(full, 0)
        gl.store(out_ptr + gl.arange(0, 128, L), box.load(L))


def main():
    message = torch.zeros(128, dtype=torch.int32)
    out = torch.zeros(2, 128, dtype=torch.int32)
    layout = gl.NVMMASharedLayout.get_default_for([128], gl.int32)
    desc = TensorDescriptor.from_tensor(message, [128], layout)
    pass_on[(2,)](desc, message, torch.zeros(1, dtype=torch.int32), out, num_warps=4)
    assert (out[: 1 + WHOLE] == torch.arange(128)).all()
"""


def checked(folder, wait, version=None):
    """Status and words of `tileloom check` on the installed Triton, or on another one."""
    path = folder / "message.py"
    path.write_text(MESSAGE.replace("WAIT", wait).replace("WHOLE", str("False" in wait)))
    places = [str(ROOT / "src")]
    if version is not None:
        other = triton_folder(version)
        if other is None:
            pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
        places.insert(0, str(other))
    result = subprocess.run(
        [sys.executable, "-m", "tileloom", "check", str(path), "--schedule", "random", "--seed",
         "1", "--level", "ttgir"],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    return result.returncode, result.stdout


@pytest.mark.parametrize("version", [None, "3.6.0", "3.9.0"])
def test_a_wait_for_the_reading_publishes_nothing(tmp_path, version):
    status, said = checked(tmp_path, "0", version)
    assert status == 1, said
    assert "[race] global tensor 'desc' is read by a TMA load while a TMA store write" in said


@pytest.mark.parametrize("version", ["3.9.0"])
def test_a_wait_for_the_writing_publishes(tmp_path, version):
    status, said = checked(tmp_path, "0, read_only=False", version)
    assert status == 0, said
    assert "0 errors" in said
