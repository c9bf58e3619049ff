"""4-D TMA boxes [1, 1, rows, D] as attention uses them: what the hardware does at every edge.

Each case loads a box, stores it, and compares with the same slice of the tensor: permuted and
expanded (stride 0) tensors, boxes that begin before 0 or reach past the end (zeros in, nothing
out), and head dims that fill only a part of the box.
"""

import pytest
import torch

from tileloom.target import target_of_device

IS_HOPPER = torch.cuda.is_available() and target_of_device(torch.device("cuda")).capability == (
    9,
    0,
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]


def copy_box(x, y, at_load, at_store, rows, width):
    from tests.device.kernels import copy_box_kernel
    from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor

    source, target = descriptor(x, rows, width), descriptor(y, rows, width)
    copy_box_kernel[(1,)](source, target, *at_load, *at_store, num_warps=4)


def tensors(kind, dtype, d):
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
    if kind == "contiguous":
        return make(2, 3, 100, d)
    if kind == "permuted":
        return make(2, 100, 3, d).transpose(1, 2)
    if kind == "sliced":
        return make(2, 3, 130, d + 24)[:, :, 5:105, 8 : 8 + d]
    if kind == "expanded heads":
        return make(2, 1, 100, d).expand(2, 3, 100, d)
    if kind == "expanded batch":
        return make(1, 3, 100, d).expand(2, 3, 100, d)
    if kind == "expanded rows":
        return make(2, 3, 1, d).expand(2, 3, 100, d)
    raise AssertionError(kind)


@pytest.mark.parametrize("d", [8, 16, 32, 64, 72, 96, 128, 200, 256])
@pytest.mark.parametrize("row", [0, 36, 64, 99, -10, -64, 100, 250])
@pytest.mark.parametrize(
    "kind",
    ["contiguous", "permuted", "sliced", "expanded heads", "expanded batch", "expanded rows"],
)
def test_box_equals_slice(kind, row, d):
    rows, width = 64, max(16, 1 << (d - 1).bit_length())
    x = tensors(kind, torch.bfloat16, d)
    want = torch.zeros(rows, d, device="cuda", dtype=x.dtype)
    low, high = max(row, 0), min(row + rows, 100)
    if high > low:
        want[low - row : high - row] = x[1, 2, low:high]
    y = torch.full((2, 3, rows, d), float("nan"), device="cuda", dtype=x.dtype)
    copy_box(x, y, (1, 2, row), (0, 1, 0), rows, width)
    assert torch.equal(y[0, 1], want)
    y[0, 1] = float("nan")
    assert y.isnan().all(), "the store reached outside its box"


@pytest.mark.parametrize("row", [40, 63, 64, 70])
def test_store_is_clipped(row):
    x = tensors("contiguous", torch.float16, 64)
    memory = torch.full((2, 64, 3, 64), float("nan"), device="cuda", dtype=torch.float16)
    y = memory.transpose(1, 2)
    copy_box(x, y, (0, 0, 0), (1, 1, row), 64, 64)
    kept = max(64 - row, 0)
    assert torch.equal(y[1, 1, 64 - kept :], x[0, 0, :kept])
    y[1, 1, 64 - kept :] = float("nan")
    assert memory.isnan().all()


def test_a_descriptor_whose_batches_are_a_row_apart_loads_any_sequence():
    """`[T, H, T, D]`: the first index is a sequence's first row; zeros before its row 0."""
    x = tensors("contiguous", torch.bfloat16, 64)[0].transpose(0, 1).contiguous()  # [100, 3, 64]
    batch = x.transpose(0, 1)[None]
    from tests.device.kernels import copy_box_kernel
    from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor

    for first, row in ((20, 5), (30, -10), (36, 0), (90, -64), (70, -200)):
        y = torch.full((1, 1, 64, 64), float("nan"), device="cuda", dtype=x.dtype)
        want = torch.zeros(64, 64, device="cuda", dtype=x.dtype)
        low = max(row, 0)
        if row + 64 > low:
            want[low - row :] = x[first + low : first + row + 64, 1]
        source, target = descriptor(batch, 64, 64, True), descriptor(y, 64, 64)
        copy_box_kernel[(1,)](source, target, first, 1, row, 0, 0, 0, num_warps=4)
        assert torch.equal(y[0, 0], want), (first, row)
