"""What `tileloom check` runs of the flags in global memory, for the mutants of their helpers.

tileloom check tests/device/emulated.py [--mutate --kernels src/tileloom/device/memory.py]
"""

from __future__ import annotations

from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.device.compat import tma_load
from tileloom.device.memory import (
    globaltimer,
    load_acquire,
    store_release,
    wait_flag,
    wait_flag_set,
)

ROWS, COLUMNS = gl.constexpr(16), gl.constexpr(32)


@gluon.jit
def hand_on_kernel(tile_desc, tile, flag, out, HOW: gl.constexpr):
    """Program 0 writes a tile, then its flag; program 1 waits for it and copies what it sees."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    at = r * COLUMNS + c
    if gl.program_id(0) == 0:
        gl.store(tile + at, (at + 1).to(gl.float32))
        store_release(flag, 7, "sys")
    else:
        deadline = globaltimer() + 1000000000
        if HOW == "load":
            while load_acquire(flag, "sys") != 7:
                pass
            gl.store(out + at, gl.load(tile + at))
        else:
            if HOW == "epoch":
                is_there = wait_flag(flag, 7, deadline)
            else:
                is_there = wait_flag_set(flag, deadline)
            if is_there == 1:
                buf = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], tile_desc.layout)
                bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
                mbarrier.init(bar, count=1)
                fence_async_shared()
                mbarrier.expect(bar, tile_desc.block_type.nbytes)
                tma_load(tile_desc, [0, 0], bar, buf)
                mbarrier.wait(bar, 0)
                gl.store(out + at, buf.load(layout))


def hand_on(how: str) -> None:
    """The second program sees the whole tile."""
    rows, columns = ROWS.value, COLUMNS.value
    tile, out = torch.zeros(rows, columns), torch.full((rows, columns), float("nan"))
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float32)
    desc = TensorDescriptor.from_tensor(tile, [rows, columns], layout)
    hand_on_kernel[(2,)](desc, tile, torch.zeros(1, dtype=torch.int32), out, how, num_warps=4)
    assert torch.equal(out, torch.arange(1.0, rows * columns + 1).view(rows, columns))


CASES = {how: partial(hand_on, how) for how in ("load", "epoch", "any")}
