"""TMA loads in im2col mode: what a box holds, beside torch's unfold; and a kernel on Triton 3.9."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.launch.versions import triton_folder
from tileloom.emulator.im2col import Im2colDesc
from tileloom.emulator.memory import Storage, storage_bytes

ROOT = Path(__file__).parents[2]


def descriptor(x, block, lower, upper, steps, nan=False):
    storage = Storage(0, "x", storage_bytes(x), 4)
    return Im2colDesc(
        storage, 0, list(x.shape), list(x.stride()), block, "f32", nan, "x", None, None,
        tuple(lower), tuple(upper), tuple(steps),
    )  # fmt: skip


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (1, 1), (2, 3)])
def test_boxes_are_the_columns_of_a_convolution(rows, columns, padding, stride):
    x = torch.randn(2, 6, 7, 5)  # N, H, W, C
    kernel = (rows, columns)
    ends = [padding - (size - 1) for size in kernel]
    desc = descriptor(x, (16, 8), [-padding] * 2, ends, [stride] * 2)
    columns_of = torch.nn.functional.unfold(
        x.permute(0, 3, 1, 2), kernel, padding=padding, stride=stride
    )
    height, width = ((n + 2 * padding - k) // stride + 1 for n, k in zip((6, 7), kernel))
    wanted = columns_of.reshape(2, 5, rows * columns, height * width).permute(2, 0, 3, 1)
    wanted = wanted.reshape(rows * columns, -1, 5)  # tap; pixel of all images; channel
    for tap, offsets in enumerate(itertools.product(range(rows), range(columns))):
        for first in range(0, wanted.shape[1], 16):
            image, pixel = divmod(first, height * width)
            at = [image, *(i * stride - padding for i in divmod(pixel, width)), 0, *offsets]
            box = desc.read(at)
            shown = wanted[tap, first : first + 16]
            assert np.array_equal(box[: len(shown), :5], shown)
            assert not box[len(shown) :].any()  # behind the last image
            assert not box[:, 5:].any()  # behind the last channel


def test_what_lies_outside_can_be_nan():
    x = torch.ones(1, 2, 2, 4)
    box = descriptor(x, (4, 4), [-1, -1], [-1, -1], [1, 1], nan=True).read([0, -1, -1, 0, 0, 0])
    assert np.isnan(box[:3]).all()
    assert (box[3] == 1).all()


def test_the_book_sees_at_least_what_is_read():
    x = torch.ones(2, 4, 5, 4)
    desc = descriptor(x, (4, 4), [0, 0], [0, 0], [1, 1])
    inside, _, _ = desc.window([0, 3, 3, 0, 0, 0])  # the last two pixels, then the next image's
    assert inside == (slice(0, 2), slice(0, 4), slice(0, 5), slice(0, 4))
    empty, _, _ = desc.window([5, 0, 0, 0, 0, 0])
    assert np.zeros(x.shape)[empty].size == 0


KERNEL = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptorIm2Col


@gluon.jit
def taps(desc, out_ptr, TAPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    box = gl.allocate_shared_memory(gl.float32, [16, 32], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, L)), 1)
    at = rows * 32 + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, L)), 0)
    total = gl.zeros([16, 32], gl.float32, L)
    for tap in range(TAPS):
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.async_load_im2col(
            desc, [0, -1, -1, 0], [(tap // 3).to(gl.int16), (tap % 3).to(gl.int16)], full, box
        )
        WAIT
        total += box.load(L)
        gl.barrier()
    gl.store(out_ptr + at, total)


def main():
    x = torch.arange(16.0).reshape(1, 4, 4, 1).repeat(1, 1, 1, 32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    desc = TensorDescriptorIm2Col.from_tensor(
        x, [16, 32], layout, element_strides=[1, 1, 1, 1], pixel_box_lower_corner=[-1, -1],
        pixel_box_upper_corner=[-1, -1],
    )
    out = torch.empty(16, 32)
    taps[(1,)](desc, out, 9, num_warps=4)
    wanted = torch.nn.functional.avg_pool2d(x.permute(0, 3, 1, 2), 3, 1, 1) * 9
    assert (out == wanted[0, 0].reshape(16, 1).round()).all()
"""


@pytest.mark.parametrize(
    ("wait", "status", "words"),
    [
        ("mbarrier.wait(full, tap & 1)", 0, "taps: 1 launches in 1 runs; 0 errors"),
        ("pass", 1, "[race] shared buffer box is read by a local load while a TMA load write of"),
    ],
)
def test_a_kernel_adds_up_the_taps_of_a_window(tmp_path, wait, status, words):
    other = triton_folder("3.9.0")
    if other is None:
        pytest.skip("Triton 3.9.0 is not in .triton-versions; `make test` installs it")
    path = tmp_path / "taps.py"
    path.write_text(KERNEL.replace("WAIT", wait))
    result = subprocess.run(
        [sys.executable, "-m", "tileloom", "check", str(path), "--schedule", "late", "--level",
         "ttgir"],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(other), str(ROOT / "src")])},
    )  # fmt: skip
    assert (result.returncode, words in result.stdout) == (status, True), result.stdout
