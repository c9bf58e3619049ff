"""What the portable kernels of attention's backward share: loads, ranges of visible tiles, and P.

Blocks of scores come in both orientations, queries as rows or keys as rows: what depends on one of
the two arrives here as a column or a row of numbers that broadcasts.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_FLOAT32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_tile(
    pointers, rows_seen, columns_seen, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr
):
    """Load a block of a matrix, 0 where it is not seen."""
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(pointers, mask=rows_seen[:, None] & columns_seen[None, :], other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows_seen[:, None], other=0.0)
    elif CHECK_COLUMNS:
        return tl.load(pointers, mask=columns_seen[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def chunked_product(
    a, b, a_step, b_step, a_rows, b_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply A B^T, CHUNK of their WIDTH columns at a time; a and b point at the first ones."""
    columns = tl.arange(0, CHUNK)
    product = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
    for chunk in range(0, BLOCK, CHUNK):
        there = columns < WIDTH - chunk
        at = tl.cast(chunk, tl.int64)
        a_block = load_tile(a + at * a_step, a_rows, there, True, WIDTH < BLOCK)
        b_block = load_tile(b + at * b_step, b_rows, there, True, WIDTH < BLOCK)
        product = tl.dot(a_block, tl.trans(b_block), product, input_precision="ieee")
    return product


@triton.jit
def add_product(acc, a, b):
    """Return acc + A B, with A rounded to the precision of B.

    In float32 each block has a chain of additions of its own: rounding errors grow with the root of
    a chain's length (fma, because Triton folds `acc + dot` into one chain).
    """
    if b.dtype == tl.float32:
        one = tl.full(acc.shape, 1.0, tl.float32)
        return tl.fma(acc, one, tl.dot(a, b, input_precision="ieee"))
    else:
        return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def keys_of(lengths, batch, lengths_b, len_k, HAS_LENGTHS: tl.constexpr):
    """Return the number of keys of a sequence."""
    n = len_k
    if HAS_LENGTHS:
        own = tl.load(lengths + batch * lengths_b)
        n = tl.minimum(tl.maximum(own, 0), len_k).to(tl.int32)
    return n


@triton.jit
def band_of(n, len_q, len_k, left_top, right_top, left_bottom, right_bottom):
    """Return `low, high`: row i sees the keys `i + low .. min(i + high, n - 1)`."""
    shift = tl.cast(n, tl.int64) - len_q
    # As far as any key can be from any row: sums with a row or key fit 32 bits.
    low = tl.maximum(tl.maximum(-left_top, shift - left_bottom), -tl.cast(len_q, tl.int64))
    low = tl.minimum(low, len_k).to(tl.int32)
    high = tl.minimum(tl.minimum(right_top, shift + right_bottom), tl.cast(len_k, tl.int64))
    high = tl.maximum(high, -len_q).to(tl.int32)
    return low, high


@triton.jit
def key_range(
    row_first, row_last, low, high, n, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return which keys the rows of a tile see.

    `first, beyond`: from the first key that any row sees to behind the last one.
    `begin, full_begin, full_end, end`: the runs of key blocks that are cut by the left bound, seen
    whole by every row, and cut by the right bound or the sequence's end.
    """
    first = 0
    full_begin = 0
    beyond = n
    full_beyond = n
    if HAS_LEFT:
        first = tl.maximum(row_first + low, 0)
        full_begin = tl.cdiv(tl.maximum(row_last + low, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        beyond = tl.minimum(n, row_last + high + 1)
        full_beyond = tl.minimum(n, tl.maximum(row_first + high + 1, 0))
    if HAS_LEFT and HAS_RIGHT:
        beyond = tl.where(low <= high, beyond, 0)  # else no row sees any key
    begin = first // BLOCK_N * BLOCK_N
    end = tl.cdiv(tl.maximum(beyond, begin), BLOCK_N) * BLOCK_N
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.minimum(tl.maximum(full_beyond // BLOCK_N * BLOCK_N, full_begin), end)
    return first, beyond, begin, full_begin, full_end, end


@triton.jit
def row_range(
    key_first, n, len_q, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return which rows see the keys `key_first ..` of a block, as runs of row blocks.

    `begin, full_begin, full_end, end`: the runs that are cut by the right bound, that see every
    key, and that are cut by the left bound. A block with the sequence's end in it is all cut.
    """
    key_last = tl.minimum(key_first + BLOCK_N, n) - 1
    first = 0
    beyond = tl.where(key_first < n, len_q, 0)
    full_begin = 0
    full_end = beyond
    if HAS_RIGHT:
        first = tl.maximum(key_first - high, 0)
        full_begin = tl.maximum(key_first + BLOCK_N - 1 - high, 0)
    if HAS_LEFT:
        beyond = tl.minimum(beyond, key_last - low + 1)
        full_end = tl.minimum(full_end, key_first - low + 1)
    if HAS_LEFT and HAS_RIGHT:
        beyond = tl.where(low <= high, beyond, 0)
    begin = first // BLOCK_M * BLOCK_M
    end = tl.cdiv(tl.maximum(beyond, begin), BLOCK_M) * BLOCK_M
    full_begin = tl.minimum(tl.cdiv(full_begin, BLOCK_M) * BLOCK_M, end)
    full_begin = tl.maximum(full_begin, begin)
    full_begin = tl.where(key_first + BLOCK_N <= n, full_begin, end)
    if HAS_LEFT:
        full_end = tl.minimum(tl.maximum(full_end, 0) // BLOCK_M * BLOCK_M, end)
        full_end = tl.maximum(full_end, full_begin)
    else:
        full_end = end
    return begin, full_begin, full_end, end


@triton.jit
def load_rows(lse, delta, weight, at, there, WEIGHTED: tl.constexpr):
    """Load what P and dS need of each row: LSE, delta and weight.

    A row that sees no key, or lies beyond the last one, gets the LSE +inf: P = 0.
    """
    shift = tl.load(lse + at, mask=there, other=float("inf"))
    shift = tl.where(shift == float("-inf"), float("inf"), shift)
    change = tl.load(delta + at, mask=there, other=0.0)
    if WEIGHTED:
        factor = tl.load(weight + at, mask=there, other=0.0)
    else:
        shift = shift * LOG2_E
        factor = change
    return shift, change, factor


@triton.jit
def _load_scores(
    pointer, rows, columns, stride_q, stride_k, rows_seen, seen, is_cut, hidden,
    MODE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Load a block of mask or bias; in mode 1, the same for every row, only its columns.

    Only a block that is cut checks its columns: without a check loads are wide.
    """
    at = columns.to(tl.int64)
    if VECTOR == 0:
        at = at * stride_k
    if MODE == 1:
        if is_cut:
            block = tl.load(pointer + at, mask=seen, other=hidden)
        else:
            block = tl.load(pointer + at)
    else:
        UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
        pointers = pointer + (rows.to(tl.int64) * (stride_q * UNIT) + at)
        if is_cut:
            block = tl.load(pointers, mask=rows_seen & seen, other=hidden)
        else:
            block = tl.load(pointers, mask=rows_seen, other=hidden)
    return block


@triton.jit
def _in_band(
    rows, columns, rows_seen, seen, low, high, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    visible = rows_seen & seen
    if HAS_RIGHT:
        visible = visible & (columns <= rows + high)
    if HAS_LEFT:
        visible = visible & (columns >= rows + low)
    return visible


@triton.jit
def weigh(
    s, rows, columns, rows_seen, seen, is_cut, low, high, shift, factor, mask, bias,
    mask_q, mask_k, bias_q, bias_k, scale,
    MAY_CUT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK_MODE: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BIAS_MODE: tl.constexpr, BIAS_VECTOR: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Return P of a block of products q k, and with a mask or bias where its keys are visible.

    Rows, columns, `rows_seen`, `seen`, `shift` and `factor` broadcast to the block. In a block that
    is not cut every row sees every key, but for mask and bias; with MAY_CUT False none is cut. If
    not WEIGHTED, `scale` and `shift` come times log2(e).
    """
    visible = seen
    if MASK_MODE > 0 or BIAS_MODE > 0:
        visible = _in_band(rows, columns, rows_seen, seen, low, high, HAS_LEFT, HAS_RIGHT)
    if MASK_MODE > 0:
        shown = _load_scores(
            mask, rows, columns, mask_q, mask_k, rows_seen, seen, is_cut, 0, MASK_MODE, MASK_VECTOR
        )
        visible = visible & (shown != 0)
    if WEIGHTED:
        s = s * scale
        if BIAS_MODE > 0:
            b = _load_scores(
                bias, rows, columns, bias_q, bias_k, rows_seen, seen, is_cut, float("-inf"),
                BIAS_MODE, BIAS_VECTOR,
            )  # fmt: skip
            visible = visible & (b != float("-inf"))
            if b.dtype == tl.float64:  # what is finite stays finite
                b = tl.where((b != float("-inf")) & (b < _MIN_FLOAT32), _MIN_FLOAT32, b)
            s = s + b.to(tl.float32)
        p = tl.exp2((s - shift) * LOG2_E) * factor
    else:
        p = tl.exp2(s * scale - shift)
    if MASK_MODE > 0 or BIAS_MODE > 0:
        p = tl.where(visible, p, 0.0)
    elif MAY_CUT:
        if is_cut:
            band = _in_band(rows, columns, rows_seen, seen, low, high, HAS_LEFT, HAS_RIGHT)
            p = tl.where(band, p, 0.0)
    return p, visible


@triton.jit
def scores_of(pointer, batch, head, stride_b, stride_h, MODE: tl.constexpr, VECTOR: tl.constexpr):
    """Point at the first row and key of one head's mask or bias."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    place = batch * (stride_b * UNIT) + head * (stride_h * UNIT)
    if MODE > 0:
        place = pointer + place
    return place


@triton.jit
def tile_at(base, rows, columns, stride_l, stride_d, VECTOR: tl.constexpr):
    """Point at a block of a matrix; rows and columns are 64-bit, the stride in units of VECTOR."""
    if VECTOR == 0:
        return base + (rows[:, None] * stride_l + columns[None, :] * stride_d)
    else:
        return base + (rows[:, None] * (stride_l * VECTOR) + columns[None, :])
