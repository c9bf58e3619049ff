"""Parities that are none, the compiler's own named barriers, masks that cut a piece of a copy."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileloom import emulator
from tileloom.cpasync.gluon import cp_async_commit, cp_async_wait
from tileloom.device.cp_async import cp_async


@gluon.jit
def wait_for(parity, out_ptr):
    bars = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bars, count=1)
    mbarrier.arrive(bars, count=1)
    mbarrier.wait(bars, parity)
    gl.store(out_ptr, 1)


@pytest.mark.parametrize("parity", [2, -1, 4])
def test_a_wait_for_a_number_that_is_no_parity(parity):
    with emulator.run(collect=True) as run:
        wait_for[(1,)](parity, torch.zeros(1, dtype=torch.int32), num_warps=4)
    report = run.errors[0]
    assert report.kind == "barrier"
    assert report.message.endswith(f"wait for parity {parity}: a parity is 0 or 1")
    assert "mbarrier.wait(bars, parity)" in report.text()


def test_parities_are_fine():
    with emulator.run() as run:
        wait_for[(1,)](0, torch.zeros(1, dtype=torch.int32), num_warps=4)
    assert run.reports == []


@gluon.jit
def meet_at(ident: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.sync " + ident + ", 128; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


@pytest.mark.parametrize(("ident", "kinds"), [("7", ["barrier"]), ("1", ["barrier"]), ("8", [])])
def test_a_named_barrier_of_the_compilers_own(ident, kinds):
    with emulator.run() as run:
        meet_at[(1,)](ident, num_warps=4)
    assert [r.kind for r in run.reports] == kinds
    assert run.errors == []
    if kinds:
        assert run.reports[0].message.endswith(
            f"sync {ident}, 128: numbers below 8 are for the compiler's own barriers, of a "
            "program's threads and of each partition's"
        )


@gluon.jit
def copy_some(x_ptr, out_ptr, n):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, order=[0])
    at = gl.arange(0, 1024, layout)
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [1024], shared)
    cp_async(tile, x_ptr + at, mask=at < n)
    cp_async_commit()
    cp_async_wait(0)
    gl.store(out_ptr + at, tile.load(layout))


@pytest.mark.parametrize("n", [0, 2, 1000, 1024])
def test_a_mask_between_pieces_copies(n):
    x, out = torch.arange(1024).to(torch.float16), torch.full((1024,), -1.0, dtype=torch.float16)
    with emulator.run() as run:
        copy_some[(1,)](x, out, n, num_warps=4)
    assert run.reports == []
    assert torch.equal(out, torch.where(torch.arange(1024) < n, x, torch.zeros_like(x)))


@pytest.mark.parametrize("n", [1, 999])
def test_a_mask_that_cuts_a_piece_is_refused(n):
    x, out = torch.zeros(2, 1024, dtype=torch.float16)
    with emulator.run(), pytest.raises(emulator.UnsupportedKernelError) as caught:
        copy_some[(1,)](x, out, n, num_warps=4)
    assert (
        "cp.async of elements of 2 bytes with a mask that cuts pieces of 4 bytes: the hardware "
        "copies no less, and the compiler refuses it"
    ) in str(caught.value)


def test_words_may_be_cut_anywhere():
    x, out = torch.arange(1024.0), torch.zeros(1024)
    with emulator.run() as run:
        copy_some[(1,)](x, out, 999, num_warps=4)
    assert run.reports == []
    assert torch.equal(out[:999], x[:999])
