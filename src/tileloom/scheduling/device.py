"""The schedulers for Gluon kernels: thin shells over `decode.py`, with the host's names.

    order = TileOrder(...)                             # the integers of TileSchedulerParams
    scheduler = StaticPersistentScheduler(order)
    work = scheduler.initial_work_tile_info()
    while work.is_valid_tile:
        ...
        work = scheduler.fetch_next_work(work)

A scheduler holds what does not change; the place in the order travels in the tile, so every
partition of a kernel walks the same schedule by itself. The dynamic scheduler has two sides: the
partition that draws (`fetch_next_work`) and those that are told (`receive_next_work`), joined by a
mailbox in shared memory.

Plain Triton kernels call `tile_of_triton` directly.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from tileloom.device.compat import aggregate
from tileloom.device.mail import receive, send
from tileloom.device.memory import wait_flag, wait_flag_set
from tileloom.scheduling import decode, params

TABLE_INTS = gl.constexpr(params.TABLE_INTS)

tile_of = gluon.jit(decode.tile_of)
chunk_at = gluon.jit(decode.chunk_at)
linear_of = gluon.jit(decode.linear_of)
position_of = gluon.jit(decode.position_of)
tile_of_triton = triton.jit(decode.tile_of)


@gluon.jit
def _first_tile(table, position):
    return gl.load(table + position * TABLE_INTS)


@aggregate
class WorkTileInfo:
    """One tile: see `host.WorkTileInfo`; its rows are `row` to `rows_end - 1`, at most BLOCK_M."""

    linear: gl.tensor
    m_idx: gl.tensor
    n_idx: gl.tensor
    l_idx: gl.tensor
    chunk: gl.tensor
    row: gl.tensor
    rows_end: gl.tensor
    is_valid_tile: gl.tensor

    @gluon.constexpr_function
    def __init__(self, linear, m_idx, n_idx, l_idx, chunk, row, rows_end, is_valid_tile):
        self.linear = linear
        self.m_idx = m_idx
        self.n_idx = n_idx
        self.l_idx = l_idx
        self.chunk = chunk
        self.row = row
        self.rows_end = rows_end
        self.is_valid_tile = is_valid_tile


@aggregate
class TileOrder:
    """`TileSchedulerParams` in a kernel.

    Equal chunks of whole tiles need no memory: `rows` is `rows_per_chunk`. Others
    (UNIFORM false) are read from `table`, `TileSchedulerParams.to_device`. Any integer may be one
    that Triton has specialised: a 1 is then a constexpr and becomes a tensor here.
    """

    m: gl.tensor
    tiles_n: gl.tensor
    total: gl.tensor
    rows: gl.tensor
    chunks: gl.tensor
    pivot: gl.tensor
    table: gl.tensor
    BLOCK_M: gl.constexpr
    SWIZZLE: gl.constexpr
    ALONG_M: gl.constexpr
    UNIFORM: gl.constexpr

    @builtin
    def __init__(self, m, tiles_n, total, rows, chunks, pivot, table, BLOCK_M, SWIZZLE, ALONG_M,
                 UNIFORM, _semantic=None):  # fmt: skip
        self.m = _semantic.to_tensor(m)
        self.tiles_n = _semantic.to_tensor(tiles_n)
        self.total = _semantic.to_tensor(total)
        self.rows = _semantic.to_tensor(rows)
        self.chunks = _semantic.to_tensor(chunks)
        self.pivot = _semantic.to_tensor(pivot)
        self.table = table
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.SWIZZLE = gl.constexpr(SWIZZLE)
        self.ALONG_M = gl.constexpr(ALONG_M)
        self.UNIFORM = gl.constexpr(UNIFORM)

    @gluon.jit
    def get_current_work_for_linear_idx(self, linear):
        """The tile of a linear index; past the end the invalid one. Nothing waits."""
        if self.UNIFORM:
            tiles_m = gl.cdiv(self.rows, self.BLOCK_M)
            tiles = gl.maximum(tiles_m * self.tiles_n, 1)
            batch = linear // tiles // self.chunks
            rest = linear % tiles
            chunk = chunk_at(linear // tiles % self.chunks, self.pivot, self.chunks)
            first = chunk * self.rows
            rows_end = first + self.rows
        else:
            batch = linear * 0
            position = position_of(linear, self.table, self.chunks, _first_tile)
            entry = self.table + position * TABLE_INTS
            rest = linear - gl.load(entry)
            first = gl.load(entry + 1)
            rows_end = gl.load(entry + 2)
            chunk = gl.load(entry + 3)
            tiles_m = gl.cdiv(rows_end - first, self.BLOCK_M)
        if self.ALONG_M:
            n_idx, m_idx = tile_of(rest, self.tiles_n, tiles_m, self.SWIZZLE)
        else:
            m_idx, n_idx = tile_of(rest, tiles_m, self.tiles_n, self.SWIZZLE)
        row = first + m_idx * self.BLOCK_M
        is_valid = linear < self.total
        return WorkTileInfo(linear, m_idx, n_idx, batch, chunk, row, rows_end, is_valid)

    @gluon.jit
    def chunks_of(self, work):
        """The first and the last chunk that have rows in a tile; of unequal ones."""
        offsets = self.table + (self.chunks + 1) * TABLE_INTS
        end = gl.minimum(work.row + self.BLOCK_M, self.m)
        first = work.chunk
        while gl.load(offsets + first) > work.row:
            first -= 1
        last = work.chunk
        while gl.load(offsets + last + 1) < end:
            last += 1
        return first, last

    @gluon.jit
    def is_empty(self, chunk):
        """Whether an unequal chunk has no row."""
        place = self.table + (self.chunks + 1) * TABLE_INTS + chunk
        return gl.load(place) == gl.load(place + 1)


@aggregate
class StaticPersistentScheduler:
    """Program p of g works on tiles p, p + g, p + 2 g and so on: see `host`'s class."""

    order: TileOrder

    @gluon.constexpr_function
    def __init__(self, order):
        self.order = order

    @gluon.jit
    def initial_work_tile_info(self):
        """The first tile of this program."""
        return self.order.get_current_work_for_linear_idx(gl.program_id(0))

    @gluon.jit
    def fetch_next_work(self, work):
        """The tile after `work`."""
        return self.order.get_current_work_for_linear_idx(work.linear + gl.num_programs(0))

    @gluon.jit
    def is_last_tile(self, work):
        """Whether none follows `work`; it neither moves nor waits."""
        return work.linear + gl.num_programs(0) >= self.order.total


@aggregate
class AsyncInputScheduler:
    """The static order over chunks that are still arriving: see `host`'s class.

    `flags` is one uint32 for each chunk, there when it has reached `epoch`, or with ANY when it is
    not 0. Only the partition that loads calls `wait_signal`. `epoch` may be a constexpr.
    """

    order: TileOrder
    flags: gl.tensor
    epoch: gl.tensor
    ANY: gl.constexpr

    @builtin
    def __init__(self, order, flags, epoch, ANY=False, _semantic=None):
        self.order = order
        self.flags = flags
        self.epoch = _semantic.to_tensor(epoch)
        self.ANY = gl.constexpr(ANY)

    @gluon.jit
    def initial_work_tile_info(self):
        """The first tile of this program."""
        return self.order.get_current_work_for_linear_idx(gl.program_id(0))

    @gluon.jit
    def fetch_next_work(self, work):
        """The tile after `work`."""
        return self.order.get_current_work_for_linear_idx(work.linear + gl.num_programs(0))

    @gluon.jit
    def is_last_tile(self, work):
        """Whether none follows `work`; it neither moves nor waits."""
        return work.linear + gl.num_programs(0) >= self.order.total

    @gluon.jit
    def is_signalled(self, work, last_seen):
        """Look once whether the chunks of `work` are there; if so it is as if waited for."""
        _chunk, late = self.wait_signal(work, last_seen, gl.to_tensor(0).to(gl.int64))
        return late < 0

    @gluon.jit
    def wait_signal(self, work, last_seen, deadline):
        """Wait for the chunks of `work` but `last_seen`, the last tile's: (its chunk, late or -1).

        `late` is a chunk that has not come by `deadline` (nanoseconds of `globaltimer`). What was
        written before a flag is then visible to TMA loads of this thread.
        """
        late = work.linear * 0 - 1
        if self.order.UNIFORM:
            if work.chunk != last_seen:
                late = self._late(work.chunk, deadline)
        else:
            first, last = self.order.chunks_of(work)
            for chunk in range(first, last + 1):
                if (chunk != last_seen) & (late < 0):
                    if not self.order.is_empty(chunk):
                        late = self._late(chunk, deadline)
        return work.chunk, late

    @gluon.jit
    def _late(self, chunk, deadline):
        """Wait for a chunk: -1, or the chunk if the time ran out."""
        if self.ANY:
            is_there = wait_flag_set(self.flags + chunk, deadline)
        else:
            is_there = wait_flag(self.flags + chunk, self.epoch, deadline)
        return gl.where(is_there == 1, -1, chunk)


@aggregate
class DynamicPersistentScheduler:
    """A counter in global memory deals the tiles: see `host`'s class.

    `counter` must be 0 at the launch. Tickets are mailed: see `send`.
    """

    order: TileOrder
    counter: gl.tensor
    mail: gl.shared_memory_descriptor
    mail_full: gl.shared_memory_descriptor
    mail_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, order, counter, mail, mail_full, mail_empty):
        self.order = order
        self.counter = counter
        self.mail = mail
        self.mail_full = mail_full
        self.mail_empty = mail_empty

    @gluon.jit
    def initial_work_tile_info(self):
        """The first tile of this program; no ticket is needed."""
        return self.order.get_current_work_for_linear_idx(gl.program_id(0))

    @gluon.jit
    def draw(self):
        """The linear index of the next ticket, which nobody else gets; it is not mailed."""
        return gl.atomic_add(self.counter, 1, sem="relaxed") + gl.num_programs(0)

    @gluon.jit
    def fetch_next_work(self, count):
        """Draw a ticket and mail it, as the partition that draws; `count` is tiles drawn before."""
        linear = self.draw()
        send(self.mail, self.mail_full, self.mail_empty, count, linear)
        return self.order.get_current_work_for_linear_idx(linear)

    @gluon.jit
    def receive_next_work(self, count):
        """The tile that was drawn, as one of the other partitions, of four warps."""
        linear = receive(self.mail, self.mail_full, self.mail_empty, count)
        return self.order.get_current_work_for_linear_idx(linear)
