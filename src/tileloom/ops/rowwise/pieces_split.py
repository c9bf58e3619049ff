"""Device code of rows that several programs share, each with a part in its registers, who meet.

A program takes a ticket, which says its row and its part, so that the programs that run are always
those of the first tickets, in whatever order the GPU starts them. It stores what it found out about
its part, and then waits for the other parts of its row, and for nobody else. Of the programs that
run at any time, those that wait belong to the one row whose tickets are not all taken; they are
fewer than its parts. So nobody waits for ever where the GPU holds as many programs as a row has
parts, twice that for two streams, and so on: the rule that chooses this form keeps far below.

`counters` is int32, zero at the launch: the ticket, then one entry a row.
"""

import triton
import triton.language as tl


@triton.jit
def take_ticket(counters):
    """Number of this program in the order in which programs have started."""
    return tl.atomic_add(counters, 1, sem="relaxed")


@triton.jit
def meet(counters, row, parts):
    """Wait for all parts of a row: what each stored before is visible to all from here on."""
    counter = counters + 1 + row
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < parts:
        arrived = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def hold(x):
    """Return x, in whose place nothing that was computed from it stays in registers.

    A part waits for the others with its elements in registers: two of 16 bits lie in one, which
    their float32 values do not. The compiler would keep those; it cannot see through this.
    """
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    else:
        return x
