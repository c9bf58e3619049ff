"""Two partitions count into one shared table by atomics; after they have ended it is read."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def count_low(x_ptr, table):
    x = gl.load(x_ptr + gl.arange(0, 128, LAYOUT))
    table.atomic_scatter_add(gl.full([128], 1, gl.int32, LAYOUT), x, 0)


@gluon.jit
def count_high(x_ptr, table):
    x = gl.load(x_ptr + 128 + gl.arange(0, 128, LAYOUT))
    table.atomic_scatter_add(gl.full([128], 1, gl.int32, LAYOUT), x, 0)


@gluon.jit
def shared_counts(x_ptr, out_ptr):
    at = gl.arange(0, 128, LAYOUT)
    table = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    table.store(gl.full([128], 0, gl.int32, LAYOUT))
    gl.warp_specialize([(count_low, (x_ptr, table)), (count_high, (x_ptr, table))], [4], [64])
    gl.store(out_ptr + at, table.load(LAYOUT))


def main():
    torch.manual_seed(0)
    x = torch.randint(0, 100, (256,), dtype=torch.int32)
    out = torch.zeros(128, dtype=torch.int32)
    shared_counts[(1,)](x, out, num_warps=4)
    return out, torch.bincount(x, minlength=128)
