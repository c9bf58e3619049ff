"""Gradients of RMS and layer norm in portable Triton (sm_80 and later), bitwise repeatable.

Mathematics, for a row h (x, or the stream) with xhat = (h - mean) * rstd, mean = 0 for rms, and the
gradients g of out and e of the stream:

    a = g * weight,   c1 = sum(a * xhat) / n,   c2 = sum(a) / n  (0 for rms)
    dh = rstd * (a - c2 - xhat * c1) + e
    dweight = sum over rows of g * xhat,   dbias = sum over rows of g

Tile picture. A row that fits (`norm_bwd_kernel`): program p of P takes ROWS whole rows at a time,
p, p + P, p + 2P, ..., and adds up its share of dweight and dbias in registers. A longer row takes
two kernels over tiles of BLOCK columns:

    norm_bwd_stats_kernel   one tile of one row: its part of c1 and c2 -> partial[row, tile]
    norm_bwd_apply_kernel   program (tile, group) of G groups walks over the rows group, group + G,
                            ...: dh, and its share of dweight and dbias in registers

Shares go to a workspace `[programs or groups, 1 or 2, n]` in float32, and `norm_vectors_kernel`
adds them up in order: no atomics. Its size does not grow with the rows, see `plans.py`.

Bytes moved: g, e and h once, dh once; in the long form the second kernel's reads come from L2, for
the launcher takes as many rows at a time as stay there. The workspace is written and read once.

Offsets are 64-bit: see `pieces_triton.py` for strides and their units.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_triton import column_offsets, tile_pointers

_STRIDES = (
    *("g_0", "g_1", "g_2", "g_d", "e_0", "e_1", "e_2", "e_d"),
    *("h_0", "h_1", "h_2", "h_d", "o_0", "o_1", "o_2", "o_d", "weight_d"),
)
INTEGERS = ("count", "width_units", "size_1", "size_2", *_STRIDES)
STATS_INTEGERS = ("first", "splits", "width_units", "size_1", "size_2", *_STRIDES)
APPLY_INTEGERS = ("first", "beyond", "splits", "groups", *STATS_INTEGERS[2:])
VECTORS_INTEGERS = ("programs", "width")


@triton.jit
def _weight(weight, columns, there, weight_d, VECTOR: tl.constexpr):
    """Load the weight at some columns, `[1, C]`."""
    at = weight + column_offsets(columns, weight_d, VECTOR)
    return tl.load(at, mask=there, other=0.0)[None, :]


@triton.jit(do_not_specialize=INTEGERS)
def norm_bwd_kernel(
    g, e, h, weight, mean, rstd, dh, partial,
    count, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, HOLD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over whole rows, ROWS at a time.

    Absent tensors are None. DWEIGHT and DBIAS say which shares are wanted; `partial` is
    `[programs, DWEIGHT + DBIAS, n]`. EVEN says that BLOCK is n and ROWS divides the number of rows;
    HOLD keeps the weight in registers, else it is read for each tile.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    width = width_units * UNIT
    columns = tl.arange(0, BLOCK)
    there = columns < width
    if HOLD and weight is not None:
        w = _weight(weight, columns, there, weight_d, VECTOR)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    tiles = (count + ROWS - 1) // ROWS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        rows_seen = rows < count
        seen = rows_seen[:, None] & there[None, :]
        at = tile_pointers(h, rows, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
        if EVEN:
            xhat = tl.load(at).to(tl.float32)
        else:
            xhat = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        at = tile_pointers(g, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
        if EVEN:
            a = tl.load(at).to(tl.float32)
        else:
            a = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows_seen, other=0.0)
        if CENTRED:
            xhat -= tl.load(mean + rows, mask=rows_seen, other=0.0)[:, None]
        xhat = xhat * scale[:, None]
        if not EVEN:  # beyond the row xhat is -mean * rstd, a zero
            xhat = tl.where(seen, xhat, 0.0)
        if DBIAS:
            dbias += a
        if DWEIGHT:
            dweight += a * xhat
        if weight is not None:
            if not HOLD:
                w = _weight(weight, columns, there, weight_d, VECTOR)
            a = a * w.to(tl.float32)
        y = a - xhat * (tl.sum(a * xhat, 1) / width)[:, None]
        if CENTRED:
            y -= (tl.sum(a, 1) / width)[:, None]
        y = y * scale[:, None]
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
        at = partial + tl.cast(tl.program_id(0), tl.int64) * ((DWEIGHT + DBIAS) * width) + columns
    if DWEIGHT:
        tl.store(at, tl.sum(dweight, 0), mask=there)
    if DBIAS:
        tl.store(at + DWEIGHT * width, tl.sum(dbias, 0), mask=there)


@triton.jit
def _long_tile(
    g, h, weight, mean, rstd, row, columns, there, size_1, size_2,
    g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d, weight_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Load g and xhat `[1, C]` of one row (int64 `[1]`), and its rstd `[1]`."""
    at = tile_pointers(h, row, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
    xhat = tl.load(at, mask=there[None, :], other=0.0).to(tl.float32)
    at = tile_pointers(g, row, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    a = tl.load(at, mask=there[None, :], other=0.0).to(tl.float32)
    scale = tl.load(rstd + row)
    if CENTRED:
        xhat -= tl.load(mean + row)[:, None]
    xhat = tl.where(there[None, :], xhat * scale[:, None], 0.0)
    return a, xhat, scale


@triton.jit(do_not_specialize=STATS_INTEGERS)
def norm_bwd_stats_kernel(
    g, h, weight, mean, rstd, partial,
    first, splits, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d, weight_d,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Sum a * xhat and a over one tile of row `first + program // splits`.

    `partial` is `[rows of this launch, splits, 2]` in float32.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    split = tl.cast(program % splits, tl.int64)
    row = (tl.cast(first, tl.int64) + program // splits) + tl.arange(0, 1)
    columns = split * BLOCK + tl.arange(0, BLOCK)
    there = columns < tl.cast(width_units, tl.int64) * UNIT
    a, xhat, _ = _long_tile(
        g, h, weight, mean, rstd, row, columns, there, size_1, size_2,
        g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d, weight_d, GROUPS, VECTOR, CENTRED,
    )  # fmt: skip
    if weight is not None:
        a = a * _weight(weight, columns, there, weight_d, VECTOR).to(tl.float32)
    to = partial + tl.cast(program, tl.int64) * 2 + tl.arange(0, 1)
    tl.store(to, tl.sum(a * xhat, 1))
    if CENTRED:
        tl.store(to + 1, tl.sum(a, 1))


@triton.jit(do_not_specialize=APPLY_INTEGERS)
def norm_bwd_apply_kernel(
    g, e, h, weight, mean, rstd, dh, sums, partial,
    first, beyond, splits, groups, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    CENTRED: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, AGAIN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over the rows `first .. beyond` of one group, in one tile of BLOCK columns.

    `sums` is what `norm_bwd_stats_kernel` wrote, `partial` is `[groups, DWEIGHT + DBIAS, n]`. AGAIN
    says that an earlier launch has written to it: its shares are carried on.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    split = tl.cast(program % splits, tl.int64)
    group = program // splits
    width = tl.cast(width_units, tl.int64) * UNIT
    columns = split * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    if DWEIGHT or DBIAS:
        share = partial + (tl.cast(group, tl.int64) * ((DWEIGHT + DBIAS) * width) + columns)
    if weight is not None:
        w = _weight(weight, columns, there, weight_d, VECTOR)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if AGAIN and DWEIGHT:
        dweight = tl.load(share, mask=there, other=0.0)
    if AGAIN and DBIAS:
        dbias = tl.load(share + DWEIGHT * width, mask=there, other=0.0)
    dweight = dweight[None, :]
    dbias = dbias[None, :]
    tiles = tl.arange(0, SPLITS).to(tl.int64)
    known = tiles < splits
    for number in tl.range(group, beyond - first, groups, num_stages=STAGES):
        local = tl.cast(number, tl.int64)
        row = (tl.cast(first, tl.int64) + local) + tl.arange(0, 1)
        parts = sums + (local * splits + tiles) * 2
        c1 = tl.sum(tl.load(parts, mask=known, other=0.0), 0) / width
        a, xhat, scale = _long_tile(
            g, h, weight, mean, rstd, row, columns, there, size_1, size_2,
            g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d, weight_d, GROUPS, VECTOR, CENTRED,
        )  # fmt: skip
        if DBIAS:
            dbias += a
        if DWEIGHT:
            dweight += a * xhat
        if weight is not None:
            a = a * w.to(tl.float32)
        y = a - xhat * c1
        if CENTRED:
            y -= tl.sum(tl.load(parts + 1, mask=known, other=0.0), 0) / width
        y = y * scale[:, None]
        if e is not None:
            at = tile_pointers(e, row, columns, size_1, size_2, e_0, e_1, e_2, e_d, GROUPS, VECTOR)
            y += tl.load(at, mask=there[None, :], other=0.0).to(tl.float32)
        at = tile_pointers(dh, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
        tl.store(at, y.to(dh.dtype.element_ty), mask=there[None, :])
    if DWEIGHT:
        tl.store(share, tl.reshape(dweight, [BLOCK]), mask=there)
    if DBIAS:
        tl.store(share + DWEIGHT * width, tl.reshape(dbias, [BLOCK]), mask=there)


@triton.jit
def _sum_of_shares(partial, to, columns, there, programs, step, width, ROWS: tl.constexpr):
    """Add up the shares of some columns: ROWS sums over every ROWS-th program, then those."""
    total = tl.zeros([ROWS, columns.shape[0]], tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = (rows.to(tl.int64) * step)[:, None] + columns[None, :]
        total += tl.load(partial + at, mask=(rows < programs)[:, None] & there[None, :], other=0.0)
    tl.store(to + columns, tl.sum(total, 0).to(to.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=VECTORS_INTEGERS)
def norm_vectors_kernel(
    partial, dweight, dbias, programs, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the shares `[programs, 1 or 2, n]` into dweight and dbias `[n]`; one may be None."""
    width = tl.cast(width, tl.int64)
    columns = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    step = width
    if (dweight is not None) and (dbias is not None):
        step = width * 2
    if dweight is not None:
        _sum_of_shares(partial, dweight, columns, there, programs, step, width, ROWS)
        partial += width
    if dbias is not None:
        _sum_of_shares(partial, dbias, columns, there, programs, step, width, ROWS)
