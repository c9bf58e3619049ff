"""Scatter to shared memory, atomics there, and what `gl.inline_asm` cannot take."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom import emulator
from tileloom.emulator.lower_ptx import unknown_ptx

ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def scatter_rows(x_ptr, index_ptr, out_ptr, ADD: gl.constexpr):
    rows = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, ROWS)), 1)
    at = rows * 32 + gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, ROWS)), 0)
    buf = gl.allocate_shared_memory(gl.int32, [16, 32], PLAIN)
    buf.store(gl.full([16, 32], -1, gl.int32, ROWS))
    if ADD:
        buf.atomic_scatter_add(gl.load(x_ptr + at), gl.load(index_ptr + at), 0, mask=at >= 32)
        buf.atomic_scatter_max(gl.load(x_ptr + at), gl.load(index_ptr + at), 0)
    else:
        buf.scatter(gl.load(x_ptr + at), gl.load(index_ptr + at), 0)
    gl.store(out_ptr + at, buf.load(ROWS))


def play(index, add=False):
    torch.manual_seed(0)
    x, out = torch.randint(0, 99, (16, 32), dtype=torch.int32), torch.zeros(16, 32).int()
    with emulator.run() as run:
        scatter_rows[(1,)](x, index, out, add)
    assert run.reports == []
    return x, out


pytestmark = pytest.mark.skipif(
    not hasattr(gl.shared_memory_descriptor, "scatter"), reason="Gluon scatters from 3.7 on"
)


def test_scatter_puts_each_lane_where_its_index_says():
    index = torch.stack([torch.randperm(16) for _ in range(32)], 1).int()
    x, out = play(index)
    assert torch.equal(out, torch.zeros_like(x).scatter(0, index.long(), x))


def test_scatter_past_the_end_is_out_of_bounds():
    with pytest.raises(emulator.OutOfBoundsError) as caught:
        play(torch.full((16, 32), 16, dtype=torch.int32))
    assert "indices from 16 to 16 lie outside of shared buffer buf with size 16" in str(
        caught.value
    )


def test_lanes_that_scatter_to_one_place_are_a_race():
    with pytest.raises(emulator.RaceError, match="lanes of one local scatter write different"):
        play(torch.zeros(16, 32, dtype=torch.int32))


def test_ptx_of_mbarriers_is_known_and_other_shared_memory_is_not():
    assert unknown_ptx("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], 32;") == []
    assert unknown_ptx("mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;") == []
    assert unknown_ptx("mbarrier.pending_count.b64 a, b;") == ["mbarrier.pending_count.b64 a, b"]
    assert unknown_ptx("ld.shared.u32 a, [$0];") == ["ld.shared.u32 a, [$0]"]


if hasattr(gl, "inline_asm"):  # Triton 3.9

    def test_atomics_of_lanes_add_up():
        index = torch.arange(16)[:, None].expand(16, 32).contiguous().int() // 4
        x, out = play(index, add=True)
        base = torch.full((16, 32), -1, dtype=torch.int32)
        added = base.scatter_add(0, index[1:].long(), x[1:])
        assert torch.equal(out, added.scatter_reduce(0, index.long(), x, "amax"))

    @gluon.jit
    def asm_of_a_tensor(out_ptr):
        at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        value = gl.inline_asm("mov.b32 $0, $1;", "=r,r", [at], at.type, is_pure=True)
        gl.store(out_ptr + at, value)

    @gluon.jit
    def load_by_ptx(out_ptr):
        buf = gl.allocate_shared_memory(gl.int32, [16, 32], PLAIN)
        value = gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r", [buf], gl.int32)
        gl.store(out_ptr, value)

    @pytest.mark.parametrize(
        ("kernel", "text"),
        [
            (asm_of_a_tensor, "gl.inline_asm of a tensor, whose registers depend on its layout"),
            (load_by_ptx, "of shared memory only mbarriers are known"),
        ],
    )
    def test_what_inline_asm_cannot_take_is_refused(kernel, text):
        with pytest.raises(emulator.UnsupportedKernelError) as caught, emulator.run():
            kernel[(1,)](torch.zeros(128, dtype=torch.int32), num_warps=4)
        assert text in str(caught.value)
        assert "gl.inline_asm" in str(caught.value)
