"""After inline PTX has waited for TMA stores, only the thread that issued them knows."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.emulator.cases.flag_chain import wait_for
from tileloom import emulator
from tileloom.device.compat import thread_barrier, tma_load, tma_store

HEAD = "{ .reg .pred p; .reg .b32 t; mov.b32 t, %tid.x; setp.eq.u32 p, t, 0; mov.b32 $0, t; "
FLAG = gl.constexpr(HEAD + "st.release.gpu.global.b32 [$1], 1; }")
FIRST_FLAG = gl.constexpr(HEAD + "@p st.release.gpu.global.b32 [$1], 1; }")
WAIT = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@gluon.jit
def store_wait_then(desc, x_ptr, flag, out_ptr, THEN: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    box = gl.allocate_shared_memory(gl.int32, [128], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    at = gl.arange(0, 128, layout)
    if gl.program_id(0) == 1:
        wait_for(flag)
        gl.store(out_ptr + at, gl.load(x_ptr + at))
    else:
        box.store(at)
        fence_async_shared()
        tma_store(desc, [0], box)
        gl.inline_asm_elementwise(WAIT, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)
        if THEN == "barrier":
            thread_barrier()
        if THEN == "arrive":
            mbarrier.arrive(bar, count=1)
            mbarrier.wait(bar, 0)
        if THEN == "TMA load":
            mbarrier.expect(bar, desc.block_type.nbytes)
            tma_load(desc, [0], bar, box)
            mbarrier.wait(bar, 0)
            gl.store(out_ptr + at, box.load(layout))
        elif THEN == "store of one":
            gl.store(x_ptr, 5)
        elif THEN == "store of all":
            gl.store(x_ptr + at, at)
        elif THEN == "flag":
            gl.inline_asm_elementwise(FLAG, "=r,l", [flag.to(gl.int64)], gl.int32, False, 1)
        elif THEN == "first thread's flag":
            gl.inline_asm_elementwise(FIRST_FLAG, "=r,l", [flag.to(gl.int64)], gl.int32, False, 1)
        elif THEN == "atomic":
            gl.atomic_xchg(flag, 1, sem="release")
        elif THEN == "ticket":  # the first thread takes it and hands it on: all meet for it
            if gl.atomic_add(flag, 1, sem="acq_rel") == 0:
                gl.store(out_ptr + at, gl.load(x_ptr + at))
        else:
            gl.store(out_ptr + at, gl.load(x_ptr + at))


MEET, ALONE = "the others know once they meet", "does not speak for the stores of the others"


@pytest.mark.parametrize("level", ["ttgir", "machine"])
@pytest.mark.parametrize(
    ("then", "warps", "hint"),
    [
        ("nothing", 4, MEET),
        ("nothing", 1, None),  # a warp runs together
        ("barrier", 4, None),
        ("arrive", 4, None),
        ("TMA load", 4, None),
        ("store of one", 4, None),
        ("store of all", 4, MEET),
        ("flag", 4, ALONE),
        ("first thread's flag", 4, None),
        ("atomic", 4, None),
        ("ticket", 4, None),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_who_knows_that_a_tma_store_is_written(then, warps, hint, level):
    x, out = torch.zeros(2, 128, dtype=torch.int32)
    flag = torch.zeros(1, dtype=torch.int32)
    desc = TensorDescriptor.from_tensor(
        x, [128], gl.NVMMASharedLayout.get_default_for([128], gl.int32)
    )
    programs = 2 if then in ("flag", "first thread's flag", "atomic") else 1
    with emulator.run(level=level, collect=True) as run:
        store_wait_then[(programs,)](desc, x, flag, out, then, warps, num_warps=warps)
    found = [r for r in run.reports if r.severity == "error"]
    assert [r.kind for r in found] == ["race"] * (hint is not None)
    assert all(hint in r.hint for r in found)
    if "store" not in then:
        assert torch.equal(out, torch.arange(128, dtype=torch.int32))


@gluon.jit
def each_reads_its_half(desc, x_ptr, out_ptr, MEET: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    box = gl.allocate_shared_memory(gl.int32, [256], desc.layout)
    at = gl.arange(0, 256, layout)
    box.store(at)
    fence_async_shared()
    tma_store(desc, [0], box)
    gl.inline_asm_elementwise(WAIT, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)
    if MEET:
        thread_barrier()
    gl.store(out_ptr + at, gl.load(x_ptr + at))


@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="clusters are from 3.7 on")
@pytest.mark.parametrize("meet", [True, False])
def test_the_threads_of_each_cta_of_a_cluster_meet(meet):
    x, out = torch.zeros(2, 256, dtype=torch.int32)
    layout = gl.NVMMASharedLayout.get_default_for([256], gl.int32, cga_layout=[[1]])
    desc = TensorDescriptor.from_tensor(x, [256], layout)
    with emulator.run(collect=True) as run:
        each_reads_its_half[(1,)](desc, x, out, meet, num_ctas=2)
    assert [r.kind for r in run.reports] == ["race"] * (not meet), [r.text() for r in run.reports]
    assert torch.equal(out, torch.arange(256, dtype=torch.int32))
