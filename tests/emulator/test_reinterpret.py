"""Shared memory seen as another type: where layouts put elements, values, and what overlaps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.emulator.cases.names import reinterpret
from tileloom import emulator
from tileloom.emulator.ir import Module, parse_type
from tileloom.emulator.layouts import physical_offsets

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
EQUAL = [
    # An NVMMA layout and the swizzled one that is the same by NVIDIA's description of it.
    (gl.NVMMASharedLayout(128, 16, 2), gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), 64),
    (gl.NVMMASharedLayout(64, 16, 2), gl.SwizzledSharedLayout(8, 2, 4, [1, 0]), 32),
    (gl.NVMMASharedLayout(32, 16, 2), gl.SwizzledSharedLayout(8, 4, 2, [1, 0]), 16),
    (gl.NVMMASharedLayout(0, 16, 2), gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), 64),
]


@gluon.jit
def through(x_ptr, out_ptr, N: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Store through one layout, load through another one of the same bytes."""
    rows = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, ROWS)), 1)
    at = rows * N + gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, ROWS)), 0)
    buf = gl.allocate_shared_memory(gl.float16, [32, N], FIRST)
    buf.store(gl.load(x_ptr + at))
    gl.store(out_ptr + at, reinterpret(buf, gl.float16, [32, N], SECOND).load(ROWS))


@pytest.mark.parametrize(("first", "second", "n"), EQUAL, ids=lambda x: str(x)[:8])
def test_layouts_that_are_the_same_bytes(first, second, n):
    x = torch.randn(32, n, dtype=torch.float16)
    out = torch.zeros_like(x)
    with emulator.run() as run:
        through[(1,)](x, out, n, first, second)
    assert run.reports == []
    assert torch.equal(out, x)


def test_layouts_that_differ_permute_the_values():
    x = torch.arange(32 * 64.0).view(32, 64).half()
    out = torch.zeros_like(x)
    with emulator.run():
        through[(1,)](x, out, 64, PLAIN.value, gl.NVMMASharedLayout(128, 16, 2))
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1, :8], x[1, 8:16])
    assert torch.equal(out.sort(1).values, x)


@gluon.jit
def as_bits(x_ptr, out_ptr):
    rows = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, ROWS)), 1)
    cols = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROWS)), 0)
    half = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, ROWS)), 0)
    buf = gl.allocate_shared_memory(gl.float32, [32, 32], PLAIN)
    words = reinterpret(buf, gl.int16, [32, 64], PLAIN)
    buf.store(gl.load(x_ptr + rows * 32 + half))
    bits = words.load(ROWS)
    words.store(bits ^ gl.where(cols % 2 == 1, -32768, 0).to(gl.int16))
    gl.store(out_ptr + rows * 32 + half, buf.load(ROWS))


def test_values_of_another_width_are_the_bytes_there():
    x = torch.randn(32, 32)
    out = torch.zeros_like(x)
    with emulator.run() as run:
        as_bits[(1,)](x, out)
    assert run.reports == []
    assert torch.equal(out, -x)


@gluon.jit
def half_written(out_ptr):
    rows = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, ROWS)), 1)
    cols = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, ROWS)), 0)
    buf = gl.allocate_shared_memory(gl.float32, [2, 16, 32], PLAIN)
    buf.index(0).store(gl.zeros([16, 32], gl.float32, ROWS))
    words = reinterpret(buf, gl.int32, [32, 32], PLAIN)
    gl.store(out_ptr + rows * 32 + cols, words.load(ROWS))


def test_what_was_written_is_known_through_both_types():
    with pytest.raises(emulator.UninitializedError) as caught, emulator.run():
        half_written[(1,)](torch.zeros(32, 32, dtype=torch.int32))
    assert "buf._reinterpret(i32, [32, 32]), of which 512 of 1024 elements" in str(caught.value)


def offsets(layout, shape):
    ty = parse_type(f"!ttg.memdesc<{'x'.join(map(str, shape))}xf16, {layout}, #smem>")
    return physical_offsets(ty, Module({}, {}, {}))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = true, elementBitWidth = 16}>",
         (64, 128)),
        ("#ttg.nvmma_shared<{swizzlingByteWidth = 64, transposed = false, elementBitWidth = 8}>",
         (3, 16, 128)),
        ("#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16, "
         "rank = 4}>", (2, 1, 2, 8, 64)),
        ("#ttg.swizzled_shared<{vec = 4, perPhase = 2, maxPhase = 4, order = [0, 1]}>", (64, 16)),
    ],
)  # fmt: skip
def test_every_byte_is_used_once(layout, shape):
    found = offsets(layout, shape)
    assert np.array_equal(np.sort(found.reshape(-1)), np.arange(np.prod(shape)))


def test_a_layout_whose_order_is_not_known_is_refused():
    with pytest.raises(emulator.UnsupportedKernelError, match=r"layout #ttg.padded_shared"):
        offsets("#ttg.padded_shared<[32:+4] {order = [1, 0]}>", (32, 32))
