"""Kernels written with `tileloom.cpasync.gluon`, each function of it in one; `CASES` runs them.

Every case returns what came out and what is right. Tests plant bugs in this text.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.cpasync import gluon as cp
from tileloom.device.memory import globaltimer

ROWS, COLUMNS, SIZE, STAGES = gl.constexpr(16), gl.constexpr(32), gl.constexpr(512), gl.constexpr(2)


@gluon.jit
def _grid(base, layout: gl.constexpr):
    """Pointers to a `[ROWS, COLUMNS]` tile."""
    r = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    return base + r * COLUMNS + gl.expand_dims(
        gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0
    )  # fmt: skip


# ---- TMA: a ring of loads, stores behind them
@gluon.jit
def ring_kernel(x_desc, y_desc, tiles):
    """Load tile after tile into a ring of two, add 1, store."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, COLUMNS], x_desc.layout)
    out = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], y_desc.layout)
    full = cp.mbarrier_allocate(STAGES)
    for i in gl.static_range(STAGES):
        cp.mbarrier_init(full.index(i), count=1)
    cp.fence_barrier_init()
    for i in gl.static_range(STAGES):
        cp.arrive_and_expect_tx(full.index(i), x_desc.block_type.nbytes)
        cp.tma_load(x_desc, [i * ROWS, 0], full.index(i), tile.index(i))
    for i in range(tiles):
        slot = i % STAGES
        cp.mbarrier_wait(full.index(slot), (i // STAGES) & 1)
        value = tile.index(slot).load(layout)
        more = i + STAGES < tiles
        cp.fence_proxy_async()
        cp.thread_barrier()
        cp.arrive_and_expect_tx(full.index(slot), x_desc.block_type.nbytes, pred=more)
        cp.tma_load(x_desc, [(i + STAGES) * ROWS, 0], full.index(slot), tile.index(slot), pred=more)
        cp.tma_store_wait(0)
        out.store(value + 1)
        cp.fence_proxy_async()
        cp.tma_store(y_desc, [i * ROWS, 0], out)
    cp.tma_store_wait(0)
    for i in gl.static_range(STAGES):
        cp.mbarrier_invalidate(full.index(i))


def _describe(x, dtype):
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, COLUMNS.value], dtype)
    return TensorDescriptor.from_tensor(x, [ROWS.value, COLUMNS.value], layout)


def ring(tiles=5):
    x = torch.arange(tiles * SIZE.value, dtype=torch.float32).view(-1, COLUMNS.value)
    y = torch.zeros_like(x)
    ring_kernel[(1,)](_describe(x, gl.float32), _describe(y, gl.float32), tiles, num_warps=4)
    return y, x + 1


# ---- cp.async with tails
@gluon.jit
def tails_kernel(x_ptr, y_ptr, n, PIECE: gl.constexpr):
    """Copy tiles of 512 through shared memory that holds NaN; past `n` there are zeros.

    A thread copies PIECE elements at a time, fewer where `n` may cut a piece.
    """
    layout: gl.constexpr = gl.BlockedLayout([PIECE], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(PIECE, 1, 1, order=[0])
    tile = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, SIZE], flat)
    at = gl.arange(0, SIZE, layout)
    for i in gl.static_range(STAGES):
        tile.index(i).store(gl.full([SIZE], float("nan"), x_ptr.dtype.element_ty, layout))
    cp.thread_barrier()
    for i in gl.static_range(STAGES):
        cp.cp_async(tile.index(i), x_ptr + i * SIZE + at, mask=i * SIZE + at < n)
        cp.cp_async_commit()
    cp.cp_async_wait(1)
    gl.store(y_ptr + at, tile.index(0).load(layout))
    cp.cp_async_wait(0)
    gl.store(y_ptr + SIZE + at, tile.index(1).load(layout))


def tails(n=700, piece=4, dtype=torch.float32):
    x = torch.arange(1, n + 1).remainder(101).to(dtype)
    y = torch.full((STAGES.value * SIZE.value,), -1.0).to(dtype)
    tails_kernel[(1,)](x, y, n, piece, num_warps=4)
    return y, torch.nn.functional.pad(x, (0, y.numel() - n))


# ---- cp.async that arrives at mbarriers
@gluon.jit
def arrivals_kernel(x_ptr, y_ptr):
    """The copies of each thread arrive at a barrier that expects them, and at one that does not."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    piece = gl.allocate_shared_memory(gl.float32, [2, SIZE], flat)
    bars = cp.mbarrier_allocate(2)
    cp.mbarrier_init(bars.index(0), count=128)
    cp.mbarrier_init(bars.index(1), count=1)
    cp.thread_barrier()
    at = gl.arange(0, SIZE, layout)
    cp.cp_async(piece.index(0), x_ptr + at)
    cp.mbarrier_cp_async_arrive_noinc(bars.index(0))
    cp.cp_async(piece.index(1), x_ptr + SIZE + at)
    cp.mbarrier_cp_async_arrive(bars.index(1))
    cp.mbarrier_arrive(bars.index(1), count=1)
    cp.mbarrier_wait(bars.index(0), 0)
    gl.store(y_ptr + at, piece.index(0).load(layout))
    cp.mbarrier_wait(bars.index(1), 0)
    gl.store(y_ptr + SIZE + at, piece.index(1).load(layout))
    cp.thread_barrier()
    cp.mbarrier_invalidate(bars.index(0))
    cp.mbarrier_invalidate(bars.index(1))


def arrivals():
    x = torch.arange(2.0 * SIZE.value)
    y = torch.zeros_like(x)
    arrivals_kernel[(1,)](x, y, num_warps=4)
    return y, x


# ---- one program tells another, by a flag
@gluon.jit
def hand_on_kernel(desc, flag, out_ptr):
    """Program 0 stores a tile by TMA and sets a flag; program 1 waits and loads it by TMA."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], desc.layout)
    full = cp.mbarrier_allocate(1)
    cp.mbarrier_init(full.index(0), count=1)
    cp.fence_barrier_init()
    if gl.program_id(0) == 0:
        tile.store(gl.full([ROWS, COLUMNS], 3.0, gl.float32, layout))
        cp.fence_proxy_async()
        cp.tma_store(desc, [0, 0], tile)
        cp.tma_store_wait(0, read=False)
        cp.store_release(flag, 1)
    else:
        while cp.load_acquire(flag) == 0:
            pass
        cp.fence_proxy_async("all")
        cp.arrive_and_expect_tx(full.index(0), desc.block_type.nbytes)
        cp.tma_load(desc, [0, 0], full.index(0), tile)
        cp.mbarrier_wait(full.index(0), 0)
        gl.store(_grid(out_ptr, layout), tile.load(layout))


def hand_on():
    x, out = torch.zeros(2, ROWS.value, COLUMNS.value)
    flag = torch.zeros(1, dtype=torch.int32)
    hand_on_kernel[(2,)](_describe(x, gl.float32), flag, out, num_warps=4)
    return torch.stack([x, out]), torch.full((2, ROWS.value, COLUMNS.value), 3.0)


@gluon.jit
def read_back_kernel(desc, x_ptr, out_ptr):
    """A tile that a TMA store wrote to global memory is read by ordinary loads."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], desc.layout)
    tile.store(gl.full([ROWS, COLUMNS], 4.0, gl.float32, layout))
    cp.fence_proxy_async()
    cp.tma_store(desc, [0, 0], tile)
    cp.tma_store_wait(0, read=False)
    gl.store(_grid(out_ptr, layout), gl.load(_grid(x_ptr, layout)))


def read_back():
    x, out = torch.zeros(2, ROWS.value, COLUMNS.value)
    read_back_kernel[(1,)](_describe(x, gl.float32), x, out, num_warps=4)
    return out, torch.full((ROWS.value, COLUMNS.value), 4.0)


@gluon.jit
def publish_kernel(desc, x_ptr, out_ptr):
    """A tile that ordinary stores wrote to global memory is loaded by TMA in the same program."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], desc.layout)
    full = cp.mbarrier_allocate(1)
    cp.mbarrier_init(full.index(0), count=1)
    cp.fence_barrier_init()
    gl.store(_grid(x_ptr, layout), gl.full([ROWS, COLUMNS], 5.0, gl.float32, layout))
    cp.fence_proxy_async("global")
    cp.thread_barrier()
    cp.arrive_and_expect_tx(full.index(0), desc.block_type.nbytes)
    cp.tma_load(desc, [0, 0], full.index(0), tile)
    cp.mbarrier_wait(full.index(0), 0)
    gl.store(_grid(out_ptr, layout), tile.load(layout))


def publish():
    x, out = torch.zeros(2, ROWS.value, COLUMNS.value)
    publish_kernel[(1,)](_describe(x, gl.float32), x, out, num_warps=4)
    return out, torch.full((ROWS.value, COLUMNS.value), 5.0)


# ---- warpgroups that meet at named barriers
@gluon.jit
def _write(x_ptr, y_ptr, piece, done):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    piece.store(gl.load(x_ptr + at) * 2)
    cp.named_barrier_arrive(8, 256)
    cp.mbarrier_wait(done.index(0), 0)
    piece.store(gl.load(x_ptr + at))
    cp.named_barrier_arrive(9, 256)


@gluon.jit
def _read(x_ptr, y_ptr, piece, done):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.arange(0, SIZE, layout)
    cp.named_barrier_sync(8, 256)
    twice = piece.load(layout)
    cp.mbarrier_arrive_each_thread(done.index(0))
    cp.named_barrier_sync(9, 256)
    gl.store(y_ptr + at, twice + piece.load(layout))


@gluon.jit
def meet_kernel(x_ptr, y_ptr):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    piece = gl.allocate_shared_memory(gl.float32, [SIZE], flat)
    done = cp.mbarrier_allocate(1)
    cp.mbarrier_init(done.index(0), count=128)
    gl.warp_specialize(
        [(_read, (x_ptr, y_ptr, piece, done)), (_write, (x_ptr, y_ptr, piece, done))], [4], [64]
    )


def meet():
    x = torch.arange(float(SIZE.value))
    y = torch.zeros_like(x)
    meet_kernel[(1,)](x, y, num_warps=4)
    return y, 3 * x


# ---- a barrier whose other side takes its time
@gluon.jit
def _dawdle(y_ptr, piece, ready, nanoseconds):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass
    piece.store(gl.full([SIZE], 7.0, gl.float32, layout))
    cp.mbarrier_arrive(ready.index(0), count=1)


@gluon.jit
def _expect(y_ptr, piece, ready, nanoseconds):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    cp.mbarrier_wait(ready.index(0), 0)
    gl.store(y_ptr + gl.arange(0, SIZE, layout), piece.load(layout))


@gluon.jit(do_not_specialize=["nanoseconds"])
def slow_arrival_kernel(y_ptr, nanoseconds):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    piece = gl.allocate_shared_memory(gl.float32, [SIZE], flat)
    ready = cp.mbarrier_allocate(1)
    cp.mbarrier_init(ready.index(0), count=1)
    gl.warp_specialize(
        [
            (_expect, (y_ptr, piece, ready, nanoseconds)),
            (_dawdle, (y_ptr, piece, ready, nanoseconds)),
        ],
        [4],
        [64],
    )


def slow_arrival(nanoseconds=5000):
    y = torch.zeros(SIZE.value)
    slow_arrival_kernel[(1,)](y, nanoseconds, num_warps=4)
    return y, torch.full_like(y, 7.0)


# ---- boxes of one to five dimensions
@gluon.jit(do_not_specialize=["a", "b", "c", "d", "e"])
def box_kernel(source, target, a, b, c, d, e):
    """Load the box at (a, b, c, d, e), as many of them as there are dimensions; store it at 0."""
    rank: gl.constexpr = len(source.block_type.shape)
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    full = cp.mbarrier_allocate(1)
    cp.mbarrier_init(full.index(0), count=1)
    cp.fence_barrier_init()
    cp.arrive_and_expect_tx(full.index(0), source.block_type.nbytes)
    if rank == 1:
        cp.tma_load(source, [e], full.index(0), tile)
    elif rank == 2:
        cp.tma_load(source, [d, e], full.index(0), tile)
    elif rank == 3:
        cp.tma_load(source, [c, d, e], full.index(0), tile)
    elif rank == 4:
        cp.tma_load(source, [b, c, d, e], full.index(0), tile)
    else:
        cp.tma_load(source, [a, b, c, d, e], full.index(0), tile)
    cp.mbarrier_wait(full.index(0), 0)
    if rank == 1:
        cp.tma_store(target, [0], tile)
    elif rank == 2:
        cp.tma_store(target, [0, 0], tile)
    elif rank == 3:
        cp.tma_store(target, [0, 0, 0], tile)
    elif rank == 4:
        cp.tma_store(target, [0, 0, 0, 0], tile)
    else:
        cp.tma_store(target, [0, 0, 0, 0, 0], tile)
    cp.tma_store_wait(0)


SHAPE, BOX = (3, 5, 6, 10, 48), (2, 4, 4, 8, 32)
CORNERS = ((0, 1, 1, 1, 8), (1, 2, 3, 4, 16), (-1, 3, -2, 5, 24), (2, -3, 5, -7, 40))


def boxes(rank=2, corner=CORNERS[1], dtype=torch.float32, swizzle=128):
    """Boxes inside, and beyond either end: zeros are read there, and nothing is written."""
    swizzle = swizzle if rank > 1 else 0  # a layout of one dimension has none
    shape, box = SHAPE[5 - rank :], BOX[5 - rank :]
    box = (*box[:-1], (swizzle or 64) // dtype.itemsize)
    x = torch.arange(1, torch.Size(shape).numel() + 1).remainder(97).to(dtype).view(shape)
    kept = tuple(max(n - (rank > 1 and i == 0), 1) for i, n in enumerate(box))
    memory = torch.full(box, 55.0).to(dtype)
    y = memory[tuple(slice(n) for n in kept)]
    layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank)
    describe = lambda t: TensorDescriptor.from_tensor(t, list(box), layout)  # noqa: E731
    box_kernel[(1,)](describe(x), describe(y), *corner, num_warps=4)
    right = torch.zeros(box).to(dtype)
    here = corner[5 - rank :]
    inside = tuple(slice(max(at, 0), max(at + n, 0)) for at, n in zip(here, box))
    there = tuple(slice(max(-at, 0), max(-at, 0) + k) for at, k in zip(here, x[inside].shape))
    right[there] = x[inside]
    untouched = torch.full(box, 55.0).to(dtype)
    untouched[tuple(slice(n) for n in kept)] = right[tuple(slice(n) for n in kept)]
    return memory, untouched


# ---- reductions
@gluon.jit
def reduce_kernel(x_ptr, desc, KIND: gl.constexpr):
    """Every program combines its tile with the same one in global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(desc.dtype, [ROWS, COLUMNS], desc.layout)
    tile.store(gl.load(_grid(x_ptr + gl.program_id(0) * SIZE, layout)))
    cp.fence_proxy_async()
    cp.tma_reduce(desc, [0, 0], tile, KIND)
    cp.tma_store_wait(0)


TYPES = {
    torch.int32: gl.int32, torch.uint32: gl.uint32,
    torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
}  # fmt: skip
KINDS = {
    "add": torch.add, "min": torch.minimum, "max": torch.maximum, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip


def reduce(kind="add", dtype=torch.int32, programs=3):
    """Small integers in any dtype, so that the order does not matter; unsigned ones from 0 on."""
    numbers = torch.arange(programs * SIZE.value).mul(7).remainder(101)
    numbers = numbers if dtype == torch.uint32 else numbers - 50
    x = numbers.view(programs, ROWS.value, COLUMNS.value)
    right = x[0].flip(0)
    y = right.contiguous().to(dtype)
    for tile in x:
        right = KINDS[kind](right, tile)
    reduce_kernel[(programs,)](x.to(dtype), _describe(y, TYPES[dtype]), kind, num_warps=4)
    return y.to(torch.int64), right


def combined():
    """Every kind and dtype that the hardware combines and Gluon's descriptors hold."""
    integers = (torch.int32, torch.uint32)
    halves = (torch.float16, torch.bfloat16)
    by_kind = {"add": (*halves, torch.float32), "min": halves, "max": halves}
    return [(kind, dtype) for kind in KINDS for dtype in (*integers, *by_kind.get(kind, ()))]


CASES = {
    f.__name__: f
    for f in (ring, tails, arrivals, hand_on, read_back, publish, meet, slow_arrival, boxes, reduce)
}
