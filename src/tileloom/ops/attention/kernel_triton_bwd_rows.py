"""What the portable attention backward needs of each row: delta, and sometimes a weight for P.

    delta = rowsum(dO * O) - dLSE
    weight = 1 / sum_j exp(S_j - LSE)

The sum is 1 but for the rounding of LSE = max + log(sum) to float32. That shows in float32, and in
every precision where the maximum is so large that the logarithm is lost, as in a row whose bias is
filled with -1e9 or finfo.min. So float32 has weights of all rows (WEIGHS_ALL), and half precision
with a bias has weights of rows with a large LSE, 1 for others; tiles without such a row (nearly
all) load nothing but their LSE. Half precision without a bias has no weights.

Bytes moved: O, dO and the results once; LSE once, and Q and K as in a forward, for the weights.
"""

import triton
import triton.language as tl

from tileloom.ops.attention.kernel_triton_bwd import INT32_ARGUMENTS, INT64_ARGUMENTS
from tileloom.ops.attention.pieces_packed import block_of
from tileloom.ops.attention.pieces_triton_bwd import (
    band_of,
    chunked_product,
    key_range,
    keys_of,
    scores_of,
    tile_at,
    weigh,
)

_LARGE_LSE = tl.constexpr(4096.0)  # its rounding changes P by 2^-12 at most, below fp16's own


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def attention_delta_kernel(
    do, out, dlse, delta,
    do_b: tl.int64, do_h: tl.int64, do_l: tl.int64,
    out_b: tl.int64, out_h: tl.int64, out_l: tl.int64,
    dlse_b: tl.int64, dlse_h: tl.int64, dlse_l: tl.int64,
    heads: tl.int32, tiles: tl.int32, len_q: tl.int32,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute delta of ROWS rows of one head."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    head_all = program // tiles
    batch = tl.cast(head_all // heads, tl.int64)
    head = tl.cast(head_all % heads, tl.int64)
    rows = (program % tiles) * ROWS + tl.arange(0, ROWS)
    rows_seen = rows < len_q
    rows_at = rows.to(tl.int64)
    columns = tl.arange(0, BLOCK_DV)
    there = rows_seen[:, None] & (columns < HEAD_DIM_V)[None, :]
    do += batch * (do_b * UNIT) + head * (do_h * UNIT)
    out += batch * (out_b * UNIT) + head * (out_h * UNIT)
    do_block = tl.load(do + (rows_at[:, None] * (do_l * UNIT) + columns[None, :]), there, 0.0)
    out_block = tl.load(out + (rows_at[:, None] * (out_l * UNIT) + columns[None, :]), there, 0.0)
    total = tl.sum(do_block.to(tl.float32) * out_block.to(tl.float32), 1)
    if dlse is not None:
        at = dlse + (batch * dlse_b + head * dlse_h)
        total -= tl.load(at + rows_at * dlse_l, mask=rows_seen, other=0.0).to(tl.float32)
    tl.store(delta + tl.cast(head_all, tl.int64) * len_q + rows_at, total, mask=rows_seen)


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def attention_weight_kernel(
    q, k, lse, weight, flags, mask, bias, lengths, scale,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_l: tl.int64, k_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, lengths_b: tl.int64,
    heads: tl.int32, group: tl.int32, tiles: tl.int32, len_q: tl.int32, len_k: tl.int32,
    cu_q, cu_k, sequences: tl.int32, total_q: tl.int32, total_k: tl.int32,
    left_top: tl.int64, right_top: tl.int64, left_bottom: tl.int64, right_bottom: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK_D: tl.constexpr, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BIAS_VECTOR: tl.constexpr, MASK_MODE: tl.constexpr, BIAS_MODE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    WEIGHS_ALL: tl.constexpr,
):  # fmt: skip
    """Compute the weights of BLOCK_M rows of one head; a flag says whether one is not 1."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    head_all = program // tiles
    tile = program % tiles
    batch = tl.cast(head_all // heads, tl.int64)
    head = tl.cast(head_all % heads, tl.int64)
    head_kv = head // group
    if cu_q is None:
        batch_q = batch
        batch_k = batch
        row_of_all = tl.cast(head_all, tl.int64) * len_q
    else:
        batch, tile, batch_q, len_q, batch_k, len_k = block_of(
            tile, cu_q, cu_k, sequences, total_q, total_k, len_q, len_k, BLOCK_M, False
        )
        row_of_all = head * total_q + batch_q
    n = keys_of(lengths, batch, lengths_b, len_k, HAS_LENGTHS)
    low, high = band_of(n, len_q, len_k, left_top, right_top, left_bottom, right_bottom)
    row_first = tile * BLOCK_M
    row_last = tl.minimum(row_first + BLOCK_M, len_q) - 1
    first, beyond, begin, full_begin, full_end, end = key_range(
        row_first, row_last, low, high, n, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    rows = row_first + tl.arange(0, BLOCK_M)
    rows_seen = rows < len_q
    rows_at = rows.to(tl.int64)
    row_of_all = row_of_all + rows_at
    shift = tl.load(lse + row_of_all, mask=rows_seen, other=0.0)
    is_weighed = shift != float("-inf")
    if not WEIGHS_ALL:
        is_weighed = is_weighed & (tl.abs(shift) > _LARGE_LSE)
        found = tl.max(is_weighed.to(tl.int32), 0)
        if found == 0:
            begin = end
        if flags is not None:
            tl.store(flags + tl.cast(program, tl.int64), found)

    if VECTOR == 0:
        q_step = q_d
        k_step = k_d
    else:
        q_step = tl.full([], 1, tl.int64)
        k_step = tl.full([], 1, tl.int64)
    narrow = tl.arange(0, CHUNK_D).to(tl.int64)
    keys = tl.arange(0, BLOCK_N).to(tl.int64)
    q += batch_q * (q_b * UNIT) + head * (q_h * UNIT)
    k += batch_k * (k_b * UNIT) + head_kv * (k_h * UNIT)
    q_tile = tile_at(q, rows_at, narrow, q_l, q_d, VECTOR)
    k_tile = tile_at(k, keys, narrow, k_l, k_d, VECTOR)
    mask = scores_of(mask, batch, head, mask_b, mask_h, MASK_MODE, MASK_VECTOR)
    bias = scores_of(bias, batch, head, bias_b, bias_h, BIAS_MODE, BIAS_VECTOR)
    one = tl.full([BLOCK_M], 1.0, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        seen = (columns >= first) & (columns < beyond)
        s = chunked_product(
            q_tile, k_tile + tl.cast(start, tl.int64) * (k_l * UNIT), q_step, k_step,
            rows_seen, seen, HEAD_DIM, BLOCK_D, CHUNK_D,
        )  # fmt: skip
        p, _visible = weigh(
            s, rows[:, None], columns[None, :], rows_seen[:, None], seen[None, :],
            (start < full_begin) | (start >= full_end), low, high, shift[:, None], one[:, None],
            mask, bias, mask_q, mask_k, bias_q, bias_k, scale, True, HAS_LEFT, HAS_RIGHT,
            MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, True,
        )  # fmt: skip
        total += tl.sum(p, 1)
    value = tl.where(is_weighed & (total > 0.0), 1.0 / tl.maximum(total, 1e-37), 1.0)
    tl.store(weight + row_of_all, value, mask=rows_seen)
