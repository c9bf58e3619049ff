"""Kernels that run a scheduler and nothing else: they write what each program worked on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tileloom.device.memory import globaltimer
from tileloom.scheduling.device import (
    AsyncInputScheduler,
    DynamicPersistentScheduler,
    StaticPersistentScheduler,
    TileOrder,
)

FIELDS = gl.constexpr(8)
# Sizes stay run-time data, 1 as well: a kernel is compiled once.
SIZES = ["steps", "epoch", "timeout_us", "m", "tiles_n", "total", "rows", "chunks", "pivot"]


@gluon.jit
def _write(out, step, steps, work, is_last):
    place = out + (gl.program_id(0) * steps + step) * FIELDS
    gl.store(place, work.linear)
    gl.store(place + 1, work.m_idx)
    gl.store(place + 2, work.n_idx)
    gl.store(place + 3, work.l_idx)
    gl.store(place + 4, work.chunk)
    gl.store(place + 5, work.row)
    gl.store(place + 6, work.rows_end)
    gl.store(place + 7, is_last.to(gl.int32))


@gluon.jit(do_not_specialize=SIZES)
def dump_static_kernel(
    out, steps, table, m, tiles_n, total, rows, chunks, pivot, BLOCK_M: gl.constexpr,
    SWIZZLE: gl.constexpr, ALONG_M: gl.constexpr, UNIFORM: gl.constexpr,
):  # fmt: skip
    order = TileOrder(m, tiles_n, total, rows, chunks, pivot, table, BLOCK_M, SWIZZLE, ALONG_M,
                      UNIFORM)  # fmt: skip
    scheduler = StaticPersistentScheduler(order)
    work = scheduler.initial_work_tile_info()
    step = 0
    while work.is_valid_tile:
        _write(out, step, steps, work, scheduler.is_last_tile(work))
        work = scheduler.fetch_next_work(work)
        step += 1


@gluon.jit(do_not_specialize=SIZES)
def dump_async_kernel(
    out, late, steps, table, flags, epoch, timeout_us, m, tiles_n, total, rows, chunks, pivot,
    BLOCK_M: gl.constexpr, SWIZZLE: gl.constexpr, ALONG_M: gl.constexpr, UNIFORM: gl.constexpr,
):  # fmt: skip
    order = TileOrder(m, tiles_n, total, rows, chunks, pivot, table, BLOCK_M, SWIZZLE, ALONG_M,
                      UNIFORM)  # fmt: skip
    deadline = globaltimer() + timeout_us.to(gl.int64) * 1000
    scheduler = AsyncInputScheduler(order, flags, epoch)
    work = scheduler.initial_work_tile_info()
    step = 0
    seen = -1
    while work.is_valid_tile:
        seen, missing = scheduler.wait_signal(work, seen, deadline)
        if missing >= 0:
            gl.atomic_add(late + missing, 1)
        _write(out, step, steps, work, scheduler.is_last_tile(work))
        work = scheduler.fetch_next_work(work)
        step += 1


@gluon.jit
def _draw(scheduler):
    work = scheduler.initial_work_tile_info()
    count = 0
    while work.is_valid_tile:
        work = scheduler.fetch_next_work(count)
        count += 1


@gluon.jit
def _receive(scheduler, out, steps):
    work = scheduler.initial_work_tile_info()
    count = 0
    while work.is_valid_tile:
        _write(out, count, steps, work, work.linear + 1 >= scheduler.order.total)
        work = scheduler.receive_next_work(count)
        count += 1


@gluon.jit(do_not_specialize=SIZES)
def dump_dynamic_kernel(
    out, steps, table, counter, m, tiles_n, total, rows, chunks, pivot, BLOCK_M: gl.constexpr,
    SWIZZLE: gl.constexpr, ALONG_M: gl.constexpr, UNIFORM: gl.constexpr,
):  # fmt: skip
    order = TileOrder(m, tiles_n, total, rows, chunks, pivot, table, BLOCK_M, SWIZZLE, ALONG_M,
                      UNIFORM)  # fmt: skip
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], flat)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(mail_full.index(i), count=1)
        mbarrier.init(mail_empty.index(i), count=128)
    fence_async_shared()
    scheduler = DynamicPersistentScheduler(order, counter, mail, mail_full, mail_empty)
    gl.warp_specialize([(_receive, (scheduler, out, steps)), (_draw, (scheduler,))], [1], [24])
