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


@triton.jit
def post(word, number):
    """Show a float32 to the other parts: a word that is -1 until it holds the number.

    The word says itself that it is there, so that nothing has to wait for earlier stores, as
    `meet` has. A NaN is shown as the usual one, whose bits are not those of -1.
    """
    number = tl.where(number != number, float("nan"), number)
    tl.atomic_xchg(word, number.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def collect(words, parts, PARTS: tl.constexpr, KINDS: tl.constexpr):
    """Wait for what all parts of a row post, `[KINDS, parts]` words; `[KINDS, PARTS]` float32.

    PARTS is the power of two that holds `parts`; what is beyond is 0. KINDS is 1 or 2.
    """
    each = tl.arange(0, PARTS)
    known = (each < parts)[None, :] & (tl.arange(0, KINDS) >= 0)[:, None]
    at = words + (tl.arange(0, KINDS).to(tl.int64) * parts)[:, None] + each[None, :]
    # Atomics, for their result is one for all threads: copies of a load might end the loop apart.
    found = tl.atomic_or(at, 0, mask=known, sem="relaxed")
    while tl.max(tl.max((known & (found == -1)).to(tl.int32), 1), 0) != 0:
        found = tl.atomic_or(at, 0, mask=known, sem="relaxed")
    found = tl.where(known, found, 0)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def kind_of(numbers, kind: tl.constexpr):
    """One row of what `collect` gives, `[PARTS]`."""
    own = tl.arange(0, numbers.shape[0]) == kind
    return tl.sum(tl.where(own[:, None], numbers, 0.0), 0)
