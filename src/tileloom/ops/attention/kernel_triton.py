"""Attention forward in portable Triton (sm_80 and later): every mask, bias, stride and head dim.

Mathematics, for a tile of BLOCK_M queries and one step of BLOCK_N keys (online softmax):

    S = scale * Q K^T (+ bias)         hidden keys -> -inf
    m' = max(m, rowmax S)              alpha = exp(m - m')
    P = exp(S - m')                    l = alpha l + rowsum P
    P = 0 where dropout drops it       O = alpha O + P V
    at the end: O / l / (1 - p),  LSE = m + log l;  a row that sees no key: 0 and -inf

Without a bias, exponents are powers of two: `scale` comes in times log2(e), and P is one fused
multiply-add and one exp2. With a bias, m stays in natural units: a bias of finfo.min times log2(e)
would be -inf, and a row filled with it would see no key.

Tile picture. With row i, `n` keys in the sequence and shift = n - len_q, row i sees the keys
`i + low .. min(i + high, n - 1)`, where low = max(-left_top, shift - left_bottom) and
high = min(right_top, shift + right_bottom). The keys of a tile fall into three runs of blocks:

    |  hidden  | cut by left bound | seen by every row | cut by right bound or n |  hidden  |
    0        begin             full_begin           full_end                    end

Blocks outside begin..end are never loaded; the middle run has no compare at all.

Hidden keys never reach O: a key that no row of the tile sees is not loaded (0 instead), so it may
hold NaN. For a mask tensor or bias with a row for each query the block's columns are reduced first.

Bytes moved: Q and O once, K and V once for each query tile that sees them (from L2, mostly: the
tiles of a head, or of as many heads as keep K and V in L2, run side by side).

Offsets are 64-bit throughout: strides are declared as int64, and products are taken with them.
Stride arguments come divided by a power of two (VECTOR, ...) that the kernel multiplies again, so
that the compiler knows the alignment without a recompilation for each stride.
"""

import math

import triton
import triton.language as tl

from tileloom.ops.attention.pieces_packed import block_of
from tileloom.ops.attention.pieces_philox import (
    crosses_quads,
    first_index,
    keep_tile,
    philox_state,
)

_LN_2 = tl.constexpr(math.log(2.0))
_MIN_FLOAT32 = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(math.log2(math.e))

INT64_ARGUMENTS = (
    *("q_b", "q_h", "q_l", "q_d", "k_b", "k_h", "k_l", "k_d", "v_b", "v_h", "v_l", "v_d"),
    *("mask_b", "mask_h", "mask_q", "mask_k", "bias_b", "bias_h", "bias_q", "bias_k"),
    *("out_b", "out_h", "out_l", "lengths_b"),
    *("left_top", "right_top", "left_bottom", "right_bottom", "seed", "offset", "threshold"),
)
INT32_ARGUMENTS = (
    *("heads", "heads_all", "group", "section", "tiles", "len_q", "len_k"),
    *("sequences", "total_q", "total_k"),
)


@triton.jit
def _load_tile(pointers, rows_seen, columns_seen, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):  # fmt: skip  # noqa: E501
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(pointers, mask=rows_seen[:, None] & columns_seen[None, :], other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows_seen[:, None], other=0.0)
    elif CHECK_COLUMNS:
        return tl.load(pointers, mask=columns_seen[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_scores(
    pointers, columns, stride_k, rows_seen, seen, hidden,
    MODE: tl.constexpr, VECTOR: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Load a block of mask or bias: `[1, N]` in mode 1 (the same for every row), else `[M, N]`."""
    at = columns.to(tl.int64)
    if VECTOR == 0:
        at = at * stride_k
    pointers = pointers + at[None, :]
    if MODE == 2 and CUT:
        return tl.load(pointers, mask=rows_seen[:, None] & seen[None, :], other=hidden)
    elif MODE == 2:
        return tl.load(pointers, mask=rows_seen[:, None], other=hidden)
    elif CUT:
        return tl.load(pointers, mask=seen[None, :], other=hidden)
    else:
        return tl.load(pointers)


@triton.jit
def _steps(
    acc, peak, total, q, k, v, mask, bias, begin, end, q_d, k_l, k_d, v_l, mask_k, bias_k,
    left, right, first, beyond, rows_seen, scale, index, crosses, seed, threshold,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_D: tl.constexpr, CUT: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK_MODE: tl.constexpr,
    MASK_VECTOR: tl.constexpr, BIAS_MODE: tl.constexpr, BIAS_VECTOR: tl.constexpr,
    NEGATE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take the key blocks `begin .. end`.

    `k` and `v` point at key block 0, `mask` and `bias` at this tile's rows; `q` is the block
    itself, or points at its first CHUNK_D columns. `peak` and `total` are m and l.
    `index` has the place of each row's key 0 in dropout's random numbers.
    With CUT each score is compared with its row's bounds, and keys outside `first .. beyond`,
    which no row sees, are not loaded.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    HIDES: tl.constexpr = MASK_MODE > 0 or BIAS_MODE > 0
    dims = tl.arange(0, CHUNK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        seen = (columns >= first) & (columns < beyond)
        if CHUNK_D == BLOCK_D:
            k_block = _load_tile(k + at * k_l, seen, dims < HEAD_DIM, CUT, HEAD_DIM < BLOCK_D)
            if not HIDES:  # under way while S is computed
                v_block = _load_tile(
                    v + at * v_l, seen, dims_v < HEAD_DIM_V, CUT, HEAD_DIM_V < BLOCK_DV
                )
            s = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        else:
            s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for chunk in range(0, BLOCK_D, CHUNK_D):
                there = dims < HEAD_DIM - chunk
                q_block = _load_tile(q + chunk * q_d, rows_seen, there, True, HEAD_DIM < BLOCK_D)
                k_block = _load_tile(
                    k + (at * k_l + chunk * k_d), seen, there, CUT, HEAD_DIM < BLOCK_D
                )
                s = tl.dot(q_block, tl.trans(k_block), s, input_precision="ieee")
            if NEGATE:
                s = -s
        if CUT:
            visible = seen[None, :]
            if HAS_RIGHT:
                visible = visible & (columns[None, :] <= right[:, None])
            if HAS_LEFT:
                visible = visible & (columns[None, :] >= left[:, None])
        if MASK_MODE > 0:
            shown = _load_scores(
                mask, columns, mask_k, rows_seen, seen, 0, MASK_MODE, MASK_VECTOR, CUT
            ) != 0  # fmt: skip
            if CUT:
                visible = visible & shown
            else:
                visible = shown
        if BIAS_MODE > 0:
            b = _load_scores(
                bias, columns, bias_k, rows_seen, seen, float("-inf"), BIAS_MODE, BIAS_VECTOR, CUT
            )
            weighed = b != float("-inf")
            if CUT or MASK_MODE > 0:
                visible = visible & weighed
            else:
                visible = weighed
            if b.dtype == tl.float64:  # what is finite stays finite
                b = tl.where(visible & (b < _MIN_FLOAT32), _MIN_FLOAT32, b)
            s = s * scale + b.to(tl.float32)

        if CUT or HIDES:
            s = tl.where(visible, s, float("-inf"))
        if BIAS_MODE > 0:
            m_new = tl.maximum(peak, tl.max(s, 1))
            finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2((s - finite[:, None]) * _LOG2_E)
            alpha = tl.exp2((peak - finite) * _LOG2_E)
        else:
            m_new = tl.maximum(peak, tl.max(s, 1) * scale)
            finite = m_new
            if CUT or HIDES:
                finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * scale - finite[:, None])
            alpha = tl.exp2(peak - finite)
        total = total * alpha + tl.sum(p, 1)
        peak = m_new
        if DROPOUT:
            p = tl.where(keep_tile(index, start, crosses, seed, threshold, BLOCK_N, False), p, 0.0)

        if MASK_MODE == 2 or BIAS_MODE == 2:
            seen = tl.max(visible.to(tl.int32), 0) != 0
        else:
            if MASK_MODE == 1:
                seen = seen & tl.reshape(shown, [BLOCK_N])
            if BIAS_MODE == 1:
                seen = seen & tl.reshape(weighed, [BLOCK_N])
        if HIDES or CHUNK_D < BLOCK_D:
            v_block = _load_tile(
                v + at * v_l, seen, dims_v < HEAD_DIM_V, CUT or HIDES, HEAD_DIM_V < BLOCK_DV
            )
        alpha = tl.broadcast_to(alpha[:, None], acc.shape)
        if v_block.dtype == tl.float32:
            # A chain of additions for each block, not one over all keys: rounding errors grow with
            # the root of its length (fma, because Triton folds `acc + dot` into one chain).
            acc = tl.fma(acc, alpha, tl.dot(p, v_block, input_precision="ieee"))
        else:
            acc = tl.dot(p.to(v_block.dtype), v_block, acc * alpha, input_precision="ieee")
    return acc, peak, total


@triton.jit
def _scores_rows(
    pointer, batch, head, rows, stride_b, stride_h, stride_q, MODE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Point at the first key of the tile's rows of a mask or bias: `[M, 1]`, or one in mode 1."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    place = batch * (stride_b * UNIT) + head * (stride_h * UNIT)
    if MODE == 2:
        place = place + rows[:, None] * (stride_q * UNIT)
    if MODE > 0:
        place = pointer + place
    return place


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def attention_fwd_kernel(
    q, k, v, mask, bias, lengths, seed_at, offset_at, out, lse, scale,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_l: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64,
    out_b: tl.int64, out_h: tl.int64, out_l: tl.int64, lengths_b: tl.int64,
    heads: tl.int32, heads_all: tl.int32, group: tl.int32, section: tl.int32, tiles: tl.int32,
    len_q: tl.int32, len_k: tl.int32,
    cu_q, cu_k, sequences: tl.int32, total_q: tl.int32, total_k: tl.int32,
    left_top: tl.int64, right_top: tl.int64, left_bottom: tl.int64, right_bottom: tl.int64,
    seed: tl.int64, offset: tl.int64, threshold: tl.int64, keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_D: tl.constexpr,
    VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr,
    MASK_MODE: tl.constexpr, BIAS_MODE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NEGATE: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute one tile of BLOCK_M queries of one head.

    Strides come in units of VECTOR (MASK_VECTOR, BIAS_VECTOR) elements, last-dimension strides
    only where that constant is 0 and the units are single elements; MODE is 0 without the tensor,
    1 if it is the same for every row, 2 otherwise. `scale` is not negative, NEGATE stands for its
    sign; without a bias it comes times log2(e). Of packed sequences (`cu_q`) `len_q` and `len_k`
    bound the lengths, and the strides of batches are those of rows; see `pieces_packed.py`. Seed
    and offset lie at `seed_at` and `offset_at`, or come as numbers; `keep_scale` is 1 / (1 - p).
    """
    # Sections of heads; inside one, tile by tile, those with the most keys first.
    program = tl.program_id(0)
    part = program // (section * tiles)
    within = program - part * (section * tiles)
    width = tl.minimum(section, heads_all - part * section)
    tile = within // width
    head_all = part * section + within - tile * width
    batch = tl.cast(head_all // heads, tl.int64)
    head = tl.cast(head_all % heads, tl.int64)
    head_kv = head // group
    most_q = len_q
    most_k = len_k
    if cu_q is None:
        if HAS_RIGHT:
            tile = tiles - 1 - tile
        batch_q = batch
        batch_k = batch
        row_of_all = tl.cast(head_all, tl.int64) * len_q
    else:
        batch, tile, batch_q, len_q, batch_k, len_k = block_of(
            tile, cu_q, cu_k, sequences, total_q, total_k, len_q, len_k, BLOCK_M, HAS_RIGHT
        )
        row_of_all = head * total_q + batch_q

    n = len_k
    if HAS_LENGTHS:
        own = tl.load(lengths + batch * lengths_b)
        n = tl.minimum(tl.maximum(own, 0), len_k).to(tl.int32)
    row_first = tile * BLOCK_M
    row_last = tl.minimum(row_first + BLOCK_M, len_q) - 1
    shift = tl.cast(n, tl.int64) - len_q
    # As far as any key can be from any row: the sums below fit 32 bits.
    low = tl.maximum(tl.maximum(-left_top, shift - left_bottom), -tl.cast(len_q, tl.int64))
    low = tl.minimum(low, len_k).to(tl.int32)
    high = tl.minimum(tl.minimum(right_top, shift + right_bottom), tl.cast(len_k, tl.int64))
    high = tl.maximum(high, -len_q).to(tl.int32)

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

    rows = row_first + tl.arange(0, BLOCK_M)
    rows_seen = rows < len_q
    rows_at = rows.to(tl.int64)
    dims = tl.arange(0, CHUNK_D).to(tl.int64)
    dims_v = tl.arange(0, BLOCK_DV).to(tl.int64)
    keys = tl.arange(0, BLOCK_N).to(tl.int64)
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    q += batch_q * (q_b * UNIT) + head * (q_h * UNIT)
    k += batch_k * (k_b * UNIT) + head_kv * (k_h * UNIT)
    v += batch_k * (v_b * UNIT) + head_kv * (v_h * UNIT)
    q_step = q_d
    k_step = k_d
    if VECTOR == 0:
        q_tile = q + (rows_at[:, None] * q_l + dims[None, :] * q_d)
        k_tile = k + (keys[:, None] * k_l + dims[None, :] * k_d)
        v_tile = v + (keys[:, None] * v_l + dims_v[None, :] * v_d)
    else:
        q_step = tl.full([], 1, tl.int64)
        k_step = tl.full([], 1, tl.int64)
        q_tile = q + (rows_at[:, None] * (q_l * UNIT) + dims[None, :])
        k_tile = k + (keys[:, None] * (k_l * UNIT) + dims[None, :])
        v_tile = v + (keys[:, None] * (v_l * UNIT) + dims_v[None, :])
    mask = _scores_rows(mask, batch, head, rows_at, mask_b, mask_h, mask_q, MASK_MODE, MASK_VECTOR)
    bias = _scores_rows(bias, batch, head, rows_at, bias_b, bias_h, bias_q, BIAS_MODE, BIAS_VECTOR)

    if CHUNK_D == BLOCK_D:
        q_block = _load_tile(q_tile, rows_seen, dims < HEAD_DIM, True, HEAD_DIM < BLOCK_D)
        if NEGATE:
            q_block = -q_block
    else:
        q_block = q_tile  # loaded chunk by chunk in every step
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    left = rows + low
    right = rows + high
    seed, offset = philox_state(seed_at, offset_at, seed, offset)
    index = first_index(offset, batch, head, heads, rows, most_q, most_k)
    crosses = crosses_quads(offset, most_k)
    if HAS_LEFT:
        acc, peak, total = _steps(
            acc, peak, total, q_block, k_tile, v_tile, mask, bias, begin, full_begin,
            q_step, k_l * UNIT, k_step, v_l * UNIT, mask_k, bias_k, left, right, first,
            beyond, rows_seen, scale, index, crosses, seed, threshold,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK_D, True, HAS_LEFT, HAS_RIGHT,
            MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, NEGATE, DROPOUT,
        )  # fmt: skip
    acc, peak, total = _steps(
        acc, peak, total, q_block, k_tile, v_tile, mask, bias, full_begin, full_end,
        q_step, k_l * UNIT, k_step, v_l * UNIT, mask_k, bias_k, left, right, first,
        beyond, rows_seen, scale, index, crosses, seed, threshold,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK_D, False, HAS_LEFT, HAS_RIGHT,
        MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, NEGATE, DROPOUT,
    )  # fmt: skip
    acc, peak, total = _steps(
        acc, peak, total, q_block, k_tile, v_tile, mask, bias, full_end, end,
        q_step, k_l * UNIT, k_step, v_l * UNIT, mask_k, bias_k, left, right, first,
        beyond, rows_seen, scale, index, crosses, seed, threshold,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK_D, True, HAS_LEFT, HAS_RIGHT,
        MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, NEGATE, DROPOUT,
    )  # fmt: skip

    sees_none = total == 0.0
    total = tl.where(sees_none, 1.0, total)
    acc = acc / total[:, None]
    if DROPOUT:
        acc = acc * keep_scale
    if BIAS_MODE > 0:
        log_sum = peak + tl.log2(total) * _LN_2
    else:
        log_sum = (peak + tl.log2(total)) * _LN_2
    log_sum = tl.where(sees_none, float("-inf"), log_sum)
    tl.store(lse + (row_of_all + rows_at), log_sum, mask=rows_seen)
    out += batch_q * (out_b * UNIT) + head * (out_h * UNIT)
    out_tile = out + (rows_at[:, None] * (out_l * UNIT) + dims_v[None, :])
    stored = rows_seen[:, None]
    if HEAD_DIM_V < BLOCK_DV:
        stored = stored & (dims_v < HEAD_DIM_V)[None, :]
    tl.store(out_tile, acc.to(out.dtype.element_ty), mask=stored)
