"""On a Hopper GPU: what the copies do to memory, long waits, and the examples on real sizes.

The kernels are binaries, compiled on the spot where the CuTe DSL is. For a GPU machine without it,
`python -m tests.cpasync.gpu_cubins` writes them to `.cute-cubins`; carry that folder along.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cpasync import examples
from tests.cpasync.test_probes import BOXES, COPIES, REDUCTIONS, SWIZZLES, copy_case
from tileloom.testing import assert_accurate

pytestmark = pytest.mark.gpu


def run(binary, matrices, *arguments):
    binary.prepare(1, matrices, *arguments)()
    torch.cuda.synchronize()


def on_device(array, device):
    """An array's bytes on the GPU, whatever its type."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(device)


@pytest.mark.parametrize(("size", "how"), COPIES)
def test_cp_async(binaries, device, size, how):
    source, sizes, expected = copy_case(size, how)
    out = torch.zeros(128 * 16, dtype=torch.uint8, device=device)
    tensors = on_device(source, device), out, on_device(sizes, device)
    run(binaries(f"probe-copy-{size}-{how}"), (), *tensors)
    np.testing.assert_array_equal(out.cpu().numpy().reshape(128, 16), expected)


def box_of(values, box, crd):
    """The box that TMA loads: zeros where it lies outside."""
    result = np.zeros(box, values.dtype)
    for index in np.ndindex(*box):
        at = tuple(i + c for i, c in zip(index, crd))
        if all(0 <= i < extent for i, extent in zip(at, values.shape)):
            result[index] = values[at]
    return result


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("name", BOXES)
def test_boxes(binaries, device, name, swizzle):
    shape, _, crd = BOXES[name]
    binary = binaries(f"probe-box-{name}-{swizzle}")
    box = binary.boxes[0]
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    source = torch.from_numpy(values).to(device)
    out = torch.full(box, torch.nan, dtype=torch.float16, device=device)
    run(binary, (source, out), *reversed(crd))
    np.testing.assert_array_equal(out.cpu().numpy(), box_of(values, box, crd))


def reduced(op, old, new):
    """What PTX's operation makes of two arrays; inc and dec wrap at the new value."""
    if op in ("inc", "dec"):
        up = np.where(old >= new, 0, old + 1)
        return up if op == "inc" else np.where((old == 0) | (old > new), new, old - 1)
    named = {"min": np.minimum, "max": np.maximum, "add": np.add}
    return (named.get(op) or getattr(np, f"bitwise_{op}"))(old, new)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions(binaries, device, dtype, op):
    # Small whole numbers: exact in every type.
    source, target = np.random.default_rng(2).integers(1, 100, (2, 16, 16))
    target = target[:8]
    kind = getattr(torch, dtype.lower())
    tensors = [torch.from_numpy(a).to(kind).to(device) for a in (source, target)]
    run(binaries(f"probe-reduce-{dtype}-{op}"), tensors, 0, 0)
    after = tensors[1].cpu().to(torch.int64).numpy()
    np.testing.assert_array_equal(after, reduced(op, target, source[:8]))


def test_wait_of_40_ms_with_tries_of_a_microsecond(binaries, device):
    out = torch.full((1,), -1, dtype=torch.int32, device=device)
    run(binaries("probe-wait"), (), out, 40_000_000)
    assert out.item() == 1


@pytest.mark.parametrize("kind", ["16-cg", "16-ca", "8-ca", "4-ca"])
@pytest.mark.parametrize("n", [1, 3, 4, 1025, 3_000_001])
def test_axpby(binaries, device, n, kind):
    x, y = (torch.randn(n, device=device) for _ in range(2))
    prepare = examples.load("cubins").prepare_axpby
    for blocks in (None, 2):
        z = torch.full_like(x, torch.nan)
        prepare(binaries(f"axpby-{kind}"), 2.0, x, -0.5, y, z, blocks)()
        assert_accurate(z, 2 * x.double() - 0.5 * y.double(), 2 * x - 0.5 * y)


@pytest.mark.parametrize("kind", ["8x512-4-read", "32x512-8-full", "128x128-2-read"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (33, 264), (1000, 3000), (4096, 8192)])
def test_tma_copy_is_read_by_another_kernel(binaries, device, rows, columns, kind):
    """Blocks of as many boxes as stages, and blocks that go round."""
    source = torch.randn(rows, columns, device=device).half()
    for blocks in (None, 7):
        target = torch.full_like(source, torch.nan)
        examples.load("cubins").prepare_copy(binaries(f"copy-{kind}"), source, target, blocks)()
        assert torch.equal(target + 1, source + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (100, 200, 40), (1000, 1032, 1000), (2048,) * 3])
def test_gemm(binaries, device, shape, dtype):
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    c = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    binary = binaries(f"gemm-{str(dtype).removeprefix('torch.')}")
    examples.load("cubins").prepare_gemm(binary, a, b, c)()
    assert_accurate(c, a.double() @ b.double().T, (a.float() @ b.float().T).to(dtype))


@pytest.mark.parametrize("shape", [(128, 256, 65536), (100, 200, 10_000), (512, 520, 4096)])
def test_split_k_gemm(binaries, device, shape):
    cubins, (m, n, k) = examples.load("cubins"), shape
    a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
    c = torch.zeros(m, n, device=device)
    binary = binaries("split_k-float16")
    cubins.prepare_gemm(binary, a, b, c, cubins.parts(m, n, k))()
    # The baseline is cuBLAS's on the same tensor cores, whose fp32 sums are shorter than IEEE's.
    assert_accurate(c, a.double() @ b.double().T, torch.mm(a, b.T, out_dtype=torch.float32))


@pytest.mark.parametrize("name", examples.NAMES)
def test_example_runs_through_the_dsl(device, kernels, name, capsys):
    examples.load(name).main()
    assert "not run" not in capsys.readouterr().out
