"""The emulator understands every helper in `device/`: each is called here, and its IR is walked.

A new helper needs a kernel in `CALLS`; PTX that the interpreter does not know fails the test, also
where it is never reached.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.emulator import support
from tileloom import device, emulator
from tileloom.device.barriers import named_barrier_arrive, named_barrier_sync
from tileloom.device.cluster import (
    cluster_begin,
    cluster_moments,
    cluster_ring,
    cluster_send,
    cluster_softmax,
    cluster_sums,
    cluster_take,
    warp_layout,
)
from tileloom.device.compat import reinterpret, thread_barrier, tma_load, tma_store
from tileloom.device.cp_async import cp_async
from tileloom.device.mail import receive, send
from tileloom.device.memory import (
    globaltimer,
    load_acquire,
    store_release,
    wait_flag,
    wait_flag_set,
)
from tileloom.device.order import pin, stay
from tileloom.device.tma import tma_store_wait
from tileloom.emulator import capture
from tileloom.emulator.ir import walk
from tileloom.emulator.lower import known_ops
from tileloom.emulator.lower_ptx import unknown_ptx


@gluon.jit
def _named_barriers(x_desc, out_ptr, helper: gl.constexpr):
    named_barrier_arrive(8, 256)
    named_barrier_arrive(9, 128)
    named_barrier_sync(10, 128)


@gluon.jit
def _arrivals(x_desc, out_ptr, helper: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=128)
    helper(bar)
    mbarrier.wait(bar, 0)


@gluon.jit
def _pins(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 512, layout)
    gl.store(out_ptr + at, helper(gl.load(out_ptr + at) + 1, 4))


@gluon.jit
def _stays(x_desc, out_ptr, helper: gl.constexpr):
    gl.store(out_ptr, helper(gl.program_id(0) + 7).to(gl.float32))


@gluon.jit
def _adds(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(x_desc.dtype, [16, 32], x_desc.layout)
    buf.store(gl.full([16, 32], 1.0, gl.float32, layout))
    fence_async_shared()
    helper(x_desc, [0, 0], buf)
    tma.store_wait(0)


@gluon.jit
def _loaded(x_desc):
    buf = gl.allocate_shared_memory(x_desc.dtype, [16, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], bar, buf)
    mbarrier.wait(bar, 0)
    return buf


@gluon.jit
def _copies(x_desc, out_ptr, helper: gl.constexpr):
    buf = _loaded(x_desc)
    tma_store(x_desc, [16, 0], buf)
    tma.store_wait(0)


@gluon.jit
def _views(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    buf = _loaded(x_desc)
    lower = helper(buf, x_desc.dtype, [2, 8, 32], x_desc.layout).index(1).load(layout)
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    gl.store(out_ptr + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :], lower)


@gluon.jit
def _posts(mail, full, empty):
    for i in range(3):
        send(mail, full, empty, i, 40 + i)


@gluon.jit
def _reads(mail, full, empty, out_ptr):
    for i in range(3):
        gl.store(out_ptr + i, receive(mail, full, empty, i).to(gl.float32))


@gluon.jit
def _mails(x_desc, out_ptr, helper: gl.constexpr):
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=128)
    thread_barrier()
    gl.warp_specialize(
        [(_reads, (mail, full, empty, out_ptr)), (_posts, (mail, full, empty))], [1], [32]
    )


@gluon.jit
def _waits(x_desc, out_ptr, helper: gl.constexpr):
    word = out_ptr.cast(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(out_ptr, helper(word, 0, globaltimer() + 1000).to(gl.float32))


@gluon.jit
def _waits_for_any(x_desc, out_ptr, helper: gl.constexpr):
    gl.store(out_ptr, 1.0)
    word = out_ptr.cast(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(out_ptr, helper(word, globaltimer() + 1000).to(gl.float32))


@gluon.jit
def _acquires(x_desc, out_ptr, helper: gl.constexpr):
    word = out_ptr.cast(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(out_ptr + 1, helper(word).to(gl.float32))


@gluon.jit
def _releases(x_desc, out_ptr, helper: gl.constexpr):
    helper(out_ptr.cast(gl.pointer_type(gl.int32), bitcast=True), 7)


@gluon.jit
def _clocks(x_desc, out_ptr, helper: gl.constexpr):
    gl.store(out_ptr, (helper() >= 0).to(gl.float32))


@gluon.jit
def _meets(x_desc, out_ptr, helper: gl.constexpr):
    helper()


@gluon.jit
def _combines(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(x_desc.dtype, [16, 32], x_desc.layout)
    buf.store(gl.full([16, 32], 1.0, gl.float32, layout))
    fence_async_shared()
    helper(x_desc, [0, 0], buf, "add")
    tma.store_wait(0)


@gluon.jit
def _stores(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(x_desc.dtype, [16, 32], x_desc.layout)
    buf.store(gl.full([16, 32], 1.0, gl.float32, layout))
    fence_async_shared()
    tma_store(x_desc, [16, 0], buf)
    helper(1)
    helper(0, read=False)


@gluon.jit
def _fences(x_desc, out_ptr, helper: gl.constexpr):
    helper()
    helper("global")
    helper("all")


@gluon.jit
def _pieces(x_desc, out_ptr, helper: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, 512, layout)
    piece = gl.allocate_shared_memory(
        gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    gl.store(out_ptr + at, 2.0)
    thread_barrier()
    helper(piece, out_ptr + at, mask=at < 500)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out_ptr + at, piece.load(layout))


@gluon.jit
def _late_arrivals(x_desc, out_ptr, helper: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    helper(bar)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)


@gluon.jit
def _allocates(x_desc, out_ptr, helper: gl.constexpr):
    bars = helper(2)
    mbarrier.init(bars.index(1), count=1)
    mbarrier.arrive(bars.index(1), count=1)
    mbarrier.wait(bars.index(1), 0)


@gluon.jit
def _warps():
    """Numbers of the 32 warps of a cluster of 8 CTAs."""
    of: gl.constexpr = gl.SliceLayout(2, warp_layout(4, 8, 1))
    cta = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, of)), 1)
    return cta * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, of)), 0)


@gluon.jit
def _begins(x_desc, out_ptr, helper: gl.constexpr):
    box = helper(1, 8, 4)
    warp = _warps()
    gl.store(out_ptr + warp, cluster_sums(box, (warp.to(gl.float32),), 8, 4)[0])


@gluon.jit
def _sums(x_desc, out_ptr, helper: gl.constexpr):
    box = cluster_begin(2, 8, 4)
    warp = _warps()
    value = warp.to(gl.float32)
    found = helper(box, (value, value + 1), 8, 4)
    gl.store(out_ptr + warp, found[0])
    gl.store(out_ptr + 32 + warp, found[1])


@gluon.jit
def _moments(x_desc, out_ptr, helper: gl.constexpr):
    box = cluster_begin(2, 8, 4)
    warp = _warps()
    value = warp.to(gl.float32)
    found = helper(box, (value, value * 0 + 1), 2, 8, 4)
    gl.store(out_ptr + warp, found[0])
    gl.store(out_ptr + 32 + warp, found[1])


@gluon.jit
def _maxima(x_desc, out_ptr, helper: gl.constexpr):
    box = cluster_begin(2, 8, 4)
    warp = _warps()
    value = (warp // 4).to(gl.float32) * 100
    peak, total = helper(box, value, value * 0 + 2, 8, 4)
    gl.store(out_ptr + warp, peak)
    gl.store(out_ptr + 32 + warp, total)


@gluon.jit
def _turns(out_ptr, ring, send: gl.constexpr, take: gl.constexpr):
    value = _warps().to(gl.float32)
    send(ring, 0, (value,), 8, 4)
    gl.store(out_ptr + _warps(), take(ring, 0, value, 1, 0, 8, 4)[0])


@gluon.jit
def _rings(x_desc, out_ptr, helper: gl.constexpr):
    _turns(out_ptr, helper(1, 8, 4), cluster_send, cluster_take)


@gluon.jit
def _sends(x_desc, out_ptr, helper: gl.constexpr):
    _turns(out_ptr, cluster_ring(1, 8, 4), helper, cluster_take)


@gluon.jit
def _takes(x_desc, out_ptr, helper: gl.constexpr):
    _turns(out_ptr, cluster_ring(1, 8, 4), cluster_send, helper)


CALLS = {
    "cluster_ring": _rings,
    "cluster_send": _sends,
    "cluster_take": _takes,
    "cluster_begin": _begins,
    "cluster_sums": _sums,
    "cluster_moments": _moments,
    "cluster_softmax": _maxima,
    "tma_reduce": _combines,
    "tma_store_wait": _stores,
    "fence_proxy_async": _fences,
    "fence_async_shared": _meets,
    "fence_barrier_init": _meets,
    "cp_async": _pieces,
    "async_copy_load": _pieces,
    "mbarrier_cp_async_arrive": _late_arrivals,
    "mbarrier_allocate": _allocates,
    "load_acquire": _acquires,
    "store_release": _releases,
    "thread_barrier": _meets,
    "gdc_wait": _meets,
    "gdc_launch_dependents": _meets,
    "stay": _stays,
    "wait_flag": _waits,
    "wait_flag_set": _waits_for_any,
    "globaltimer": _clocks,
    "named_barrier_sync": _named_barriers,
    "named_barrier_arrive": _named_barriers,
    "arrive_each_thread": _arrivals,
    "pin": _pins,
    "reinterpret": _views,
    "send": _mails,
    "receive": _mails,
    "tma_load": _copies,
    "tma_store": _copies,
    "tma_reduce_add": _adds,
}
# CTAs of a program, where not one.
CTAS = dict.fromkeys((_begins, _sums, _moments, _maxima, _rings, _sends, _takes), 8)


def helpers_of(module):
    """The public functions for kernels that a module defines or hands on from Gluon."""
    own = module.__name__
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (
            (isinstance(value, JITFunction) and value.__module__ == own)
            or getattr(value, "__triton_builtin__", False)
        )
    }


def launch(helper, kernel):
    layout = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    x = torch.arange(32.0)[:, None].expand(32, 32).contiguous()
    out = torch.zeros(512)
    desc = TensorDescriptor.from_tensor(x, [16, 32], layout)
    with emulator.run() as run:
        kernel[(1,)](desc, out, helper, num_warps=4, num_ctas=CTAS.get(kernel, 1))
    return run, x, out


def complaints(module, calls):
    """What the emulator does not understand of a module's helpers."""
    found = []
    for name, helper in helpers_of(module).items():
        if name not in calls:
            found.append(f"{name}: no kernel in CALLS calls it")
            continue
        kernel = calls[name]
        run, _, _ = launch(helper, kernel)
        found += [f"{name}: {report.text()}" for report in run.errors]
        program = next(p for p in reversed(capture._programs.values()) if p.name == kernel.__name__)
        for op in walk(program.module.kernel.blocks):
            if op.name not in known_ops():
                found.append(f"{name}: operation {op.name}")
            if op.name == "tt.elementwise_inline_asm":
                found += [f"{name}: PTX {text}" for text in unknown_ptx(op.strings[0])]
    return found


MODULES = sorted(m.name for m in pkgutil.iter_modules(device.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_every_helper_is_understood(name):
    module = importlib.import_module(f"tileloom.device.{name}")
    assert helpers_of(module), "a module of device/ without a helper for kernels"
    assert complaints(module, CALLS) == []


def test_helpers_do_what_they_say():
    _, _, out = launch(pin, _pins)
    assert out.tolist() == [1.0] * 512
    _, x, _ = launch(tma_load, _copies)
    assert torch.equal(x[16:], x[:16])
    assert launch(reinterpret, _views)[2][:256:32].tolist() == [8.0 + row for row in range(8)]
    assert launch(send, _mails)[2][:3].tolist() == [40.0, 41.0, 42.0]
    assert launch(stay, _stays)[2][0] == 7
    assert launch(wait_flag, _waits)[2][0] == 1
    assert launch(wait_flag_set, _waits_for_any)[2][0] == 1
    assert launch(load_acquire, _acquires)[2][1] == 0
    assert launch(store_release, _releases)[2].view(torch.int32)[0] == 7
    assert launch(globaltimer, _clocks)[2][0] == 1
    assert launch(cp_async, _pieces)[2].tolist() == [2.0] * 500 + [0.0] * 12
    _, x, _ = launch(tma_store_wait, _stores)
    assert torch.equal(x[16:], torch.ones(16, 32))
    assert launch(cluster_begin, _begins)[2][:32].tolist() == [496.0] * 32
    for helper, kernel in ((cluster_ring, _rings), (cluster_send, _sends), (cluster_take, _takes)):
        assert launch(helper, kernel)[2][:32].tolist() == [496.0] * 32
    assert launch(cluster_sums, _sums)[2][:64].tolist() == [496.0] * 32 + [528.0] * 32
    # 0, 1, ... 31 with squares of 1 about each, of two elements each: 32 + 2 * 2728 about 15.5.
    assert launch(cluster_moments, _moments)[2][:64].tolist() == [15.5] * 32 + [5488.0] * 32
    # Only the last CTA's four sums of 2 count: the others lie e^-100 and less below.
    assert launch(cluster_softmax, _maxima)[2][:64].tolist() == [700.0] * 32 + [8.0] * 32
    assert set(CALLS) == {
        name
        for module in MODULES
        for name in helpers_of(importlib.import_module(f"tileloom.device.{module}"))
    }


NEW_HELPER = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def uncalled(x):
    return x

@gluon.jit
def odd(x, N: gl.constexpr):
    if gl.program_id(0) > 0:
        x = gl.inline_asm_elementwise("PTX", "=f,f", [x], gl.float32, False, 1)
    return x
"""


@pytest.mark.parametrize(
    "text", ["frobnicate.f32 $0, $1;", "mov.f32 $0, $1; st.shared.f32 [$1], $0;"]
)
def test_a_new_helper_fails_until_it_is_called_and_understood(text, tmp_path):
    module = support.load_text("helper", NEW_HELPER.replace("PTX", text), tmp_path)
    wrong = [part for part in text.split("; ") if not part.startswith("mov")]
    assert complaints(module, {"odd": _pins}) == [
        "uncalled: no kernel in CALLS calls it",
        *(f"odd: PTX {part.rstrip(';')}" for part in wrong),
    ]
