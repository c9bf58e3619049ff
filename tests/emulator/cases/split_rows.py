"""Rows summed by several programs: each leaves its part, the last to arrive adds the parts up."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.compat import thread_barrier


@gluon.jit
def split_rows(x_ptr, parts_ptr, out_ptr, counter_ptr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + gl.program_id(0) * 128 + at)
    gl.store(parts_ptr + gl.program_id(0) * 128 + at, x)
    thread_barrier()
    ticket = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if ticket == gl.num_programs(0) - 1:
        total = gl.load(parts_ptr + at)
        for other in range(1, gl.num_programs(0)):
            total += gl.load(parts_ptr + other * 128 + at)
        gl.store(out_ptr + at, total)


def main(programs=3):
    x = torch.arange(programs * 128.0).view(programs, 128)
    parts, out = torch.zeros(programs, 128), torch.zeros(128)
    split_rows[(programs,)](x, parts, out, torch.zeros(1, dtype=torch.int32), num_warps=4)
    return out, x.sum(0)
