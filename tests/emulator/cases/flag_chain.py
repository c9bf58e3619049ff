"""Programs that wait for each other through flags in global memory, by inline PTX."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.compat import thread_barrier


@gluon.jit
def wait_for(flag):
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 v;
        AGAIN:
        ld.acquire.gpu.global.b32 v, [$1];
        setp.eq.s32 p, v, 0;
        @p nanosleep.u32 20;
        @p bra AGAIN;
        mov.b32 $0, v;
        }""",
        "=r,l", [flag.to(gl.int64)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def signal(flag):
    thread_barrier()  # every thread runs the store below: the one that is seen speaks for all
    gl.inline_asm_elementwise(
        """{
        .reg .b32 one;
        mov.b32 one, 1;
        st.release.gpu.global.b32 [$1], one;
        mov.b32 $0, one;
        }""",
        "=r,l", [flag.to(gl.int64)], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def flag_chain(x_ptr, flags):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    pid = gl.num_programs(0) - 1 - gl.program_id(0)
    if pid > 0:
        wait_for(flags + pid - 1)
    value = gl.load(x_ptr + pid * 128 + at)
    gl.store(x_ptr + (pid + 1) * 128 + at, value + 1)
    signal(flags + pid)


def main(programs=4):
    x = torch.zeros(programs + 1, 128)
    flags = torch.zeros(programs, dtype=torch.int32)
    flag_chain[(programs,)](x, flags, num_warps=4)
    return x, torch.arange(programs + 1.0)[:, None].expand(programs + 1, 128)
