"""Device code of softmax and cross entropy: the sum of exponentials of a row that comes in blocks.

Maximum and sum are kept lane by lane. A lane is a thread's few elements of every block: a block
`[LANES, VECTOR]` costs one exponential for each element and one for each lane, and no two threads
wait for each other until `join_lanes`.
"""

import triton
import triton.language as tl


@triton.jit
def lanes_of(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Places in a block as `[LANES, V]`, so that a thread has the V elements of a lane.

    With vectors they lie side by side, VECTOR of them, else they are 8 that lie apart, so that
    neighbouring threads load neighbours.
    """
    if VECTOR > 1:
        return tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    else:
        return tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :] * (BLOCK // 8)


@triton.jit
def add_to_sum(peak, total, z):
    """Take the block z `[L, V]` into the maximum and the sum of exp(z - maximum), each `[L]`."""
    new = tl.maximum(peak, tl.max(z, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp(peak - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
    return new, total


@triton.jit
def join_lanes(peak, total):
    """Maximum and sum of exp(z - maximum) over all lanes; a row of -inf gives -inf and 0."""
    top = tl.max(peak, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(total * tl.exp(peak - shift), 0)


@triton.jit
def block_pointers(row, start, inside, stride_d, VECTOR: tl.constexpr):
    """Pointers of the elements `start + inside` of the row at `row`.

    `inside` is the place in the block, int32 and less than its size; `start` is below 2^30.
    """
    if VECTOR == 0:
        return row + (start + inside).to(tl.int64) * tl.cast(stride_d, tl.int64)
    else:
        return (row + tl.cast(start, tl.int64)) + inside


@triton.jit
def load_block(row, start, inside, seen, other, stride_d, VECTOR: tl.constexpr):
    """Load a block of a row: all of it where `seen` is None, else `other` where it is false."""
    at = block_pointers(row, start, inside, stride_d, VECTOR)
    if seen is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=seen, other=other)


@triton.jit
def store_block(row, start, inside, seen, values, stride_d, VECTOR: tl.constexpr):
    """Store a block of a row in the row's dtype; see `load_block`."""
    at = block_pointers(row, start, inside, stride_d, VECTOR)
    tl.store(at, values.to(row.dtype.element_ty), mask=seen)
