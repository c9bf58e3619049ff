"""On a Hopper GPU: what the copies do to memory, long waits, and the examples on real sizes."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from tests.cpasync import examples
from tests.cpasync.test_probes import (
    BOXES,
    COPIES,
    REDUCTIONS,
    SWIZZLES,
    box_probe,
    copy_arguments,
    copy_case,
)
from tests.cpasync.test_probes import compiled as compile_probe
from tileloom.testing import assert_accurate

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def probes(kernels):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the probes are compiled for sm_90a")
    return importlib.import_module("tests.cpasync.probes")


@pytest.fixture(scope="module")
def device(probes):
    return torch.device("cuda")


def on_device(array, device):
    """The bytes of an array on the GPU, whatever its type."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(device)


def launched(made, probes, *arguments):
    """Call a probe with pointers of given types to tensors, and other arguments as they are."""
    values = [probes.memory(a[0], a[1].data_ptr()) if isinstance(a, list) else a for a in arguments]
    made(*values)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("size", "how"), COPIES)
def test_cp_async(probes, device, size, how):
    import cutlass

    made, _ = compile_probe(probes.copy_probe, *copy_arguments(probes), size, how)
    source, sizes, expected = copy_case(size, how)
    out = torch.zeros(128 * 16, dtype=torch.uint8, device=device)
    launched(
        made,
        probes,
        [cutlass.Float32, on_device(source, device)],
        [cutlass.Float32, out],
        [cutlass.Int32, on_device(sizes, device)],
    )
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
def test_boxes(probes, device, name, swizzle):
    import cutlass

    shape, box, crd = BOXES[name]
    box = (*box[:-1], min(box[-1], SWIZZLES[swizzle]))
    made, _ = box_probe(probes, "Float16", shape, box, crd, swizzle)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    out = torch.full((int(np.prod(box)) * 2,), 0xFF, dtype=torch.uint8, device=device)
    pointers = [[cutlass.Float16, on_device(values, device)], [cutlass.Float16, out]]
    launched(made, probes, *pointers, tuple(reversed(crd)))
    stored = out.cpu().numpy().view(np.float16).reshape(box)
    np.testing.assert_array_equal(stored, box_of(values, box, crd))


def reduced(op, old, new):
    """What PTX's operation makes of two arrays; inc and dec wrap at the new value."""
    if op in ("inc", "dec"):
        up = np.where(old >= new, 0, old + 1)
        return up if op == "inc" else np.where((old == 0) | (old > new), new, old - 1)
    named = {"min": np.minimum, "max": np.maximum, "add": np.add}
    return (named.get(op) or getattr(np, f"bitwise_{op}"))(old, new)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions(probes, device, dtype, op):
    import cutlass

    made, _ = box_probe(probes, dtype, (16, 16), (8, 16), (0, 0), op=op)
    rng = np.random.default_rng(2)
    # Small whole numbers, exact in every type; bfloat16 is the upper half of a float32.
    source, target = rng.integers(1, 100, (2, 16, 16))
    target = target[:8]
    kind = {"BFloat16": "Float32"}.get(dtype, dtype).lower()
    before, after = (a.astype(kind) for a in (target, reduced(op, target, source[:8])))
    arrays = [source.astype(kind), before]
    if dtype == "BFloat16":
        arrays = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in arrays]
        after = (after.view(np.uint32) >> 16).astype(np.uint16)
    tensors = [on_device(a, device) for a in arrays]
    pointers = [[getattr(cutlass, dtype), tensor] for tensor in tensors]
    launched(made, probes, *pointers, (0, 0))
    np.testing.assert_array_equal(
        tensors[1].cpu().numpy().view(after.dtype).reshape(8, 16), after.reshape(8, 16)
    )


def test_wait_of_40_ms_with_tries_of_a_microsecond(probes, device):
    import cutlass

    made, _ = compile_probe(probes.wait_probe, probes.memory(cutlass.Int32), cutlass.Int32(1))
    out = torch.full((1,), -1, dtype=torch.int32, device=device)
    launched(made, probes, [cutlass.Int32, out], 40_000_000)
    assert out.item() == 1


@pytest.mark.parametrize("n", [1, 3, 4, 1025, 3_000_001])
def test_axpby(device, n):
    example = examples.load("axpby")
    x, y = torch.randn(2, n).to(device).unbind()
    x, y = x.clone(), y.clone()  # at an aligned address each
    z = example.axpby(example.build()[0], 2.0, x, -0.5, y)
    assert_accurate(z, 2 * x.double() - 0.5 * y.double(), 2 * x - 0.5 * y)


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (33, 264), (1000, 3000), (4096, 8192)])
def test_tma_copy_is_read_by_another_kernel(device, rows, columns):
    example = examples.load("tma_copy")
    source = torch.randn(rows, columns, device=device).half()
    target = torch.full_like(source, torch.nan)
    example.copy(example.build()[0], source, target)
    assert torch.equal(target + 1, source + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (100, 200, 40), (1000, 1032, 1000), (2048,) * 3])
def test_gemm(device, shape, dtype):
    example, (m, n, k) = examples.load("gemm"), shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    c = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    example.gemm(example.build(dtype)[0], a, b, c)
    assert_accurate(c, a.double() @ b.double().T, (a.float() @ b.float().T).to(dtype))


@pytest.mark.parametrize("shape", [(128, 256, 65536), (100, 200, 10_000), (512, 520, 4096)])
def test_split_k_gemm(device, shape):
    example, (m, n, k) = examples.load("split_k_gemm"), shape
    a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
    c = example.split_k_gemm(example.build()[0], a, b)
    assert_accurate(c, a.double() @ b.double().T, a.float() @ b.float().T)


@pytest.mark.parametrize("name", examples.NAMES)
def test_example_runs_and_reports(probes, name, capsys):
    examples.load(name).main()
    assert "not run" not in capsys.readouterr().out
