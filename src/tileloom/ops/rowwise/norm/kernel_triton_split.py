"""RMS and layer norm of rows that several programs share, in portable Triton (sm_80 and later).

Mathematics as in `kernel_triton_fwd.py` and `kernel_triton_bwd.py`. Tile picture: a row has `parts`
parts of BLOCK columns. Forward, program t (its ticket) takes part t % parts of row t // parts.
Backward, it takes that part of the rows g, g + groups, ... of its group g = t // parts, one after
the other, and adds up its share of dweight and dbias in registers:

    forward                                    backward, two groups
    row 0 | t = 0 | t = 1 | t = 2 |            rows 0, 2, 4 | t = 0 | t = 1 | t = 2 |
    row 1 | t = 3 | t = 4 | t = 5 |            rows 1, 3, 5 | t = 3 | t = 4 | t = 5 |

Who waits for whom: each part of a row for all others of it, once, at `pieces_split.collect`.
What it has read stays in registers meanwhile, and a backward program asks for its next row before
it waits (AHEAD). Where registers are short, it reads its part again afterwards, and its share of
dweight and dbias lies in memory between two rows; both come from L2. All add up in the same order.

Bytes moved: every tensor once, whatever the length of the rows (again: from L2); 8 bytes a part.

Offsets are 64-bit outside a tile: see `pieces_triton.py`.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.norm.kernel_triton_bwd import STRIDES as STRIDES_BACKWARD
from tileloom.ops.rowwise.norm.kernel_triton_fwd import INTEGERS as INTEGERS_FORWARD
from tileloom.ops.rowwise.pieces_split import collect, kind_of, post, take_ticket
from tileloom.ops.rowwise.pieces_triton import column_offsets, row_offsets

FORWARD_INTEGERS = ("parts", *INTEGERS_FORWARD[1:])
BACKWARD_INTEGERS = (
    *("count", "parts", "groups", "width_units", "size_1", "size_2"),
    *STRIDES_BACKWARD,
)


@triton.jit
def _part(
    pointer, row, columns, size_1, size_2, t_0, t_1, t_2, t_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Pointers of some columns (int64 `[C]`) of a row (an int64 scalar)."""
    base = row_offsets(row, size_1, size_2, t_0, t_1, t_2, GROUPS, VECTOR)
    return pointer + base + column_offsets(columns, t_d, VECTOR)


@triton.jit(do_not_specialize=FORWARD_INTEGERS)
def norm_fwd_split_kernel(
    x, residual, weight, bias, out, stream, mean, rstd, words, eps,
    parts, width_units, size_1, size_2,
    x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d, o_0, o_1, o_2, o_d, weight_d, bias_d,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Normalise one part of one row.

    `words` is int32, all -1: the ticket, then `[rows, kinds, parts]`: a part's sum of squared
    distances from its mean, and for layer norm this mean. PARTS is the power of two that holds
    `parts`.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    width = tl.cast(width_units, tl.int64) * UNIT
    ticket = take_ticket(words) + 1
    row = tl.cast(ticket // parts, tl.int64)
    part = tl.cast(ticket % parts, tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    seen = columns < width
    at = _part(x, row, columns, size_1, size_2, x_0, x_1, x_2, x_d, GROUPS, VECTOR)
    h = tl.load(at, mask=seen, other=0.0)
    if residual is not None:
        at = _part(residual, row, columns, size_1, size_2, r_0, r_1, r_2, r_d, GROUPS, VECTOR)
        added = tl.load(at, mask=seen, other=0.0)
        h = (h.to(tl.float32) + added.to(tl.float32)).to(stream.dtype.element_ty)
        at = _part(stream, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
        tl.store(at, h, mask=seen)
    h = h.to(tl.float32)
    KINDS: tl.constexpr = 2 if CENTRED else 1
    words += 1 + row * (parts * KINDS)
    if CENTRED:
        centre = tl.sum(h, 0) / tl.minimum(width - part * BLOCK, BLOCK).to(tl.float32)
        away = tl.where(seen, h - centre, 0.0)
        post(words + (part + parts), centre)
        post(words + part, tl.sum(away * away, 0))
    else:
        post(words + part, tl.sum(h * h, 0))
    numbers = collect(words, parts, PARTS, KINDS)

    squares = kind_of(numbers, 0)
    if CENTRED:
        each = tl.arange(0, PARTS).to(tl.int64)
        known = each < parts
        means = kind_of(numbers, 1)
        sizes = tl.where(known, tl.minimum(width - each * BLOCK, BLOCK), 0).to(tl.float32)
        centre = tl.sum(means * sizes, 0) / width
        squares += sizes * (means - centre) * (means - centre)
        h -= centre
        if mean is not None:
            tl.store(mean + row, centre, mask=part == 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    if rstd is not None:
        tl.store(rstd + row, scale, mask=part == 0)
    y = h * scale
    if weight is not None:
        at = weight + column_offsets(columns, weight_d, VECTOR)
        y = y * tl.load(at, mask=seen, other=0.0).to(tl.float32)
    if bias is not None:
        at = bias + column_offsets(columns, bias_d, VECTOR)
        y = y + tl.load(at, mask=seen, other=0.0).to(tl.float32)
    at = _part(out, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
    tl.store(at, y.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _two_parts(
    h, g, row, count, columns, seen, size_1, size_2,
    h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load the part of a row (int64) of h and of g; zeros beyond the last row."""
    there = seen & (row < count)
    at = _part(h, row, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
    of_h = tl.load(at, mask=there, other=0.0, eviction_policy=EVICT)
    at = _part(g, row, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    return of_h, tl.load(at, mask=there, other=0.0, eviction_policy=EVICT)


@triton.jit(do_not_specialize=BACKWARD_INTEGERS)
def norm_bwd_split_kernel(
    g, e, h, weight, mean, rstd, dh, partial, words,
    count, parts, groups, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    CENTRED: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Walk over the rows of one group, in one part.

    `words` is int32, all -1: the ticket, then `[rows, kinds, parts]`: a part's sum of a * xhat, and
    for layer norm that of a. `partial` is `[groups, DWEIGHT + DBIAS, n]`.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    width = tl.cast(width_units, tl.int64) * UNIT
    ticket = take_ticket(words) + 1
    group = ticket // parts
    part = tl.cast(ticket % parts, tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    seen = columns < width
    if weight is not None:
        weight += column_offsets(columns, weight_d, VECTOR)
        if AHEAD:
            w = tl.load(weight, mask=seen, other=0.0)
    if DWEIGHT or DBIAS:
        share = partial + (tl.cast(group, tl.int64) * ((DWEIGHT + DBIAS) * width) + columns)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    KINDS: tl.constexpr = 2 if CENTRED else 1
    if AHEAD:
        next_h, next_g = _two_parts(
            h, g, tl.cast(group, tl.int64), count, columns, seen, size_1, size_2,
            h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, "",
        )  # fmt: skip
    for number in range(group, count, groups):
        row = tl.cast(number, tl.int64)
        if not AHEAD:
            next_h, next_g = _two_parts(
                h, g, row, count, columns, seen, size_1, size_2,
                h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, "evict_last",
            )  # fmt: skip
        scale = tl.load(rstd + row)
        centre = 0.0
        if CENTRED:
            centre = tl.load(mean + row)
        xhat = tl.where(seen, (next_h.to(tl.float32) - centre) * scale, 0.0)
        a = next_g.to(tl.float32)
        if AHEAD and DWEIGHT:
            dweight += a * xhat
        if AHEAD and DBIAS:
            dbias += a
        earlier = seen & (number != group)
        if DBIAS and not AHEAD:
            before = tl.load(share + DWEIGHT * width, mask=earlier, other=0.0)
            tl.store(share + DWEIGHT * width, before + a, mask=seen)
        if weight is not None:
            if not AHEAD:
                w = tl.load(weight, mask=seen, other=0.0, eviction_policy="evict_last")
            a = a * w.to(tl.float32)
        of_row = words + 1 + row * (parts * KINDS)
        post(of_row + part, tl.sum(a * xhat, 0))
        if CENTRED:
            post(of_row + (part + parts), tl.sum(a, 0))
        if AHEAD:
            next_h, next_g = _two_parts(
                h, g, row + groups, count, columns, seen, size_1, size_2,
                h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, "",
            )  # fmt: skip
        numbers = collect(of_row, parts, PARTS, KINDS)
        if not AHEAD:
            next_h, next_g = _two_parts(
                h, g, row, count, columns, seen, size_1, size_2,
                h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, "evict_first",
            )  # fmt: skip
            xhat = (next_h.to(tl.float32) - centre) * scale
            a = next_g.to(tl.float32)
            if DWEIGHT:
                before = tl.load(share, mask=earlier, other=0.0)
                tl.store(share, before + a * xhat, mask=seen)
            if weight is not None:
                a = a * tl.load(weight, mask=seen, other=0.0).to(tl.float32)

        y = a - xhat * (tl.sum(kind_of(numbers, 0), 0) / width)
        if CENTRED:
            y -= tl.sum(kind_of(numbers, 1), 0) / width
        y = y * scale
        if e is not None:
            at = _part(e, row, columns, size_1, size_2, e_0, e_1, e_2, e_d, GROUPS, VECTOR)
            y += tl.load(at, mask=seen, other=0.0).to(tl.float32)
        at = _part(dh, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
        tl.store(at, y.to(dh.dtype.element_ty), mask=seen)
    if AHEAD and DWEIGHT:
        tl.store(share, dweight, mask=seen)
    if AHEAD and DBIAS:
        tl.store(share + DWEIGHT * width, dbias, mask=seen)
