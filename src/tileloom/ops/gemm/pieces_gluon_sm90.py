"""Parts of the Hopper GEMM: the ring's place, one step of loads, and the epilogue."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tileloom.device.compat import reinterpret, thread_barrier, tma_load, tma_store
from tileloom.ops.gemm.pieces_activation import activate_gluon


@gluon.constexpr_function
def stack(count, desc):
    """The shape of `count` of a descriptor's boxes."""
    return [count, *desc.block_type.shape]


@gluon.constexpr_function
def slots(count, rows, depth, is_flipped):
    """The shape of a ring's slots, of so many rows and elements of k, or with k first."""
    return [count, 1, depth, rows] if is_flipped else [count, 1, rows, depth]


@gluon.constexpr_function
def padded(count):
    """The power of two at or above `count`."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def step_on(stage, phase, STAGES: gl.constexpr):
    """The ring's next slot; the phase flips where the ring begins anew."""
    is_wrapped = stage + 1 == STAGES
    return gl.where(is_wrapped, 0, stage + 1), gl.where(is_wrapped, phase ^ 1, phase)


@gluon.constexpr_function
def rows_of_part(rows, part, height):
    """How many of a tile's first `rows` rows lie in one of its parts of `height` rows."""
    return min(max(rows - part * height, 0), height)


@gluon.jit
def as_boxes(ring, edge_desc):
    """The slots of a ring as the boxes of `edge_desc`: by rows, and then along k."""
    WIDTH: gl.constexpr = edge_desc.block_type.shape[2]
    BOX: gl.constexpr = edge_desc.block_type.shape[1]
    EACH: gl.constexpr = ring.type.shape[2] // BOX * (ring.type.shape[3] // WIDTH)
    shape: gl.constexpr = stack(ring.type.shape[0] * EACH, edge_desc)
    return reinterpret(ring, ring.dtype, shape, edge_desc.layout)


@gluon.jit
def load_part(
    desc, edge_desc, ring, slot, bar, batch, row, k, ROWS: gl.constexpr, FLIPPED: gl.constexpr
):
    """Load a slot of A by rows, or of B by columns, which are its rows; FLIPPED: with k first.

    If not all of its rows are among the ROWS that are wanted, by the boxes of `edge_desc`.
    """
    if FLIPPED:
        tma_load(desc, [batch, k, row], bar, ring.index(slot))
    elif ROWS >= ring.type.shape[2]:
        tma_load(desc, [batch, row, k], bar, ring.index(slot))
    else:
        BOX: gl.constexpr = edge_desc.block_type.shape[1]
        WIDTH: gl.constexpr = edge_desc.block_type.shape[2]
        HEIGHT: gl.constexpr = ring.type.shape[2]
        COLUMNS: gl.constexpr = ring.type.shape[3] // WIDTH
        boxes = as_boxes(ring, edge_desc)
        for c in gl.static_range(COLUMNS):
            for r in gl.static_range(ROWS // BOX):
                box = boxes.index((slot * COLUMNS + c) * (HEIGHT // BOX) + r)
                tma_load(edge_desc, [batch, row + r * BOX, k + c * WIDTH], bar, box)


@gluon.jit
def clear_edge(edge_desc, ring, EDGE: gl.constexpr, PARTS: gl.constexpr):
    """Write zeros where `load_part` leaves slots as they are, so that nothing unwritten is read.

    A product of such rows reaches no row that is stored, whatever they hold.
    """
    BOX: gl.constexpr = edge_desc.block_type.shape[1]
    WIDTH: gl.constexpr = edge_desc.block_type.shape[2]
    HEIGHT: gl.constexpr = ring.type.shape[2]
    COLUMNS: gl.constexpr = ring.type.shape[3] // WIDTH
    boxes = as_boxes(ring, edge_desc)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, gl.num_warps(), 1], [2, 1, 0])
    nothing = gl.zeros([1, BOX, WIDTH], ring.dtype, layout)
    for stage in range(ring.type.shape[0] // PARTS):
        for w in gl.static_range(PARTS):
            for c in gl.static_range(COLUMNS):
                for r in gl.static_range(rows_of_part(EDGE, w, HEIGHT) // BOX, HEIGHT // BOX):
                    slot = stage * PARTS + w
                    boxes.index((slot * COLUMNS + c) * (HEIGHT // BOX) + r).store(nothing)


@gluon.jit
def matrix(smem, TRANSPOSED: gl.constexpr):
    """A box of three dimensions as the matrix that wgmma reads."""
    flat = smem.reshape([smem.type.shape[1], smem.type.shape[2]])
    if TRANSPOSED:
        flat = flat.permute((1, 0))
    return flat


@gluon.jit
def halves(x):
    """The left and the right half of the columns; no element moves between threads."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return x.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def load_bias(bias_ptr, row, rows, col, n, smem, SWAP_AB: gl.constexpr):
    """The bias of a tile's columns, or of its rows where the tile is C transposed, as it lies.

    A thread loads an element or two, before the tile is multiplied. Loaded slice by slice in the
    accumulator's layout, 16 loads one after the other took longer than the multiplying.
    """
    LENGTH: gl.constexpr = smem.type.shape[0]
    flat: gl.constexpr = gl.BlockedLayout([max(1, LENGTH // 128)], [32], [gl.num_warps()], [0])
    at = gl.arange(0, LENGTH, flat)
    if SWAP_AB:
        bias = gl.load(bias_ptr + (row + at), mask=at < rows, other=0)
    else:
        bias = gl.load(bias_ptr + (col + at), mask=col + at < n, other=0)
    return bias


@gluon.jit
def _bias(smem, FIRST: gl.constexpr, like, SWAP_AB: gl.constexpr):
    """The bias of a slice's columns, or of its rows where the slice is C transposed."""
    layout: gl.constexpr = like.type.layout
    N: gl.constexpr = like.shape[1]
    if SWAP_AB:
        bias = gl.expand_dims(smem.load(gl.SliceLayout(1, layout)), 1)
    else:
        bias = gl.expand_dims(smem.slice(FIRST * N, N).load(gl.SliceLayout(0, layout)), 0)
    return bias.to(gl.float32)


@gluon.jit
def store_slice(x, FIRST: gl.constexpr, slot, out_desc, bias_smem, smem, residual_full, phase,
                batch, row, col, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
                HAS_RESIDUAL: gl.constexpr, SWAP_AB: gl.constexpr,
                PENDING: gl.constexpr):  # fmt: skip
    """The epilogue of one slice of columns: registers, shared memory, global memory.

    With SWAP_AB the slice is of C transposed, and turns as it goes to shared memory.

    A slice at a time, an activation needs few registers beside the accumulator. All of it goes one
    way, through shared memory: a second branch that reads the accumulator would make ptxas
    serialise every wgmma of the kernel (C7514, 12-23 % slower).
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    dtype: gl.constexpr = smem.dtype
    buffer = smem.index(slot)
    if SWAP_AB:
        flat = buffer.reshape([N, M]).permute((1, 0))
    else:
        flat = buffer.reshape([M, N])
    if HAS_BIAS:
        x += _bias(bias_smem, FIRST, x, SWAP_AB)
    x = activate_gluon(x, ACTIVATION, dtype.fp_mantissa_width)
    if HAS_RESIDUAL:
        mbarrier.wait(residual_full.index(slot), phase)
        x += flat.load(x.type.layout).to(gl.float32)
    else:
        tma.store_wait(PENDING)
    flat.store(x.to(dtype))
    fence_async_shared()
    if SWAP_AB:
        tma_store(out_desc, [batch, col, row], buffer)
    else:
        tma_store(out_desc, [batch, row, col], buffer)


@gluon.jit
def store_tile(x, FIRST: gl.constexpr, out_desc, bias_smem, smem, residual_full, phase, batch, row,
               col, WG: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr,
               HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
               SWAP_AB: gl.constexpr):  # fmt: skip
    """Finish the columns of a tile in slices of the width of `smem`, from slice FIRST on."""
    N: gl.constexpr = x.shape[1]
    SUB: gl.constexpr = smem.type.shape[2 if SWAP_AB else 3]
    if N == SUB:
        slot: gl.constexpr = WG * BUFFERS + FIRST % BUFFERS
        # The tile before has left long ago; its slices may be an odd number.
        pending: gl.constexpr = BUFFERS - 1 if FIRST > 0 else 0
        store_slice(x, FIRST, slot, out_desc, bias_smem, smem, residual_full, phase, batch, row,
                    col + FIRST * SUB, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SWAP_AB,
                    pending)  # fmt: skip
    else:
        left, right = halves(x)
        store_tile(left, FIRST, out_desc, bias_smem, smem, residual_full, phase, batch, row, col,
                   WG, BUFFERS, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, SWAP_AB)  # fmt: skip
        store_tile(right, FIRST + N // SUB // 2, out_desc, bias_smem, smem, residual_full, phase,
                   batch, row, col, WG, BUFFERS, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
                   SWAP_AB)  # fmt: skip


@gluon.jit
def load_residual(residual_desc, smem, residual_full, batch, row, col, WG: gl.constexpr,
                  BUFFERS: gl.constexpr, SWAP_AB: gl.constexpr):  # fmt: skip
    """Start to load a tile's residual into the slices that its output will leave by."""
    SUB: gl.constexpr = smem.type.shape[2 if SWAP_AB else 3]
    tma.store_wait(0)
    for s in gl.static_range(BUFFERS):
        slot = WG * BUFFERS + s
        bar = residual_full.index(slot)
        mbarrier.expect(bar, residual_desc.block_type.nbytes)
        if SWAP_AB:
            tma_load(residual_desc, [batch, col + s * SUB, row], bar, smem.index(slot))
        else:
            tma_load(residual_desc, [batch, row, col + s * SUB], bar, smem.index(slot))


@gluon.jit
def k_range(l_idx, k_steps, SPLITS: gl.constexpr):
    """Batch, first step along k and steps of a tile; with SPLITS `l_idx` counts parts of k."""
    if SPLITS == 1:
        return l_idx, 0, k_steps
    else:
        first = k_steps * l_idx // SPLITS
        return 0, first, k_steps * (l_idx + 1) // SPLITS - first


@gluon.jit
def _part(partials, part, like):
    """Where the elements of one part lie, for a tensor in the layout of `like`."""
    M: gl.constexpr = like.shape[0]
    N: gl.constexpr = like.shape[1]
    layout: gl.constexpr = like.type.layout
    r = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    return partials + part * (M * N) + (r * N + c)


@gluon.jit
def leave_part(acc, partials, counters, part, split, SPLITS: gl.constexpr):
    """Store a warpgroup's sum over its part of k; whether all parts of the tile are now there."""
    gl.store(_part(partials, part + split, acc), acc)
    thread_barrier()  # the counter speaks for all threads' stores
    counter = counters + part // SPLITS
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    thread_barrier()
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def gather_parts(partials, part, like, SPLITS: gl.constexpr):
    """Add the parts of a tile, in order whoever came last; in the layout of `like`."""
    whole = gl.load(_part(partials, part, like))
    for split in range(1, SPLITS):
        whole += gl.load(_part(partials, part + split, like))
    return whole
