"""Rows that programs share, in the smallest kernel that does it; and the same with a fault each."""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_split import meet, take_ticket


@triton.jit
def sum_kernel(x, out, counters, partials, parts, MEETING: tl.constexpr, BLOCK: tl.constexpr):
    """Each part writes the sum of its whole row."""
    ticket = take_ticket(counters)
    row = (ticket // parts).to(tl.int64)
    part = ticket % parts
    place = row * parts + part
    tl.store(partials + place, tl.sum(tl.load(x + place * BLOCK + tl.arange(0, BLOCK)), 0))
    counter = counters + 1 + row
    if MEETING == "right":
        meet(counters, row, parts)
    elif MEETING == "relaxed":
        arrived = tl.atomic_add(counter, 1, sem="relaxed") + 1
        while arrived < parts:
            arrived = tl.atomic_add(counter, 0, sem="relaxed")
    elif MEETING == "one more":
        meet(counters, row, parts + 1)
    total = 0.0
    for other in range(parts):
        total += tl.load(partials + row * parts + other)
    tl.store(out + place, total)
