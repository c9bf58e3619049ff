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
def bounds_of(first, n, LANE: tl.constexpr, VECTOR: tl.constexpr):
    """Give `lead, head, tail, end` of a row of n elements, `first` (int64) from the tensor's begin.

    Where VECTOR is 1 rows may start anywhere, and columns count from the multiple of LANE elements
    before a row, so that all of it but its edges comes in vectors (if the tensor begins at 16
    bytes): it has the columns `lead .. end - 1`, and whole lanes those of `head .. tail - 1`.
    """
    if VECTOR == 1:
        lead = (first % LANE).to(tl.int32)
        return lead, (lead + (LANE - 1)) // LANE * LANE, (lead + n) // LANE * LANE, lead + n
    else:
        return 0, 0, n, n


@triton.jit
def inside_bounds(start, inside, head, tail, LANE: tl.constexpr, VECTOR: tl.constexpr):
    """Which elements of a block `[L, V]` lie in `head .. tail - 1`; with VECTOR 1 whole lanes."""
    if VECTOR == 1:
        lanes = start + tl.arange(0, inside.shape[0]) * LANE
        return ((lanes >= head) & (lanes < tail))[:, None]
    else:
        return start + inside < tail


@triton.jit
def edges_of(lead, head, tail, end, LANE: tl.constexpr):
    """Columns `[2 LANE]` before and after the whole lanes of a row, and which of them exist."""
    place = tl.arange(0, 2 * LANE)
    after = tl.maximum(head, tail) - LANE + place
    is_before = place < LANE
    columns = tl.where(is_before, place, after)
    return columns, tl.where(is_before, (place >= lead) & (place < head), True) & (columns < end)


@triton.jit
def add_to_sum(peak, total, z):
    """Take z `[L, V]` into the maximum and the sum of exp(z - maximum), each `[L]`; or `[V]`."""
    AXIS: tl.constexpr = len(z.shape) - 1
    new = tl.maximum(peak, tl.max(z, AXIS))
    shift = tl.where(new == float("-inf"), 0.0, new)
    away = z - (shift[:, None] if AXIS == 1 else shift)
    return new, total * tl.exp(peak - shift) + tl.sum(tl.exp(away), AXIS)


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
