"""Softmax forward and backward of long rows in portable Triton: several programs share a row.

Mathematics as in `kernel_triton.py`. Tile picture: program t (its ticket) takes the columns
`p BLOCK .. (p + 1) BLOCK - 1` of row `t // parts`, with p = t % parts, and keeps them in registers:

    row 0 | part 0 | part 1 | ... |     each part: post its own m and l; collect those of all;
    row 1 | part 0 | part 1 | ... |     join them; y = exp(x - m) / l for its own columns

Who waits for whom: each part of a row for all others of it, once, at `pieces_split.collect`. All
join what they collect in one order, so that all scale by the same number and every run gives the
same bits.

Bytes moved: x (or y and dy) once and y (or dx) once, whatever the length of the rows.

Offsets are 64-bit outside a block: see `pieces_triton`.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_softmax import join_lanes, load_block, store_block
from tileloom.ops.rowwise.pieces_split import (
    FIRST_WORD,
    collect,
    hold,
    kind_of,
    post,
    take_ticket,
)
from tileloom.ops.rowwise.pieces_triton import row_offsets
from tileloom.ops.rowwise.softmax.kernel_triton import INT_ARGUMENTS_BACKWARD, INT_ARGUMENTS_FORWARD


@triton.jit(do_not_specialize=(*INT_ARGUMENTS_FORWARD, "parts"))
def softmax_fwd_split_kernel(
    x, mask, y, words, count, width, size_1, size_2,
    x_0, x_1, x_2, x_d, y_0, y_1, y_2, y_d, mask_0, mask_1, mask_2, mask_d, parts,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`words` is int32, all -1: the ticket, from FIRST_WORD on each row's `[2, parts]`.

    They are a part's maximum, and its sum. EVEN says that all parts are whole.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    ticket = take_ticket(words)
    row = (ticket // parts).to(tl.int64)
    part = ticket % parts
    start = part * BLOCK
    inside = tl.arange(0, BLOCK)
    seen = None if EVEN else start + inside < n
    x += row_offsets(row, size_1, size_2, x_0, x_1, x_2, GROUPS, VECTOR)
    shown = load_block(x, start, inside, seen, float("-inf"), x_d, VECTOR)
    if mask is not None:
        mask += row_offsets(row, size_1, size_2, mask_0, mask_1, mask_2, GROUPS, MASK_VECTOR)
        visible = load_block(mask, start, inside, seen, 0, mask_d, MASK_VECTOR)
        shown = tl.where(visible != 0, shown, float("-inf"))
    z = shown.to(tl.float32)
    own = tl.max(z, 0)
    words += FIRST_WORD + row * (parts * 2)
    post(words + part, own, part >= 0)
    e = tl.exp(z - tl.where(own == float("-inf"), 0.0, own))
    post(words + (part + parts), tl.sum(e, 0), part >= 0)
    numbers = collect(words, parts, PARTS, 2)

    peaks = tl.where(tl.arange(0, PARTS) < parts, kind_of(numbers, 0), float("-inf"))
    peak, total = join_lanes(peaks, kind_of(numbers, 1))
    # One exponential an element: those about the part's own maximum are brought to the row's.
    factor = tl.where(own == float("-inf"), 0.0, tl.exp(own - peak))
    out = e * (factor / tl.where(total == 0.0, 1.0, total))
    y += row_offsets(row, size_1, size_2, y_0, y_1, y_2, GROUPS, VECTOR)
    store_block(y, start, inside, seen, out, y_d, VECTOR)


@triton.jit(do_not_specialize=(*INT_ARGUMENTS_BACKWARD, "parts"))
def softmax_bwd_split_kernel(
    y, dy, dx, words, count, width, size_1, size_2,
    y_0, y_1, y_2, y_d, dy_0, dy_1, dy_2, dy_d, dx_0, dx_1, dx_2, dx_d, parts,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`words` is int32, all -1: the ticket, from FIRST_WORD on each row's parts' sums of y dy."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    n = width * UNIT
    ticket = take_ticket(words)
    row = (ticket // parts).to(tl.int64)
    part = ticket % parts
    start = part * BLOCK
    inside = tl.arange(0, BLOCK)
    seen = None if EVEN else start + inside < n
    y += row_offsets(row, size_1, size_2, y_0, y_1, y_2, GROUPS, VECTOR)
    dy += row_offsets(row, size_1, size_2, dy_0, dy_1, dy_2, GROUPS, VECTOR)
    p = load_block(y, start, inside, seen, 0.0, y_d, VECTOR)
    g = load_block(dy, start, inside, seen, 0.0, dy_d, VECTOR)
    words += FIRST_WORD + row * parts
    post(words + part, tl.sum(p.to(tl.float32) * g.to(tl.float32), 0), part >= 0)
    total = tl.sum(kind_of(collect(words, parts, PARTS, 1), 0), 0)

    out = hold(p).to(tl.float32) * (hold(g).to(tl.float32) - total)
    dx += row_offsets(row, size_1, size_2, dx_0, dx_1, dx_2, GROUPS, VECTOR)
    store_block(dx, start, inside, seen, out, dx_d, VECTOR)
