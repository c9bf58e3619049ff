"""RMS and layer norm of rows that several programs share, in portable Triton (sm_80 and later).

Mathematics as in `kernel_triton_fwd.py` and `kernel_triton_bwd.py`. Tile picture: a row has `parts`
parts of BLOCK columns. Program t (its ticket) takes part t % parts of the rows g, g + groups, ...
of its group g = t // parts, one after the other. The weight's and bias's parts stay in registers,
and so does, backward, its share of their gradients. With two groups of three parts:

    rows 0, 2, 4 | t = 0 | t = 1 | t = 2 |         turn     asked for   posted     written
    rows 1, 3, 5 | t = 3 | t = 4 | t = 5 |         r        r + 2       r + 1      r   (of a group)

Who waits for whom: each part of a row for all others of it, once, at `pieces_split.collect`, one
turn after it has posted its own sums. All add up in the same order. What was read stays in
registers meanwhile; backward, where they are short (not AHEAD), it is read again, from L2.

Bytes moved: every tensor once, whatever the length of the rows (again: from L2); 8 bytes a part.

Offsets are 64-bit outside a tile: see `pieces_triton.py`.
"""

import triton
import triton.language as tl

from tileloom.device.grids import gdc_launch_dependents
from tileloom.ops.rowwise.norm.kernel_triton_bwd import STRIDES as STRIDES_BACKWARD
from tileloom.ops.rowwise.norm.kernel_triton_bwd import add_both
from tileloom.ops.rowwise.norm.kernel_triton_fwd import INTEGERS as INTEGERS_FORWARD
from tileloom.ops.rowwise.pieces_split import (
    collect,
    hold,
    kind_of,
    pack,
    places_of,
    post,
    take_ticket,
    unpack,
)
from tileloom.ops.rowwise.pieces_triton import column_offsets, row_offsets

FORWARD_INTEGERS = ("parts", "groups", *INTEGERS_FORWARD)
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


@triton.jit
def _stream(
    x, residual, row, count, columns, seen, size_1, size_2,
    x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load the part of a row (int64) of x, and of the residual or x again; 0 beyond all rows."""
    there = row < count if EVEN else seen & (row < count)
    at = _part(x, row, columns, size_1, size_2, x_0, x_1, x_2, x_d, GROUPS, VECTOR)
    of_x = tl.load(at, mask=there, other=0.0)
    added = of_x
    if residual is not None:
        at = _part(residual, row, columns, size_1, size_2, r_0, r_1, r_2, r_d, GROUPS, VECTOR)
        added = tl.load(at, mask=there, other=0.0)
    return pack(of_x), pack(added)


@triton.jit(do_not_specialize=FORWARD_INTEGERS)
def norm_fwd_split_kernel(
    x, residual, weight, bias, out, stream, mean, rstd, words, eps,
    count, parts, groups, width_units, size_1, size_2,
    x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d, o_0, o_1, o_2, o_d, weight_d, bias_d,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Walk over the rows of one group, in one part.

    `words` is int32, all -1: the ticket, from FIRST_WORD on `[groups, turns, kinds, parts]`: a
    part's sum of squared distances from its mean, and for layer norm this mean. PARTS is the power
    of two that holds `parts`. EVEN says that all parts are whole: columns are not masked.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    KINDS: tl.constexpr = 2 if CENTRED else 1
    KIND: tl.constexpr = x.dtype.element_ty
    width = tl.cast(width_units, tl.int64) * UNIT
    ticket = take_ticket(words)
    group = ticket // parts
    part = tl.cast(ticket % parts, tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    seen = columns < width
    size = tl.minimum(width - part * BLOCK, BLOCK).to(tl.float32)
    each = tl.arange(0, PARTS).to(tl.int64)
    sizes = tl.where(each < parts, tl.minimum(width - each * BLOCK, BLOCK), 0).to(tl.float32)
    if weight is not None:
        w = pack(tl.load(weight + column_offsets(columns, weight_d, VECTOR), mask=seen, other=0.0))
    if bias is not None:
        b = pack(tl.load(bias + column_offsets(columns, bias_d, VECTOR), mask=seen, other=0.0))
    own_words = tl.cast(parts * KINDS, tl.int64)
    of_row = places_of(words, group, groups, count, own_words)
    first = tl.cast(group, tl.int64)
    next_x, next_added = _stream(
        x, residual, first, count, columns, seen, size_1, size_2,
        x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d, GROUPS, VECTOR, EVEN,
    )  # fmt: skip
    own_h = tl.zeros_like(next_x)
    for number in range(group - groups, count, groups):
        row = tl.cast(number, tl.int64)
        after = row + groups
        seen_h = next_x
        if residual is not None:
            h = unpack(next_x, KIND) + unpack(next_added, KIND)
            at = _part(stream, after, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
            tl.store(at, h.to(KIND), mask=seen & (after < count))
            seen_h = pack(h.to(KIND))
        next_x, next_added = _stream(
            x, residual, after + groups, count, columns, seen, size_1, size_2,
            x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d, GROUPS, VECTOR, EVEN,
        )  # fmt: skip
        h = unpack(seen_h, KIND)
        if CENTRED:
            centre = tl.sum(h, 0) / size
            h = h - centre
            if not EVEN:
                h = tl.where(seen, h, 0.0)
            post(of_row + (part + parts), centre, after < count)
        post(of_row + part, tl.sum(h * h, 0), after < count)
        if number >= 0:
            numbers = collect(of_row - own_words, parts, PARTS, KINDS)
            squares = kind_of(numbers, 0)
            y = unpack(own_h, KIND)
            if CENTRED:
                means = kind_of(numbers, 1)
                centre = tl.sum(means * sizes, 0) / width
                squares += sizes * (means - centre) * (means - centre)
                y -= centre
                if mean is not None:
                    tl.store(mean + row, centre, mask=part == 0)
            scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
            if rstd is not None:
                tl.store(rstd + row, scale, mask=part == 0)
            y = y * scale
            if weight is not None:
                y = y * unpack(hold(w), weight.dtype.element_ty)
            if bias is not None:
                y = y + unpack(hold(b), bias.dtype.element_ty)
            at = _part(out, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
            tl.store(at, y.to(KIND), mask=None if EVEN else seen)
        own_h = seen_h
        of_row += own_words


@triton.jit
def _two_parts(
    h, g, mean, rstd, row, count, columns, seen, size_1, size_2,
    h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load the part of a row (int64) of h and of g, its mean and rstd; zeros beyond all rows."""
    is_row = row < count
    there = is_row if EVEN else seen & is_row
    at = _part(h, row, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
    of_h = tl.load(at, mask=there, other=0.0, eviction_policy=EVICT)
    at = _part(g, row, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    of_g = tl.load(at, mask=there, other=0.0, eviction_policy=EVICT)
    scale = tl.load(rstd + row, mask=is_row, other=0.0)
    centre = 0.0
    if mean is not None:
        centre = tl.load(mean + row, mask=is_row, other=0.0)
    return pack(of_h), pack(of_g), centre, scale


@triton.jit
def _distance(
    h, centre, scale, seen, CENTRED: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr
):
    """Give xhat, `[C]` in float32, 0 where not seen."""
    xhat = unpack(h, KIND)
    if CENTRED:
        xhat -= centre
    xhat = xhat * scale
    if CENTRED and not EVEN:  # beyond the row xhat is -mean * rstd
        xhat = tl.where(seen, xhat, 0.0)
    return xhat


@triton.jit(do_not_specialize=BACKWARD_INTEGERS)
def norm_bwd_split_kernel(
    g, e, h, weight, mean, rstd, dh, partial, words,
    count, parts, groups, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, CENTRED: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Walk over the rows of one group, in one part.

    `words` is int32, all -1: the ticket, from FIRST_WORD on `[groups, turns, kinds, parts]`: a
    part's sum of a * xhat, and for layer norm that of a. `partial` is
    `[groups, DWEIGHT + DBIAS, n]`. AHEAD keeps the parts of three rows in registers; else a part is
    read again, from L2, when its row is written. OVERLAPS as in `norm_bwd_kernel`.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    KINDS: tl.constexpr = 2 if CENTRED else 1
    KIND: tl.constexpr = h.dtype.element_ty
    width = tl.cast(width_units, tl.int64) * UNIT
    ticket = take_ticket(words)
    group = ticket // parts
    part = tl.cast(ticket % parts, tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    seen = columns < width
    if weight is not None:
        w = pack(tl.load(weight + column_offsets(columns, weight_d, VECTOR), mask=seen, other=0.0))
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    own_words = tl.cast(parts * KINDS, tl.int64)
    of_row = places_of(words, group, groups, count, own_words)
    if AHEAD:
        next_h, next_g, next_centre, next_scale = _two_parts(
            h, g, mean, rstd, tl.cast(group, tl.int64), count, columns, seen, size_1, size_2,
            h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, EVEN, "",
        )  # fmt: skip
        # Zeros: what starts as the value that it gets in the first turn is not carried.
        own_h, own_g, centre, scale = tl.zeros_like(next_h), tl.zeros_like(next_g), 0.0, 0.0
    for number in range(group - groups, count, groups):
        row = tl.cast(number, tl.int64)
        after = row + groups
        if AHEAD:
            seen_h, seen_g, seen_centre, seen_scale = next_h, next_g, next_centre, next_scale
            next_h, next_g, next_centre, next_scale = _two_parts(
                h, g, mean, rstd, after + groups, count, columns, seen, size_1, size_2,
                h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, EVEN, "",
            )  # fmt: skip
        else:
            seen_h, seen_g, seen_centre, seen_scale = _two_parts(
                h, g, mean, rstd, after, count, columns, seen, size_1, size_2,
                h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, EVEN, "evict_last",
            )  # fmt: skip
        xhat = _distance(seen_h, seen_centre, seen_scale, seen, CENTRED, EVEN, KIND)
        a = unpack(seen_g, KIND)
        if DWEIGHT:
            dweight += a * xhat
        if DBIAS:
            dbias += a
        if weight is not None:
            a = a * unpack(hold(w), weight.dtype.element_ty)
        if CENTRED:
            c_1, c_2 = tl.reduce((a * xhat, a), 0, add_both)
            post(of_row + (part + parts), c_2, after < count)
        else:
            c_1 = tl.sum(a * xhat, 0)
        post(of_row + part, c_1, after < count)
        if number >= 0:
            numbers = collect(of_row - own_words, parts, PARTS, KINDS)
            if not AHEAD:
                own_h, own_g, centre, scale = _two_parts(
                    h, g, mean, rstd, row, count, columns, seen, size_1, size_2,
                    h_0, h_1, h_2, h_d, g_0, g_1, g_2, g_d, GROUPS, VECTOR, EVEN, "evict_first",
                )  # fmt: skip
            xhat = _distance(own_h, centre, scale, seen, CENTRED, EVEN, KIND)
            y = unpack(own_g, KIND)
            if weight is not None:
                y = y * unpack(hold(w), weight.dtype.element_ty)
            across = xhat * (tl.sum(kind_of(numbers, 0), 0) / width * scale)
            if CENTRED:
                across += tl.sum(kind_of(numbers, 1), 0) / width * scale
            y = y * scale - across
            if e is not None:
                at = _part(e, row, columns, size_1, size_2, e_0, e_1, e_2, e_d, GROUPS, VECTOR)
                y += tl.load(at, mask=seen, other=0.0).to(tl.float32)
            at = _part(dh, row, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
            tl.store(at, y.to(KIND), mask=None if EVEN else seen)
        if AHEAD:
            own_h, own_g, centre, scale = seen_h, seen_g, seen_centre, seen_scale
        of_row += own_words
    if DWEIGHT or DBIAS:
        if OVERLAPS:
            gdc_launch_dependents()
        share = partial + (tl.cast(group, tl.int64) * ((DWEIGHT + DBIAS) * width) + columns)
    if DWEIGHT:
        tl.store(share, dweight, mask=seen)
    if DBIAS:
        tl.store(share + DWEIGHT * width, dbias, mask=seen)
