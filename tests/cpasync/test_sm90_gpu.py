"""On a Hopper GPU: im2col loads, bulk copies and their policies, multicast and clusters."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from tests.cpasync.gpu_cubins import MASKS, NUMBERS, POLICIES
from tests.cpasync.test_gpu import run
from tests.house import ROOT
from tileloom.cpasync import TensorMap, TensorMapTable

pytestmark = pytest.mark.gpu

PIXELS, CHANNELS = 64, 64  # of a load
# Of a convolution: images [N, spatial..., C], window, stride, padding and dilation.
WINDOWS = {
    "1d": ((3, 50, 64), (3,), (1,), (1,), (1,)),
    "1d-strided": ((2, 61, 64), (5,), (3,), (2,), (2,)),
    "2d": ((2, 9, 11, 64), (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d-valid": ((2, 9, 11, 64), (3, 2), (1, 1), (0, 0), (1, 1)),
    "2d-strided": ((3, 12, 15, 64), (3, 5), (2, 3), (1, 2), (1, 1)),
    "2d-dilated": ((2, 12, 13, 64), (3, 3), (1, 2), (2, 2), (2, 3)),
    "3d": ((2, 5, 6, 7, 64), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
}


def unfolded(x, tap, stride, padding, dilation, out):
    """`x` under one tap of the window, a row for each output pixel: plain indexing."""
    rows = []
    for image, *at in itertools.product(range(x.shape[0]), *map(range, out)):
        where = [o * s - p + t * d for o, s, p, t, d in zip(at, stride, padding, tap, dilation)]
        inside = all(0 <= w < n for w, n in zip(where, x.shape[1:-1]))
        rows.append(x[(image, *where)] if inside else torch.zeros_like(x.view(-1, x.shape[-1])[0]))
    return torch.stack(rows)


@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("name", WINDOWS)
def test_im2col_is_unfold(binaries, device, name, swizzle):
    shape, window, stride, padding, dilation = WINDOWS[name]
    spatial = shape[1:-1]
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(spatial, window, stride, padding, dilation)
    ]
    x = torch.randn(shape, device=device).half()
    images = TensorMap.im2col(
        x, lower=[-p for p in padding],
        upper=[p - d * (k - 1) for p, d, k in zip(padding, dilation, window)],
        pixels=PIXELS, channels=CHANNELS, swizzle=swizzle, element_strides=(1, *stride, 1),
    )  # fmt: skip
    binary = binaries(f"probe-im2col-{len(shape)}")
    launch = binary.cubin.launcher(
        binary.types, grid=(1,), shared_bytes=0, device=torch.cuda.current_device()
    )
    stream = torch.cuda.current_stream().cuda_stream
    total = shape[0] * torch.Size(out).numel()
    got = torch.full((total + PIXELS, CHANNELS), torch.nan, device=device, dtype=torch.float16)
    starts = list(itertools.product(range(shape[0]), *map(range, out)))
    for tap in itertools.product(*map(range, window)):
        offsets = [t * d for t, d in zip(tap, dilation)]
        got.fill_(torch.nan)
        for first in range(0, total, PIXELS):
            image, *at = starts[first]
            begin = [o * s - p for o, s, p in zip(at, stride, padding)]
            box = got[first : first + PIXELS]
            target = TensorMap.tiled(box, (PIXELS, CHANNELS), swizzle=swizzle)
            crd = 0, *reversed(begin), image
            launch(stream, images, target, *crd, *reversed(offsets))
        right = unfolded(x.cpu(), tap, stride, padding, dilation, out)
        assert torch.equal(got[:total].cpu(), right), tap


def launched(binary, *arguments, grid=(1, 1, 1), **options):
    number = torch.cuda.current_device()
    launch = binary.cubin.launcher(
        binary.types, grid=grid, shared_bytes=0, device=number, **options
    )
    launch(torch.cuda.current_stream().cuda_stream, *arguments)
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", [None, "add"])
@pytest.mark.parametrize(("start", "upper"), [((0, 0, 0), 0), ((0, 5, 7), 0), ((1, 2, 3), -2)])
def test_im2col_stores_walk_over_the_pixels(binaries, device, op, start, upper):
    n, h, w = 2, 9, 11
    images = torch.randint(0, 50, (n, h, w, CHANNELS), device=device).half()
    rows = torch.randint(0, 50, (PIXELS, CHANNELS), device=device).half()
    right = images.clone()
    pixels = list(itertools.product(range(n), range(h + upper), range(w + upper)))
    for row, pixel in zip(rows, pixels[pixels.index(start) :]):
        right[pixel] = row if op is None else right[pixel] + row
    described = TensorMap.im2col(
        images, lower=(0, 0), upper=(upper, upper), pixels=PIXELS, channels=CHANNELS
    )
    source = TensorMap.tiled(rows, (PIXELS, CHANNELS))
    crd = 0, *reversed(start)
    launched(binaries(f"probe-im2col-store-{op}"), source, described, *crd)
    assert torch.equal(images, right)


@pytest.mark.parametrize("form", ["atom", "pointer", "tensor"])
def test_descriptors_of_every_form(binaries, device, form):
    """In an atom of the DSL, which is a parameter, and from a table in global memory."""
    matrices = torch.randn(3, 64, 64, device=device).half()
    maps = [TensorMap.tiled(m, (8, 64)) for m in matrices]
    table = TensorMapTable(maps).to(device)
    for i, matrix in enumerate(matrices):
        out = torch.zeros(8, 64, device=device, dtype=torch.float16)
        arguments = (maps[i], out) if form == "atom" else (table, out, i)
        launched(binaries(f"probe-form-{form}"), *arguments)
        assert torch.equal(out, matrix[8:16])


CHECKED = """
import sys, torch
from tests.cpasync.gpu_cubins import find
source, out = torch.arange(64.0, device="cuda"), torch.zeros(4, device="cuda")
find("probe-checked").prepare(1, (), source, out, int(sys.argv[1]))()
torch.cuda.synchronize()
print(out.tolist())
"""


@pytest.mark.parametrize(
    ("offset", "said", "end"),
    [(8, "[8.0, 9.0, 10.0, 11.0]", 0), (2, "cp_async_gs: dst is not a multiple of 16 bytes", 1)],
)
def test_the_debug_mode_stops_a_kernel_with_a_sentence(binaries, offset, said, end):
    binaries("probe-checked")
    command = [sys.executable, "-c", CHECKED, str(offset)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, said in done.stdout) == (end, True), done.stdout + done.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_bulk_copies_of_every_size_and_policy(binaries, device, policy):
    source = torch.randn(1024 + 4, device=device)
    for size in (16, 32, 48, 128, 1040, 4080, 4096):
        for shift in (0, 4):  # the copies begin at a multiple of 16 bytes, not of 32
            target = torch.full_like(source, torch.nan)
            run(binaries(f"probe-bulk-{policy}"), (), source[shift:], target[4 - shift :], size)
            right = torch.full_like(source, torch.nan)
            right[4 - shift :][: size // 4] = source[shift:][: size // 4]
            assert torch.equal(target.nan_to_num(99), right.nan_to_num(99))


def test_cp_async_arrives_at_mbarriers(binaries, device):
    source = torch.randn(1024, device=device)
    out = torch.zeros_like(source)
    run(binaries("probe-arrivals"), (), source, out)
    assert torch.equal(out, source)


@pytest.mark.parametrize("kind", ["box", "bulk"])
@pytest.mark.parametrize("name", MASKS)
def test_multicast(binaries, device, name, kind):
    masks = MASKS[name]
    blocks, binary = len(masks), binaries(f"probe-multicast-{kind}-{name}")
    source = torch.randn(8 * blocks, 32, device=device)
    out = torch.full((2, blocks, blocks, 8, 32), torch.nan, device=device)
    boxes = TensorMap.tiled(source, (8, 32))
    grid, cluster = (2 * blocks, 1, 1), (blocks, 1, 1)
    launched(binary, boxes, source, out, grid=grid, cluster=cluster)
    right = torch.full_like(out, -1.0)
    for r, mask in enumerate(masks):
        for block in range(blocks):
            if mask >> block & 1:
                right[:, block, r] = source[8 * r : 8 * r + 8]
    assert torch.equal(out, right)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_arrivals_from_other_blocks(binaries, device, blocks):
    binary = binaries(f"probe-remote-{blocks}")
    out = torch.zeros(blocks, dtype=torch.int32, device=device)
    launched(binary, out, grid=(blocks, 1, 1), cluster=(blocks, 1, 1))
    assert out.tolist() == [sum(range(2, blocks + 1)), *range(2, blocks + 1)]


def test_numbers_of_every_type_reach_a_kernel(binaries, device):
    out = torch.zeros(len(NUMBERS), dtype=torch.float64, device=device)
    launched(binaries("probe-numbers"), out, *NUMBERS.values())
    assert out.tolist() == [float(number) for number in NUMBERS.values()]
