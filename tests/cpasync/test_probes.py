"""What copies do to memory: cp.async played on the CPU; every probe compiled for each target."""

from __future__ import annotations

import importlib
import tempfile

import numpy as np
import pytest

from tests.cpasync.ptx_machine import Globals, Machine


@pytest.fixture(scope="module")
def probes(kernels):
    return importlib.import_module("tests.cpasync.probes")


def compiled(function, *arguments, arch="sm_90a", options=""):
    """A probe and its PTX; nothing of it needs a GPU."""
    from cutlass import cute

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder} {options}"
        made = cute.compile(function, *arguments, options=options)
        return made, made.__ptx__


def copy_case(size, how):
    """Inputs of `copy_probe`, and the 16 bytes that each thread must end up with."""
    source = np.random.default_rng(size).integers(0, 256, (128, 16), dtype=np.uint8)
    sizes = (np.arange(128) * 7 % (size + 1)).astype(np.int32)
    stale = np.full(4, -1, np.float32).view(np.uint8)
    expected = np.tile(stale, (128, 1))
    each = 16 // size
    for thread, given in enumerate(sizes):
        read = source[thread, thread % each * size :][:size]
        written = expected[thread, thread // each % each * size :][:size]
        if how == "src_size":
            written[:] = 0
            written[:given] = read[:given]
        elif given > 0:
            written[:] = read
        elif how == "zero_fill":
            written[:] = 0
    return source, sizes, expected


COPIES = [(size, how) for size in (4, 8, 16) for how in ("src_size", "zero_fill", "keep")]


def copy_arguments(probes):
    import cutlass

    return [probes.memory(kind) for kind in (cutlass.Float32, cutlass.Float32, cutlass.Int32)]


@pytest.mark.parametrize(("size", "how"), COPIES)
def test_cp_async_writes_source_zeros_or_nothing(probes, size, how):
    _, ptx = compiled(probes.copy_probe, *copy_arguments(probes), size, how, arch="sm_80")
    source, sizes, expected = copy_case(size, how)
    assert (sizes == 0).any()
    assert (sizes == size).any()
    out, memory = np.zeros((128, 16), np.uint8), Globals()
    arguments = [memory.add(array) for array in (source, out, sizes)]
    Machine(ptx, arguments, memory).run()
    np.testing.assert_array_equal(out, expected)


BOXES = {  # shape, box and coordinates, each with the outermost first
    "1d": ((100,), (64,), (56,)),
    "2d-low": ((40, 104), (8, 64), (-3, -8)),
    "2d-high": ((40, 104), (8, 64), (36, 72)),
    "3d": ((5, 9, 32), (2, 4, 32), (4, 6, 0)),
    "4d": ((3, 5, 7, 16), (2, 2, 4, 16), (2, -1, 5, 8)),
    "5d": ((5, 6, 7, 8, 16), (2, 3, 2, 4, 8), (4, -1, 0, 6, 8)),
    "outside": ((16, 64), (8, 64), (16, 0)),
}
SWIZZLES = {"none": 64, "s32b": 16, "s64b": 32, "s128b": 64}  # float16 columns of a box
REDUCED = {  # what each operation combines, by PTX's table and tried on the hardware
    "add": "Int32 Uint32 Uint64 Float16 BFloat16 Float32 Float64",
    "min": "Int32 Uint32 Int64 Uint64 Float16 BFloat16",
    "max": "Int32 Uint32 Int64 Uint64 Float16 BFloat16",
    "inc": "Uint32",
    "dec": "Uint32",
    "and": "Int32 Uint32 Uint64",
    "or": "Int32 Uint32 Uint64",
    "xor": "Int32 Uint32 Uint64",
}
REDUCTIONS = [(dtype, op) for op, dtypes in REDUCED.items() for dtype in dtypes.split()]


def box_probe(probes, dtype, shape, box, crd, swizzle="none", op=None, arch="sm_90a"):
    import cutlass

    pointer = probes.memory(getattr(cutlass, dtype))
    coordinates = tuple(cutlass.Int32(c) for c in reversed(crd))
    arguments = (pointer, pointer, coordinates, shape, box, swizzle, op)
    return compiled(probes.box_probe, *arguments, arch=arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", BOXES)
def test_boxes_of_every_rank_compile(probes, kernels, name, arch):
    shape, box, crd = BOXES[name]
    _, ptx = box_probe(probes, "Float16", shape, box, crd, arch=arch)
    found = [line.split()[0] for line in kernels.instructions(ptx, "cp.async.bulk.tensor")]
    rank = f"cp.async.bulk.tensor.{len(shape)}d."
    assert len(found) == 2
    assert all(line.startswith(rank) for line in found)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions_compile(probes, kernels, dtype, op):
    _, ptx = box_probe(probes, dtype, (16, 16), (8, 16), (0, 0), op=op)
    [line] = kernels.instructions(ptx, "cp.reduce")
    assert f".{op}." in line


def test_long_wait_compiles(probes):
    import cutlass

    _, ptx = compiled(probes.wait_probe, probes.memory(cutlass.Int32), cutlass.Int32(1))
    assert ptx.count("mbarrier.try_wait") == 1
