"""On a Hopper GPU: im2col loads, bulk copies and their policies, multicast and clusters."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cpasync.gpu_cubins import MASKS, POLICIES
from tests.cpasync.test_gpu import binaries, device, run  # noqa: F401  (fixtures)
from tileloom.cpasync import TensorMap

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
def test_im2col_is_unfold(binaries, device, name, swizzle):  # noqa: F811
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
        binary.types, grid=(1, 1, 1), shared_bytes=0, device=torch.cuda.current_device()
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


@pytest.mark.parametrize("policy", POLICIES)
def test_bulk_copies_of_every_size_and_policy(binaries, device, policy):  # noqa: F811
    source = torch.randn(1024 + 4, device=device)
    for size in (16, 32, 48, 128, 1040, 4080, 4096):
        for shift in (0, 4):  # the copies begin at a multiple of 16 bytes, not of 32
            target = torch.full_like(source, torch.nan)
            run(binaries(f"probe-bulk-{policy}"), (), source[shift:], target[4 - shift :], size)
            right = torch.full_like(source, torch.nan)
            right[4 - shift :][: size // 4] = source[shift:][: size // 4]
            assert torch.equal(target.nan_to_num(99), right.nan_to_num(99))


def test_cp_async_arrives_at_mbarriers(binaries, device):  # noqa: F811
    source = torch.randn(1024, device=device)
    out = torch.zeros_like(source)
    run(binaries("probe-arrivals"), (), source, out)
    assert torch.equal(out, source)


@pytest.mark.parametrize("kind", ["box", "bulk"])
@pytest.mark.parametrize("name", MASKS)
def test_multicast(binaries, device, name, kind):  # noqa: F811
    masks = MASKS[name]
    blocks, binary = len(masks), binaries(f"probe-multicast-{kind}-{name}")
    source = torch.randn(8 * blocks, 32, device=device)
    out = torch.full((2, blocks, blocks, 8, 32), torch.nan, device=device)
    launch = binary.cubin.launcher(
        binary.types, grid=(2 * blocks, 1, 1), shared_bytes=0, cluster=(blocks, 1, 1),
        device=torch.cuda.current_device(),
    )  # fmt: skip
    boxes = TensorMap.tiled(source, (8, 32))
    launch(torch.cuda.current_stream().cuda_stream, boxes, source, out)
    right = torch.full_like(out, -1.0)
    for r, mask in enumerate(masks):
        for block in range(blocks):
            if mask >> block & 1:
                right[:, block, r] = source[8 * r : 8 * r + 8]
    assert torch.equal(out, right)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_arrivals_from_other_blocks(binaries, device, blocks):  # noqa: F811
    binary = binaries(f"probe-remote-{blocks}")
    out = torch.zeros(blocks, dtype=torch.int32, device=device)
    launch = binary.cubin.launcher(
        binary.types, grid=(blocks, 1, 1), shared_bytes=0, cluster=(blocks, 1, 1),
        device=torch.cuda.current_device(),
    )  # fmt: skip
    launch(torch.cuda.current_stream().cuda_stream, out)
    assert out.tolist() == [sum(range(2, blocks + 1)), *range(2, blocks + 1)]
