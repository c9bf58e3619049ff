"""TMA descriptors on a GPU: the real driver's verdicts, and what a kernel reads through one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from tests.cpasync import layouts
from tests.cpasync.test_tensormap import EDGES, IMAGES, RIGHT
from tileloom.cpasync.tensormap import TensorMap, TensorMapTable
from tileloom.cpasync.tensormap_layout import MOST_BYTES, Im2col, Tiled
from tileloom.errors import LaunchError, TileloomError
from tileloom.launch import driver
from tileloom.target import target_of_device

IS_HOPPER = torch.cuda.is_available() and target_of_device(torch.device("cuda")).capability == (
    9,
    0,
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]


BYTES = 32 * 1024  # of shared memory that probe-raw writes out


def verdicts(layout, address):
    """Ours, or the sentence, and the driver's."""
    said = []
    for ask in (layout.check, layout.encode):
        try:
            ask(address)
            said.append(True)
        except (TileloomError, LaunchError, IndexError) as error:
            said.append(str(error))
    return said[0], said[1] is True


def counted(layout):
    """Bytes of a box where an incomplete step counts as nothing."""
    return layout.dtype.itemsize * math.prod(
        n // step for n, step in zip(layout.box, layout.element_strides)
    )


def agree(layout, address):
    """The driver takes what we take, and nothing else but what is wrong by the documentation."""
    driver.bind_context(0)
    ours, takes = verdicts(layout, address)
    if ours is not True and takes:
        # The driver asks for no swizzle with 32 bytes interleaved, counts an incomplete step in a
        # box as nothing, where the copy moves an element for it, and pixels modulo 2^32.
        assert (
            (layout.interleave == "32B" and "it needs swizzle='32B'" in ours)
            or (isinstance(layout, Tiled) and "TMA takes 233472 at most" in ours
            and counted(layout) <= MOST_BYTES)
            or (isinstance(layout, Im2col) and "end at 2^31 - 1 at most" in ours
            and max(layout.shape) > 2**32 - 2**15)
        )  # fmt: skip
    else:
        assert (ours is True) == takes, ours


@settings(deadline=None, max_examples=500)
@given(layouts.tiled())
def test_the_driver_agrees_on_boxes(case):
    agree(*case)


@settings(deadline=None, max_examples=500)
@given(layouts.im2col())
def test_the_driver_agrees_in_im2col_mode(case):
    agree(*case)


@pytest.mark.parametrize(("kind", "taken", "refused"), EDGES)
def test_the_driver_agrees_at_every_edge(kind, taken, refused):
    driver.bind_context(0)
    right = RIGHT if kind is Tiled else IMAGES
    assert verdicts(kind(**(right | taken)), 1 << 20) == (True, True)
    ours, takes = verdicts(kind(**(right | refused)), 1 << 20)
    assert ours is not True
    assert not takes


@pytest.fixture(scope="module")
def launches(binaries):
    """Of a box of each rank: `probe-raw` writes out shared memory as it lies."""
    made = {}

    def launch_of(rank):
        if rank not in made:
            binary = binaries(f"probe-raw-{rank}")
            made[rank] = binary.cubin.launcher(
                binary.types, grid=(1,), shared_bytes=0, device=torch.cuda.current_device()
            )
        return made[rank]

    return launch_of


def loaded(launches, x, made, corner):
    """What a load through a descriptor leaves in shared memory, as a box; and the bytes behind."""
    out = torch.zeros(BYTES // 4 + 1, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    launches(x.dim())(stream, made, out, made.box_bytes, *reversed(corner))
    torch.cuda.synchronize()
    assert out[-1] == -1, f"{made.box_bytes} bytes were expected, and they did not come"
    memory = out[:-1].cpu().view(torch.uint8)
    at = places(made)
    return memory[at].view(x.dtype), memory[made.shared_bytes :]


def places(made):
    """Offsets of a box's bytes, ``[*box, bytes]``: 16-byte pieces are permuted by their row."""
    inner = made.box_shape[-1] * made.layout.dtype.itemsize
    span = int(made.layout.swizzle.rstrip("B")) if made.layout.swizzle != "none" else 0
    rows = made.box_bytes // inner
    at = torch.arange(rows)[:, None] * (span or inner) + torch.arange(inner)
    return (at ^ (at >> 7 & max(span // 16 - 1, 0)) << 4).view(*made.box_shape[:-1], inner)


def box_of(x, made, corner, fill):
    """What the box holds: every so many-th element from the corner on, `fill` outside."""
    steps = made.layout.element_strides
    at = [torch.arange(n) * s + c for n, s, c in zip(made.box_shape, steps, corner)]
    inside = [(a >= 0) & (a < n) for a, n in zip(at, x.shape)]
    grid = torch.meshgrid(*[a.clamp(0, n - 1) for a, n in zip(at, x.shape)], indexing="ij")
    hit = torch.stack(torch.meshgrid(*inside, indexing="ij")).all(0)
    return torch.where(hit, x.cpu()[grid], torch.full((), fill).to(x.dtype))


def check_box(launches, x, made, corner, fill=0.0):
    box, behind = loaded(launches, x, made, corner)
    right = box_of(x, made, corner, fill)
    if x.is_floating_point():
        box, right = box.nan_to_num(77), right.nan_to_num(77)
    assert torch.equal(box, right)
    assert (behind == 0x55).all()


def numbers(shape, dtype):
    return (
        torch.arange(torch.Size(shape).numel(), device="cuda").view(shape).remainder(97).to(dtype)
    )


@pytest.mark.parametrize("corner", [(0, 0), (8, 64), (-3, 16), (250, 480), (300, 0), (0, -96)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.float64])
@pytest.mark.parametrize("part", [1, 2, 4])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_boxes_lie_in_shared_memory_as_documented(launches, swizzle, part, dtype, corner):
    """Also boxes narrower than the swizzle's span, whose rows it spaces out."""
    columns = (swizzle or 64) // part
    if columns % 16:
        pytest.skip("a row is a multiple of 16 bytes")
    x = numbers((256, 512), dtype)
    fill = "nan" if dtype.is_floating_point else "zero"
    box = (32, columns // x.element_size())
    made = TensorMap.tiled(x, box, swizzle=f"{swizzle}B" if swizzle else "none", fill=fill)
    check_box(launches, x, made, corner, float("nan") if fill == "nan" else 0)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_every_rank(launches, rank, swizzle):
    shape, box = (3, 5, 6, 10, 48)[5 - rank :], (2, 4, 2, 8, 16)[5 - rank :]
    x = numbers(shape, torch.float16)
    made = TensorMap.tiled(x, box, swizzle=swizzle)
    for corner in ((0, 0, 0, 0, 0), (1, -2, 3, -5, 16), (2, 4, -1, 7, 40), (-1, 3, 5, 2, -8)):
        check_box(launches, x, made, corner[5 - rank :])


@pytest.mark.parametrize("steps", [(2, 1), (3, 1), (8, 1)])
def test_every_so_many_th_row(launches, steps):
    x = numbers((256, 64), torch.float16)
    made = TensorMap.tiled(x, (64, 64), swizzle="128B", element_strides=steps)
    for corner in ((4, 0), (-6, 0), (230, 32)):
        check_box(launches, x, made, corner)


def test_strides_of_zero_and_of_transposed_tensors(launches):
    row = numbers((1, 64), torch.float16)
    for x in (row.expand(40, 64), numbers((8, 40, 64), torch.float16).transpose(0, 1)):
        made = TensorMap.tiled(x, (*(4,) * (x.dim() - 1), 64), swizzle="128B")
        check_box(launches, x, made, (36,) + (6,) * (x.dim() - 2) + (0,))


def test_float32_is_rounded_to_tf32(launches):
    x = torch.randn(64, 32, device="cuda")
    box, _ = loaded(launches, x, TensorMap.tiled(x, (64, 32), tf32=True), (0, 0))
    assert (box.view(torch.int32) & 0x1FFF == 0).all()
    assert not torch.equal(box, x.cpu())
    assert ((box - x.cpu()).abs() <= x.cpu().abs() * 2**-10).all()


def test_a_table_on_the_gpu_is_aligned():
    maps = [TensorMap.tiled(torch.zeros(64, 64, device="cuda"), (8, 8)) for _ in range(3)]
    table = TensorMapTable(maps).to("cuda")
    assert table.data_ptr() % 64 == 0
    assert table.cpu().numpy().tobytes() == b"".join(m.encoded for m in maps)
