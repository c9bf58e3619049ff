"""Gradients of RMS and layer norm in portable Triton (sm_80 and later), bitwise repeatable.

Mathematics, for a row h (x, or the stream) with xhat = (h - mean) * rstd, mean = 0 for rms, and the
gradients g of out and e of the stream:

    a = g * weight,   c1 = sum(a * xhat) / n,   c2 = sum(a) / n  (0 for rms)
    dh = rstd * (a - c2 - xhat * c1) + e
    dweight = sum over rows of g * xhat,   dbias = sum over rows of g

Tile picture: program p of P takes ROWS whole rows at a time, p, p + P, p + 2P, ..., and adds up its
share of dweight and dbias in registers. Longer rows: `kernel_triton_split.py`.

Shares go to a workspace `[P, 1 or 2, n]` in float32, and `norm_vectors_kernel` adds them up in
order: no atomics. Its size does not grow with the rows: P is so many programs a multiprocessor.
On Hopper and later that kernel starts as this one ends (programmatic dependent launch).

Bytes moved: g, e and h once, dh once; the workspace is written and read once.

Offsets are 64-bit: see `pieces_triton.py` for strides and their units.
"""

import triton
import triton.language as tl

from tileloom.device.grids import gdc_launch_dependents, gdc_wait
from tileloom.ops.rowwise.pieces_triton import column_offsets, tile_pointers

STRIDES = (
    *("g_0", "g_1", "g_2", "g_d", "e_0", "e_1", "e_2", "e_d"),
    *("h_0", "h_1", "h_2", "h_d", "o_0", "o_1", "o_2", "o_d", "weight_d"),
)
INTEGERS = ("count", "width_units", "size_1", "size_2", *STRIDES)
VECTORS_INTEGERS = ("programs", "width")


@triton.jit
def _weight(weight, columns, there, weight_d, VECTOR: tl.constexpr):
    """Load the weight at some columns, `[1, C]`."""
    at = weight + column_offsets(columns, weight_d, VECTOR)
    return tl.load(at, mask=there, other=0.0)[None, :]


@triton.jit
def add_both(a, b, c, d):
    """Add two pairs of numbers, of which `tl.reduce` makes two sums at once."""
    return a + c, b + d


@triton.jit
def distance(h, centre, scale, seen, CENTRED: tl.constexpr, EVEN: tl.constexpr):
    """Give xhat, `[R, C]` in float32: 0 where not seen."""
    xhat = h.to(tl.float32)
    if CENTRED:
        xhat -= centre[:, None]
    xhat = xhat * scale[:, None]
    if CENTRED and not EVEN:  # beyond the row xhat is -mean * rstd
        xhat = tl.where(seen, xhat, 0.0)
    return xhat


@triton.jit(do_not_specialize=INTEGERS)
def norm_bwd_kernel(
    g, e, h, weight, mean, rstd, dh, partial,
    count, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, HOLD: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Walk over whole rows, ROWS at a time.

    Absent tensors are None. DWEIGHT and DBIAS say which shares are wanted; `partial` is
    `[programs, DWEIGHT + DBIAS, n]`. EVEN says that BLOCK is n and ROWS divides the number of rows;
    HOLD keeps the weight in registers, else it is read for each tile. OVERLAPS starts the kernel
    that adds up the shares, which waits for all of this one.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    width = width_units * UNIT
    columns = tl.arange(0, BLOCK)
    there = columns < width
    if HOLD and weight is not None:
        w = _weight(weight, columns, there, weight_d, VECTOR)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    tiles = (count + ROWS - 1) // ROWS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        rows_seen = rows < count
        seen = rows_seen[:, None] & there[None, :]
        at = tile_pointers(h, rows, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
        if EVEN:
            of_h = tl.load(at)
        else:
            of_h = tl.load(at, mask=seen, other=0.0)
        at = tile_pointers(g, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
        if EVEN:
            of_g = tl.load(at)
        else:
            of_g = tl.load(at, mask=seen, other=0.0)
        scale = tl.load(rstd + rows, mask=rows_seen, other=0.0)
        centre = scale
        if CENTRED:
            centre = tl.load(mean + rows, mask=rows_seen, other=0.0)
        if not HOLD and weight is not None:
            w = _weight(weight, columns, there, weight_d, VECTOR)
        xhat = distance(of_h, centre, scale, seen, CENTRED, EVEN)
        a = of_g.to(tl.float32)
        if DBIAS:
            dbias += tl.sum(a, 0)
        if DWEIGHT:
            dweight += tl.sum(a * xhat, 0)
        if weight is not None:
            a = a * w.to(tl.float32)
        if CENTRED:
            c_1, c_2 = tl.reduce((a * xhat, a), 1, add_both)
        else:
            c_1 = tl.sum(a * xhat, 1)
        across = xhat * (c_1 / width * scale)[:, None]
        if CENTRED:
            across += (c_2 / width * scale)[:, None]
        y = a * scale[:, None] - across
        if e is not None:
            at = tile_pointers(e, rows, columns, size_1, size_2, e_0, e_1, e_2, e_d, GROUPS, VECTOR)
            if EVEN:
                y += tl.load(at).to(tl.float32)
            else:
                y += tl.load(at, mask=seen, other=0.0).to(tl.float32)
        at = tile_pointers(dh, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
        if EVEN:
            tl.store(at, y.to(dh.dtype.element_ty))
        else:
            tl.store(at, y.to(dh.dtype.element_ty), mask=seen)
    if DWEIGHT or DBIAS:
        if OVERLAPS:
            gdc_launch_dependents()
        at = partial + tl.cast(tl.program_id(0), tl.int64) * ((DWEIGHT + DBIAS) * width) + columns
    if DWEIGHT:
        tl.store(at, dweight, mask=there)
    if DBIAS:
        tl.store(at + DWEIGHT * tl.cast(width, tl.int64), dbias, mask=there)


@triton.jit(do_not_specialize=VECTORS_INTEGERS)
def norm_vectors_kernel(
    partial, dweight, dbias, programs, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add up the shares `[programs, 1 or 2, n]` into dweight and dbias `[n]`; one may be None.

    A program takes BLOCK columns of one of them: ROWS sums over every ROWS-th share, then those.
    HALVES: a share has the even columns first, then the odd ones.
    OVERLAPS: it is started while the kernel that writes the shares ends.
    """
    if OVERLAPS:
        gdc_wait()
    KINDS: tl.constexpr = (dweight is not None) + (dbias is not None)
    width = tl.cast(width, tl.int64)
    kind = tl.program_id(0) % KINDS
    columns = tl.cast(tl.program_id(0) // KINDS, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    partial += kind * width + columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = partial[None, :] + (rows.to(tl.int64) * (width * KINDS))[:, None]
        total += tl.load(at, mask=(rows < programs)[:, None] & there[None, :], other=0.0)
    if HALVES:
        columns = tl.where(2 * columns < width, 2 * columns, 2 * columns - width + 1)
    result = tl.sum(total, 0)
    if dweight is not None:
        tl.store(dweight + columns, result.to(dweight.dtype.element_ty), mask=there & (kind == 0))
    if dbias is not None:
        tl.store(
            dbias + columns, result.to(dbias.dtype.element_ty), mask=there & (kind == KINDS - 1)
        )
