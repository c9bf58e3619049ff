"""Two partitions hand shared memory on by mbarriers that are written in PTX (`gl.inline_asm`)."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make(bar, COUNT: gl.constexpr):
    text: gl.constexpr = _make_text(COUNT)
    gl.inline_asm(text, "r", [bar])


@gluon.constexpr_function
def _make_text(count):
    return f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p mbarrier.init.shared::cta.b64 [$0], {count}; }}"""


@gluon.jit
def arrive(bar):
    gl.inline_asm("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", [bar])


@gluon.jit
def wait(bar, parity):
    gl.inline_asm(
        """{ .reg .pred done;
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @!done bra AGAIN; }""",
        "r,r", [bar, parity],
    )  # fmt: skip


@gluon.jit
def test(bar, parity):
    gl.inline_asm(
        """{ .reg .pred done;
        AGAIN: mbarrier.test_wait.parity.shared::cta.b64 done, [$0], $1;
        @!done bra AGAIN; }""",
        "r,r", [bar, parity],
    )  # fmt: skip


@gluon.jit
def fill(x_ptr, buf, ready, free, rounds):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(rounds):
        test(free.index(i % 2), ((i // 2) & 1) ^ 1)
        buf.index(i % 2).store(gl.load(x_ptr + i * 128 + at) * 2)
        arrive(ready.index(i % 2))


@gluon.jit
def drain(y_ptr, buf, ready, free, rounds):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 128, layout)
    for i in range(rounds):
        wait(ready.index(i % 2), (i // 2) & 1)
        value = buf.index(i % 2).load(layout)
        arrive(free.index(i % 2))
        gl.store(y_ptr + i * 128 + at, value + 1)


@gluon.jit
def ptx_mbarriers(x_ptr, y_ptr, rounds):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buf = gl.allocate_shared_memory(gl.float32, [2, 128], flat)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        make(ready.index(i), 128)
        make(free.index(i), 128)
    gl.warp_specialize(
        [(drain, (y_ptr, buf, ready, free, rounds)), (fill, (x_ptr, buf, ready, free, rounds))],
        [4],
        [64],
    )


def main(rounds=5):
    x = torch.arange(rounds * 128, dtype=torch.float32)
    y = torch.zeros_like(x)
    ptx_mbarriers[(1,)](x, y, rounds, num_warps=4)
    return y, x * 2 + 1
