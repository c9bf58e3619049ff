"""Device code of rows that several programs share, each with a part in its registers, who meet.

A row has `parts` parts. The programs of a group, one for each part, take the rows of their group
one after the other. A program takes a ticket, which says its group and its part, so that the
programs that run are always those of the first tickets, in whatever order the GPU starts them. For
each row it posts what it found out about its part, and collects what the others post, and waits for
nobody else. Of the programs that run at any time, those that wait for one that has not started
belong to the one group whose tickets are not all taken; they are fewer than its parts. So nobody
waits for ever where the GPU holds as many programs as a row has parts, twice that for two streams,
and so on: the rule that chooses this form keeps far below.

What a program posted for a row is needed by the others one turn later, when it has long arrived:
in turn r they read row r + 2 of the group, post r + 1, and collect and write r. What waits
meanwhile is packed, two elements of 16 bits in a register.

`words` is int32, all -1 at the launch: the ticket, then from FIRST_WORD on a word for each number
of each part of each row, those of a group side by side: programs that wait keep reading, and would
hinder the others whose words, or ticket, lie in the same line of the L2.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise import config

FIRST_WORD = tl.constexpr(config.FIRST_WORD)


@triton.jit
def take_ticket(words):
    """Number of this program in the order in which programs have started."""
    return tl.atomic_add(words, 1, sem="relaxed") + 1


@triton.jit
def places_of(words, group, groups, count, size):
    """Where a group's first row has its `size` words; its next row's follow them."""
    turns = (count + groups - 1) // groups
    return words + FIRST_WORD + tl.cast(group, tl.int64) * turns * size


@triton.jit
def hold(x):
    """Return x, in whose place nothing that is computed from it stays in registers.

    The compiler would keep what a loop computes from what it does not change, such as a weight in
    float32, in more registers than x has; it cannot see through this.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
        pack=32 // x.dtype.primitive_bitwidth,
    )  # fmt: skip


@triton.jit
def pack(x):
    """Give x `[C]` as whole registers: two elements of 16 bits as one int32, `[C / 2]`.

    What a loop carries lies in a register for each element otherwise.
    """
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [x.shape[0] // 2, 2]))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return x


@triton.jit
def unpack(packed, dtype: tl.constexpr):
    """Give what `pack` was given, in float32."""
    if dtype.primitive_bitwidth == 16:
        low = (packed & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        high = (packed >> 16).to(tl.int16).to(dtype, bitcast=True)
        return tl.reshape(tl.join(low, high), [packed.shape[0] * 2]).to(tl.float32)
    else:
        return packed.to(tl.float32)


@triton.jit
def post(word, number, there):
    """Show a float32 to the other parts, if `there`: a word that is -1 until it holds the number.

    The word says itself that it is there, so that nothing has to wait for other stores. A NaN is
    shown as the usual one, whose bits are not those of -1.
    """
    number = tl.where(number != number, float("nan"), number)
    tl.atomic_xchg(word, number.to(tl.int32, bitcast=True), mask=there, sem="relaxed")


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
