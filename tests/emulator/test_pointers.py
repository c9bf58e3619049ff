"""Pointers that a kernel reads from memory, and lanes or names of several tensors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tileloom import emulator


@triton.jit
def grouped_gemm(a_table, b_table, c_table, sizes, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """The products of two groups, as Triton's tutorial deals out their tiles."""
    tile = tl.program_id(0)
    before = 0
    for g in range(2):
        M = tl.load(sizes + g * 3)
        N = tl.load(sizes + g * 3 + 1)
        K = tl.load(sizes + g * 3 + 2)
        tiles = M // BLOCK * (N // BLOCK)
        while tile >= before and tile < before + tiles:
            a = tl.load(a_table + g).to(tl.pointer_type(tl.float16))
            b = tl.load(b_table + g).to(tl.pointer_type(tl.float16))
            c = tl.load(c_table + g).to(tl.pointer_type(tl.float32))
            i = tl.arange(0, BLOCK)
            rows = (tile - before) // (N // BLOCK) * BLOCK + i
            cols = (tile - before) % (N // BLOCK) * BLOCK + i
            a_at = a + rows[:, None] * K + i[None, :]
            b_at = b + i[:, None] * N + cols[None, :]
            acc = tl.zeros((BLOCK, BLOCK), tl.float32)
            for _ in range(K // BLOCK):
                tl.multiple_of(a_at, [16, 16])
                acc = tl.dot(tl.load(a_at), tl.load(b_at), acc)
                a_at += BLOCK
                b_at += BLOCK * N
            tl.store(c + rows[:, None] * N + cols[None, :], acc)
            tile += PROGRAMS
        before += tiles


def table(tensors):
    return torch.tensor([t.data_ptr() for t in tensors])


@pytest.mark.parametrize("level", ["ttir", "machine"])
def test_a_grouped_gemm_reads_its_pointers_from_tables(level):
    sizes = [(32, 64, 96), (64, 32, 32)]
    a = [torch.randn(m, k, dtype=torch.float16) for m, _, k in sizes]
    b = [torch.randn(k, n, dtype=torch.float16) for _, n, k in sizes]
    c = [torch.zeros(m, n) for m, n, _ in sizes]
    with emulator.run(level=level) as run:
        grouped_gemm[(3,)](
            table(a), table(b), table(c), torch.tensor(sizes, dtype=torch.int32), 3, 32
        )
    assert run.errors == []
    for x, y, z in zip(a, b, c):
        torch.testing.assert_close(z, x.float() @ y.float(), rtol=1e-5, atol=1e-4)


@triton.jit
def add_one(table_ptr, out_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Every row of pointers at once: the lanes of a load lie in several tensors."""
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    at = tl.load(table_ptr + i).to(tl.pointer_type(tl.float32)) + j
    x = tl.load(at, mask=j < n, other=-1.0)
    tl.store(out_ptr + i * BLOCK + j, x)
    tl.store(at, x + 1, mask=j < n)


def test_the_lanes_of_one_access_may_lie_in_several_tensors():
    rows = [torch.randn(10) for _ in range(4)]
    before, out = torch.stack(rows), torch.zeros(4, 16)
    with emulator.run() as run:
        add_one[(1,)](table(rows), out, 10, 4, 16)
    assert run.reports == []
    assert torch.equal(out[:, :10], before)
    assert (out[:, 10:] == -1).all()
    assert torch.equal(torch.stack(rows), before + 1)


def test_bounds_and_races_behind_a_pointer_are_named():
    rows = [torch.randn(10) for _ in range(4)]
    with pytest.raises(emulator.OutOfBoundsError) as caught, emulator.run():
        add_one[(1,)](table(rows), torch.zeros(4, 16), 11, 4, 16)
    assert "load outside of 'float32[10] behind a pointer' (10 elements)" in str(caught.value)
    with pytest.raises(emulator.RaceError) as caught, emulator.run():
        add_one[(2,)](table(rows), torch.zeros(4, 16), 10, 4, 16)
    assert "'float32[10] behind a pointer' is read by a load" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (0, "load at a null pointer"),
        (16, "load at 0x10, where no live CPU tensor is\n"),
        (16, "hint keep the tensors whose data_ptr() stands in a table alive until the launch"),
    ],
)
def test_a_pointer_to_no_tensor_is_out_of_bounds(address, text):
    with pytest.raises(emulator.OutOfBoundsError) as caught, emulator.run():
        add_one[(1,)](torch.full((1,), address), torch.zeros(16), 16, 1, 16)
    assert text in str(caught.value)


@triton.jit
def atomics_in_two(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(tl.where(at < 4, x_ptr, y_ptr) + at, 1.0)


def test_atomics_in_several_tensors_are_refused():
    with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
        atomics_in_two[(1,)](torch.zeros(16), torch.zeros(16), 16)
    assert "the lanes of one atomic lie in several tensors" in str(caught.value)
    assert "Try: one access for each tensor" in str(caught.value)


@triton.jit
def halve_a_box(named_ptr, desc, CLEAR: tl.constexpr):
    row = tl.program_id(0) * 16
    box = desc.load([row, 16])
    if CLEAR:
        at = 16 * 32 * 2 // (named_ptr.dtype.element_ty.primitive_bitwidth // 8) + tl.arange(0, 8)
        tl.store(named_ptr + at, tl.zeros([8], named_ptr.dtype.element_ty))
    desc.store([row, 16], (box / 2).to(tl.float16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64], ids=str)
def test_a_tensor_named_as_one_type_may_be_described_as_another(dtype):
    x = torch.randn(64, 32, dtype=torch.float16)
    expected = x.clone()
    expected[16:48, 16:] /= 2
    with emulator.run() as run:
        halve_a_box[(2,)](x.view(dtype), TensorDescriptor.from_tensor(x[16:], [16, 16]), False)
    assert run.reports == []
    assert torch.equal(x, expected)
    x.resize_(64, 32)
    with pytest.raises(emulator.RaceError) as caught, emulator.run():  # the stores of two programs
        halve_a_box[(2,)](x.view(dtype), TensorDescriptor.from_tensor(x, [16, 16]), True)
    assert "'named_ptr'" in str(caught.value)
