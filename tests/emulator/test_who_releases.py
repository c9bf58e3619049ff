"""Which threads a release speaks for: flags by inline PTX, scalar atomics of the first thread."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.emulator.cases.flag_chain import wait_for
from tileloom import emulator
from tileloom.device.compat import thread_barrier
from tileloom.emulator.dialect import ATOMICS_MEET_BEFORE

HEAD = "{ .reg .pred p; .reg .b32 one, t; mov.b32 one, 1; mov.b32 t, %tid.x; "
TAIL = " mov.b32 $0, one; }"
STORE = gl.constexpr(HEAD + "st.release.gpu.global.b32 [$1], one;" + TAIL)
FIRST = gl.constexpr(HEAD + "setp.eq.u32 p, t, 0; @p st.release.gpu.global.b32 [$1], one;" + TAIL)
ADD = gl.constexpr(HEAD + "red.release.gpu.global.add.u32 [$1], one;" + TAIL)
OR = gl.constexpr(HEAD + "red.release.gpu.global.or.b32 [$1], one;" + TAIL)
FENCE = gl.constexpr(HEAD + "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], one;" + TAIL)


@gluon.jit
def hand_on(x_ptr, flag, out_ptr, PTX: gl.constexpr, MEET: gl.constexpr, SCALAR: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    if gl.program_id(0) == 1:
        if SCALAR:
            gl.store(x_ptr, 5.0)
        else:
            gl.store(x_ptr + at, at.to(gl.float32))
        if MEET:
            thread_barrier()
        gl.inline_asm_elementwise(PTX, "=r,l", [flag.to(gl.int64)], gl.int32, False, 1)
    else:
        wait_for(flag)
        gl.store(out_ptr + at, gl.load(x_ptr + at))


@pytest.mark.parametrize("level", ["ttgir", "machine"])
@pytest.mark.parametrize(
    ("ptx", "meet", "scalar", "kinds"),
    [
        (STORE, True, False, []),
        (STORE, False, False, ["race"]),
        (STORE, False, True, ["race"]),  # thread 0 stored; any thread's flag may be seen
        (FIRST, True, False, []),
        (FIRST, False, False, ["race"]),
        (FIRST, False, True, []),
        (ADD, False, False, []),  # each thread counts itself
        (OR, False, False, ["race"]),
        (FENCE, True, False, []),
        (FENCE, False, False, ["race"]),
    ],
)  # fmt: skip
def test_a_flag_speaks_for_the_threads_that_met_before(ptx, meet, scalar, kinds, level):
    x, out, flag = torch.zeros(128), torch.zeros(128), torch.zeros(1, dtype=torch.int32)
    with emulator.run(level=level, collect=True) as run:
        hand_on[(2,)](x, flag, out, ptx, meet, scalar, num_warps=4)
    assert [r.kind for r in run.reports] == kinds
    assert all("it does not speak for the stores of the others" in r.hint for r in run.reports)


@triton.jit
def last_adds_up(x_ptr, counter, out_ptr, BETWEEN: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + tl.program_id(0) * N + at, at.to(tl.float32))
    if BETWEEN == "barrier":
        tl.debug_barrier()
    elif BETWEEN == "read elsewhere":  # what the others store nobody else reads: the scalar counts
        tl.store(x_ptr + 4 * N + tl.program_id(0), 1.0)
    elif BETWEEN == "sum":  # the threads meet as they exchange parts of it
        tl.store(out_ptr + N + tl.program_id(0), tl.sum(at, 0).to(tl.float32))
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    if BETWEEN == "read elsewhere":
        if ticket == 1:
            tl.store(out_ptr, tl.load(x_ptr + 4 * N) + tl.load(x_ptr + 4 * N + 1))
    elif ticket == 1:
        tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(x_ptr + N + at))


@pytest.mark.parametrize("between", ["nothing", "barrier", "sum", "read elsewhere"])
@pytest.mark.parametrize("level", ["ttgir", "machine"])
def test_a_scalar_atomic_is_the_first_threads_where_the_compiler_adds_no_barrier(level, between):
    x, out, counter = torch.zeros(5, 512), torch.zeros(514), torch.zeros(1, dtype=torch.int32)
    with emulator.run(level=level, collect=True) as run:
        last_adds_up[(2,)](x, counter, out, between, 512)
    lacks = level == "machine" and between == "nothing" and not ATOMICS_MEET_BEFORE
    assert [r.kind for r in run.reports] == ["race"] * lacks
    assert all("tl.debug_barrier()" in r.hint for r in run.reports)
