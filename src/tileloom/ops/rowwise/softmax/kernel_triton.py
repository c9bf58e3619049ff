"""Softmax forward and backward in portable Triton (sm_80 and later).

Mathematics, for the visible elements of a row (hidden ones count as -inf and give 0):

    m = max x,  l = sum exp(x - m),  y = exp(x - m) / l          a row that shows nothing: 0
    dx = y (dy - sum(dy y))

Tile picture. Where a row fits, `softmax_fwd_kernel` and `softmax_bwd_kernel` hold ROWS whole rows
of BLOCK columns in registers:

    program p:  rows p ROWS .. (p + 1) ROWS - 1,  columns 0 .. BLOCK - 1

Longer rows are walked by one program each, `softmax_*_walk_kernel`, in blocks of BLOCK columns, and
walked back from the end for the second pass, so that what was read last, and is still in L2, is
read first. A block is `[LANES, VECTOR]`, a thread's 16 bytes along the second dimension: maximum
and sum are kept lane by lane (`pieces_softmax`), and lanes meet only once a row.

Bytes moved: x (or y and dy) once where the row fits, and once more from L2 where it is walked; y
(or dx) once; the mask as often as x.

Offsets are 64-bit outside a block: see `pieces_triton`.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_softmax import (
    add_to_sum,
    join_lanes,
    lanes_of,
    load_block,
    store_block,
)
from tileloom.ops.rowwise.pieces_split import hold
from tileloom.ops.rowwise.pieces_triton import row_offsets, tile_pointers

INT_ARGUMENTS_FORWARD = (
    *("count", "width", "size_1", "size_2", "x_0", "x_1", "x_2", "x_d", "y_0", "y_1", "y_2", "y_d"),
    *("mask_0", "mask_1", "mask_2", "mask_d"),
)
INT_ARGUMENTS_BACKWARD = (
    *("count", "width", "size_1", "size_2", "y_0", "y_1", "y_2", "y_d"),
    *("dy_0", "dy_1", "dy_2", "dy_d", "dx_0", "dx_1", "dx_2", "dx_d"),
)


@triton.jit(do_not_specialize=INT_ARGUMENTS_FORWARD)
def softmax_fwd_kernel(
    x, mask, y, count, width, size_1, size_2, x_0, x_1, x_2, x_d, y_0, y_1, y_2, y_d,
    mask_0, mask_1, mask_2, mask_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EVEN says that BLOCK is n and ROWS divides the number of rows: nothing is outside."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    seen = (rows < count)[:, None] & (columns < n)[None, :]
    at = tile_pointers(x, rows, columns, size_1, size_2, x_0, x_1, x_2, x_d, GROUPS, VECTOR)
    if EVEN:
        z = tl.load(at).to(tl.float32)
    else:
        z = tl.load(at, mask=seen, other=float("-inf")).to(tl.float32)
    if mask is not None:
        visible = tl.load(
            tile_pointers(mask, rows, columns, size_1, size_2, mask_0, mask_1, mask_2, mask_d,
                          GROUPS, MASK_VECTOR),
            mask=seen, other=0,
        )  # fmt: skip
        z = tl.where(visible != 0, z, float("-inf"))
    peak = tl.max(z, 1)
    e = tl.exp(z - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(e, 1)
    out = e * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    at = tile_pointers(y, rows, columns, size_1, size_2, y_0, y_1, y_2, y_d, GROUPS, VECTOR)
    tl.store(at, out.to(y.dtype.element_ty), mask=None if EVEN else seen)


@triton.jit
def _visible(x, mask, start, inside, seen, x_d, mask_d, VECTOR: tl.constexpr,
             MASK_VECTOR: tl.constexpr):  # fmt: skip
    """Load a block of a row in float32, -inf where it is hidden or not `seen`."""
    z = load_block(x, start, inside, seen, float("-inf"), x_d, VECTOR).to(tl.float32)
    if mask is not None:
        visible = load_block(mask, start, inside, seen, 0, mask_d, MASK_VECTOR)
        z = tl.where(visible != 0, z, float("-inf"))
    return z


@triton.jit(do_not_specialize=INT_ARGUMENTS_FORWARD)
def softmax_fwd_walk_kernel(
    x, mask, y, count, width, size_1, size_2, x_0, x_1, x_2, x_d, y_0, y_1, y_2, y_d,
    mask_0, mask_1, mask_2, mask_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    full = n // BLOCK * BLOCK
    row = tl.program_id(0).to(tl.int64)
    x += row_offsets(row, size_1, size_2, x_0, x_1, x_2, GROUPS, VECTOR)
    y += row_offsets(row, size_1, size_2, y_0, y_1, y_2, GROUPS, VECTOR)
    if mask is not None:
        mask += row_offsets(row, size_1, size_2, mask_0, mask_1, mask_2, GROUPS, MASK_VECTOR)
    inside = lanes_of(BLOCK, VECTOR)
    last = full + inside < n
    LANES: tl.constexpr = inside.shape[0]
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, full, BLOCK):
        z = _visible(x, mask, start, inside, None, x_d, mask_d, VECTOR, MASK_VECTOR)
        peak, total = add_to_sum(peak, total, z)
    if full < n:
        z = _visible(x, mask, full, inside, last, x_d, mask_d, VECTOR, MASK_VECTOR)
        peak, total = add_to_sum(peak, total, z)
    top, total_of_row = join_lanes(peak, total)
    shift = tl.where(top == float("-inf"), 0.0, top)
    factor = 1.0 / tl.where(total_of_row == 0.0, 1.0, total_of_row)
    if full < n:
        z = _visible(x, mask, full, inside, last, x_d, mask_d, VECTOR, MASK_VECTOR)
        store_block(y, full, inside, last, tl.exp(z - shift) * factor, y_d, VECTOR)
    for done in range(0, full, BLOCK):
        start = full - BLOCK - done
        z = _visible(x, mask, start, inside, None, x_d, mask_d, VECTOR, MASK_VECTOR)
        store_block(y, start, inside, None, tl.exp(z - shift) * factor, y_d, VECTOR)


@triton.jit(do_not_specialize=INT_ARGUMENTS_BACKWARD)
def softmax_bwd_kernel(
    y, dy, dx, count, width, size_1, size_2, y_0, y_1, y_2, y_d, dy_0, dy_1, dy_2, dy_d,
    dx_0, dx_1, dx_2, dx_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """EVEN as in the forward.

    Rows of 16384 elements of 16 bits wait as such for their sum, in half the registers, so that a
    multiprocessor has room for two programs.
    """
    HOLDS: tl.constexpr = EVEN and BLOCK > 8192 and y.dtype.element_ty.primitive_bitwidth == 16
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    seen = (rows < count)[:, None] & (columns < n)[None, :]
    inside = None if EVEN else seen
    other = None if EVEN else 0.0
    at = tile_pointers(y, rows, columns, size_1, size_2, y_0, y_1, y_2, y_d, GROUPS, VECTOR)
    held_p = tl.load(at, mask=inside, other=other)
    p = held_p.to(tl.float32)
    at = tile_pointers(dy, rows, columns, size_1, size_2, dy_0, dy_1, dy_2, dy_d, GROUPS, VECTOR)
    held_g = tl.load(at, mask=inside, other=other)
    g = held_g.to(tl.float32)
    total = tl.sum(p * g, 1)[:, None]
    if HOLDS:
        p = hold(held_p).to(tl.float32)
        g = hold(held_g).to(tl.float32)
    out = p * (g - total)
    at = tile_pointers(dx, rows, columns, size_1, size_2, dx_0, dx_1, dx_2, dx_d, GROUPS, VECTOR)
    tl.store(at, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _pair(y, dy, start, inside, seen, y_d, dy_d, VECTOR: tl.constexpr):
    p = load_block(y, start, inside, seen, 0.0, y_d, VECTOR).to(tl.float32)
    g = load_block(dy, start, inside, seen, 0.0, dy_d, VECTOR).to(tl.float32)
    return p, g


@triton.jit(do_not_specialize=INT_ARGUMENTS_BACKWARD)
def softmax_bwd_walk_kernel(
    y, dy, dx, count, width, size_1, size_2, y_0, y_1, y_2, y_d, dy_0, dy_1, dy_2, dy_d,
    dx_0, dx_1, dx_2, dx_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    full = n // BLOCK * BLOCK
    row = tl.program_id(0).to(tl.int64)
    y += row_offsets(row, size_1, size_2, y_0, y_1, y_2, GROUPS, VECTOR)
    dy += row_offsets(row, size_1, size_2, dy_0, dy_1, dy_2, GROUPS, VECTOR)
    dx += row_offsets(row, size_1, size_2, dx_0, dx_1, dx_2, GROUPS, VECTOR)
    inside = lanes_of(BLOCK, VECTOR)
    last = full + inside < n
    LANES: tl.constexpr = inside.shape[0]
    lanes = tl.zeros([LANES], tl.float32)
    for start in range(0, full, BLOCK):
        p, g = _pair(y, dy, start, inside, None, y_d, dy_d, VECTOR)
        lanes += tl.sum(p * g, 1)
    if full < n:
        p, g = _pair(y, dy, full, inside, last, y_d, dy_d, VECTOR)
        lanes += tl.sum(p * g, 1)
    total = tl.sum(lanes, 0)
    if full < n:
        p, g = _pair(y, dy, full, inside, last, y_d, dy_d, VECTOR)
        store_block(dx, full, inside, last, p * (g - total), dx_d, VECTOR)
    for done in range(0, full, BLOCK):
        start = full - BLOCK - done
        p, g = _pair(y, dy, start, inside, None, y_d, dy_d, VECTOR)
        store_block(dx, start, inside, None, p * (g - total), dx_d, VECTOR)
