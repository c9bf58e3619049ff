"""TMA descriptors on a GPU: the real driver's verdicts, and what a kernel reads through one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.cpasync import layouts
from tests.cpasync.test_tensormap import EDGES, IMAGES, RIGHT
from tileloom.cpasync.tensormap import TensorMap, TensorMapTable
from tileloom.cpasync.tensormap_layout import Tiled
from tileloom.errors import LaunchError, TileloomError
from tileloom.launch import descriptors, driver
from tileloom.target import target_of_device

IS_HOPPER = torch.cuda.is_available() and target_of_device(torch.device("cuda")).capability == (
    9,
    0,
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]


def verdicts(layout, address):
    said = []
    for ask in (layout.check, layout.encode):
        try:
            ask(address)
            said.append(True)
        except (TileloomError, LaunchError, IndexError):
            said.append(False)
    return said


@settings(deadline=None, max_examples=500)
@given(layouts.tiled())
def test_the_driver_agrees_on_boxes(case):
    driver.bind_context(0)
    ours, drivers = verdicts(*case)
    assert ours == drivers, case


@settings(deadline=None, max_examples=500)
@given(layouts.im2col())
def test_the_driver_agrees_in_im2col_mode(case):
    driver.bind_context(0)
    ours, drivers = verdicts(*case)
    assert ours == drivers, case


@pytest.mark.parametrize(("kind", "taken", "refused"), EDGES)
def test_the_driver_agrees_at_every_edge(kind, taken, refused):
    driver.bind_context(0)
    right = RIGHT if kind is Tiled else IMAGES
    assert verdicts(kind(**(right | taken)), 1 << 20) == [True, True]
    assert verdicts(kind(**(right | refused)), 1 << 20) == [False, False]


def load_box(monkeypatch, x, made, corner, swizzle):
    """Read a box through `made`, by a kernel that takes Gluon's descriptor of the same box."""
    from tests.cpasync.gluon_kernels import read_box_kernel
    from tileloom import launch

    box = list(made.box_shape)
    out = torch.full(box, -1.0, device=x.device, dtype=x.dtype)
    desc = gluon_descriptor(x, box, swizzle)
    with monkeypatch.context() as patched:
        patched.setattr(descriptors.TensorMaps, "encode", lambda self, address: made.encoded)
        descriptors._tables.clear()
        launcher = launch.prepare(read_box_kernel, num_warps=4)
        for _ in range(3):  # the third is the packed launch, which takes the bytes
            out.fill_(-1)
            launcher[(1,)](desc, out, *corner, ROWS=box[0], COLUMNS=box[1])
    torch.cuda.synchronize()
    descriptors._tables.clear()
    return out


def gluon_descriptor(x, box, swizzle):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), len(box))
    return TensorDescriptor.from_tensor(x, box, layout)


@pytest.mark.parametrize("corner", [(0, 0), (8, 64), (-3, 16), (250, 480)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_kernel_reads_the_box(monkeypatch, swizzle, dtype, corner):
    x = torch.arange(256 * 512, device="cuda").view(256, 512).remainder(97).to(dtype)
    columns = (swizzle or 64) // x.element_size()
    fill = "nan" if dtype.is_floating_point else "zero"
    name = f"{swizzle}B" if swizzle else "none"
    made = TensorMap.tiled(x, (32, columns), swizzle=name, fill=fill)
    want = torch.full((32, columns), float("nan") if fill == "nan" else 0, device="cuda").to(dtype)
    row, column = corner
    part = x[max(row, 0) : row + 32, column : column + columns]
    want[max(-row, 0) : max(-row, 0) + part.shape[0], : part.shape[1]] = part
    read = load_box(monkeypatch, x, made, corner, swizzle)
    assert torch.equal(read.nan_to_num(7), want.nan_to_num(7))


def test_every_second_row(monkeypatch):
    x = torch.randn(256, 64, device="cuda").half()
    made = TensorMap.tiled(x, (64, 64), swizzle="128B", element_strides=(2, 1))
    assert torch.equal(load_box(monkeypatch, x, made, (4, 0), 128), x[4:68:2])


def test_a_table_on_the_gpu_is_aligned():
    maps = [TensorMap.tiled(torch.zeros(64, 64, device="cuda"), (8, 8)) for _ in range(3)]
    table = TensorMapTable(maps).to("cuda")
    assert table.data_ptr() % 64 == 0
    assert table.cpu().numpy().tobytes() == b"".join(m.encoded for m in maps)
