"""Rows that programs share, in the smallest kernel that does it; and the same with a fault each."""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_split import collect, kind_of, post, take_ticket


@triton.jit
def sum_kernel(
    x, out, words, parts, MEETING: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each part writes the sum of its whole row."""
    ticket = take_ticket(words)
    row = (ticket // parts).to(tl.int64)
    part = ticket % parts
    place = row * parts + part
    of_row = words + 1 + row * parts
    own = tl.sum(tl.load(x + place * BLOCK + tl.arange(0, BLOCK)), 0)
    if MEETING == "plain store":
        tl.store(of_row + part, own.to(tl.int32, bitcast=True))
    else:
        post(of_row + part, own, part > (0 if MEETING == "one is silent" else -1))
    if MEETING == "plain load":
        each = tl.arange(0, PARTS)
        found = tl.load(of_row + each, mask=each < parts, other=0).to(tl.float32, bitcast=True)
    else:
        found = kind_of(collect(of_row, parts, PARTS, 1), 0)
    tl.store(out + place, tl.sum(found, 0))
