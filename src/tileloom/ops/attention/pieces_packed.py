"""Which block of which packed sequence a program has: found on the device, never by the host.

Sequences of lengths `cu[s + 1] - cu[s]` are cut into blocks of BLOCK rows. The blocks of sequence s
have the numbers from `cu[s] // BLOCK + s` on: no table is needed, and there are as many numbers as

    cu[s + 1] // BLOCK - cu[s] // BLOCK + 1 >= ceil((cu[s + 1] - cu[s]) / BLOCK)

All in all that is `T // BLOCK + S`, known to the host; at most one number in a sequence and one
more have no rows. Numbers rise with s, so a binary search finds the sequence, in L1 from the second
block on.

The Hopper kernels lay the blocks of a sequence from its last row, so that only the block with the
highest number reaches past the sequence, at its front: a TMA descriptor `[T, H, T, D]`, whose first
dimension is a sequence's first row, loads zeros for what lies before row 0, and nothing of a
neighbour. Stores by TMA must not begin before row 0 (an illegal instruction, H100): such a block
leaves from registers.

Offsets that are wrong (a GPU does not check them) are clamped, so that nothing outside of the
tensors is touched.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(number, cu, sequences, BLOCK: tl.constexpr):
    """Find the sequence of a block's number, 64 bits, and the number of its first block."""
    high = tl.cast(sequences, tl.int64)
    low = high * 0
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(cu + middle) // BLOCK + middle <= number
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, (tl.load(cu + low) // BLOCK + low).to(tl.int32)


@triton.jit
def rows_of(cu, sequence, total, most):
    """Give a sequence's first row and its number of rows; `sequence` has 64 bits."""
    first = tl.minimum(tl.maximum(tl.load(cu + sequence), 0), total)
    last = tl.minimum(tl.maximum(tl.load(cu + sequence + 1), first), total)
    return first, tl.minimum(last - first, most)


@triton.jit
def block_of(
    number, cu, cu_other, sequences, total, total_other, most, most_other, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """Give sequence and block of a number, and of both packings the first row and how many.

    `cu` is cut into blocks, `cu_other` the other packing. REVERSED: a sequence's last block has the
    first number. A number without rows gets block 0 of a sequence that is empty in both packings.
    """
    sequence, start = sequence_of(number, cu, sequences, BLOCK)
    first, rows = rows_of(cu, sequence, total, most)
    first_other, rows_other = rows_of(cu_other, sequence, total_other, most_other)
    block = tl.maximum(number - start, 0)
    blocks = (rows + BLOCK - 1) // BLOCK
    is_there = block < blocks
    if REVERSED:
        block = blocks - 1 - block
    block = tl.where(is_there, block, 0)
    rows = tl.where(is_there, rows, 0)
    rows_other = tl.where(is_there, rows_other, 0)
    return (
        sequence,
        block,
        tl.cast(first, tl.int64),
        rows,
        tl.cast(first_other, tl.int64),
        rows_other,
    )


@triton.jit
def row_of_place(place, cu, sequences, total, most, BLOCK: tl.constexpr):
    """Give a sequence's first row, its number of rows, and the row at a place of a padded order.

    In that order each sequence has whole blocks, at least one, and its rows at their end; the place
    of block 0 is its number times BLOCK. At places without a row, the row is none of the sequence.
    """
    sequence, start = sequence_of(place // BLOCK, cu, sequences, BLOCK)
    first, rows = rows_of(cu, sequence, total, most)
    blocks = tl.maximum((rows + BLOCK - 1) // BLOCK, 1)
    return first, rows, place - (start + blocks) * BLOCK + rows
