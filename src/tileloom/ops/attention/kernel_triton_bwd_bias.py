"""Gradient of an attention bias that broadcasts: dS, summed to the bias's own shape.

One program has a block of the gradient's elements, and goes over all that were broadcast from it:
batches, heads, row blocks and key blocks, in a fixed order, summing in float32. Nothing of the size
of the scores is stored. Where there are few such blocks, several programs share the work of one;
each writes sums of its own, and the caller adds those up.

Bytes moved: Q, K, V and dO once for each block of scores (from L2, mostly), the bias once.
"""

import triton
import triton.language as tl

from tileloom.ops.attention.kernel_triton_bwd import INT32_ARGUMENTS, INT64_ARGUMENTS
from tileloom.ops.attention.pieces_packed import rows_of
from tileloom.ops.attention.pieces_philox import (
    crosses_quads,
    first_index,
    keep_tile,
    philox_state,
)
from tileloom.ops.attention.pieces_triton_bwd import (
    band_of,
    chunked_product,
    key_range,
    keys_of,
    load_rows,
    scores_of,
    tile_at,
    weigh,
)

BIAS_ARGUMENTS = ("own_b", "own_h", "own_q", "own_k", "all_b", "all_h", "all_q", "all_k", "share")
"""Own: blocks of the gradient in each dimension; all: what one of them is summed over."""


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS, *BIAS_ARGUMENTS))
def attention_dbias_kernel(
    do, q, k, v, lse, delta, weight, mask, bias, lengths, seed_at, offset_at, dbias,
    scale, keep_scale,
    do_b: tl.int64, do_h: tl.int64, do_l: tl.int64,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_l: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64, lengths_b: tl.int64,
    heads: tl.int32, group: tl.int32, len_q: tl.int32, len_k: tl.int32,
    cu_q, cu_k, total_q: tl.int32, total_k: tl.int32,
    left_top: tl.int64, right_top: tl.int64, left_bottom: tl.int64, right_bottom: tl.int64,
    seed: tl.int64, offset: tl.int64, threshold: tl.int64,
    own_b: tl.int32, own_h: tl.int32, own_q: tl.int32, own_k: tl.int32,
    all_b: tl.int32, all_h: tl.int32, all_q: tl.int32, all_k: tl.int32, share: tl.int64,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK_D: tl.constexpr, CHUNK_DV: tl.constexpr,
    VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr,
    MASK_MODE: tl.constexpr, BIAS_MODE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SUM_ROWS: tl.constexpr, SUM_KEYS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Sum one block of the gradient, or its part `program_id(1)` of `share` blocks of scores."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    place = tl.program_id(0)
    own_key = place % own_k
    place = place // own_k
    own_row = place % own_q
    place = place // own_q
    own_head = place % own_h
    own_batch = place // own_h

    narrow = tl.arange(0, CHUNK_D).to(tl.int64)
    narrow_v = tl.arange(0, CHUNK_DV).to(tl.int64)
    if VECTOR == 0:
        q_step = q_d
        k_step = k_d
        v_step = v_d
    else:
        q_step = tl.full([], 1, tl.int64)
        k_step = tl.full([], 1, tl.int64)
        v_step = tl.full([], 1, tl.int64)
    seed, offset = philox_state(seed_at, offset_at, seed, offset)
    crosses = crosses_quads(offset, len_k)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    blocks = tl.cast(all_b, tl.int64) * all_h * all_q * all_k
    visit_first = tl.program_id(1) * share
    for visit in range(visit_first, tl.minimum(visit_first + share, blocks)):
        rest = visit // all_k
        key_first = (own_key + (visit % all_k).to(tl.int32)) * BLOCK_N
        row_first = (own_row + (rest % all_q).to(tl.int32)) * BLOCK_M
        rest = rest // all_q
        head = own_head + rest % all_h
        batch = own_batch + rest // all_h
        head_kv = head // group
        if cu_q is None:
            batch_q = batch
            batch_k = batch
            seen_q = len_q
            seen_k = len_k
            row_of_all = (batch * heads + head) * len_q
        else:
            batch_q, seen_q = rows_of(cu_q, batch, total_q, len_q)
            batch_k, seen_k = rows_of(cu_k, batch, total_k, len_k)
            batch_q = tl.cast(batch_q, tl.int64)
            batch_k = tl.cast(batch_k, tl.int64)
            row_of_all = head * total_q + batch_q
        n = keys_of(lengths, batch, lengths_b, seen_k, HAS_LENGTHS)
        low, high = band_of(n, seen_q, seen_k, left_top, right_top, left_bottom, right_bottom)
        row_last = tl.minimum(row_first + BLOCK_M, seen_q) - 1
        first, beyond, begin, full_begin, full_end, end = key_range(
            row_first, row_last, low, high, n, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        if (key_first >= begin) & (key_first < end) & (row_first < seen_q):
            rows = row_first + tl.arange(0, BLOCK_M)
            columns = key_first + tl.arange(0, BLOCK_N)
            rows_seen = rows < seen_q
            seen = (columns >= first) & (columns < beyond)
            rows_at = rows.to(tl.int64)
            keys_at = columns.to(tl.int64)
            q_head = q + (batch_q * (q_b * UNIT) + head * (q_h * UNIT))
            k_head = k + (batch_k * (k_b * UNIT) + head_kv * (k_h * UNIT))
            v_head = v + (batch_k * (v_b * UNIT) + head_kv * (v_h * UNIT))
            do_head = do + (batch_q * (do_b * UNIT) + head * (do_h * UNIT))
            s = chunked_product(
                tile_at(q_head, rows_at, narrow, q_l, q_d, VECTOR),
                tile_at(k_head, keys_at, narrow, k_l, k_d, VECTOR),
                q_step, k_step, rows_seen, seen, HEAD_DIM, BLOCK_D, CHUNK_D,
            )  # fmt: skip
            dp = chunked_product(
                do_head + (rows_at[:, None] * (do_l * UNIT) + narrow_v[None, :]),
                tile_at(v_head, keys_at, narrow_v, v_l, v_d, VECTOR),
                1, v_step, rows_seen, seen, HEAD_DIM_V, BLOCK_DV, CHUNK_DV,
            )  # fmt: skip
            at = row_of_all + rows_at
            shift, change, factor = load_rows(lse, delta, weight, at, rows_seen, True)
            mask_head = scores_of(mask, batch, head, mask_b, mask_h, MASK_MODE, MASK_VECTOR)
            bias_head = scores_of(bias, batch, head, bias_b, bias_h, BIAS_MODE, BIAS_VECTOR)
            p, visible = weigh(
                s, rows[:, None], columns[None, :], rows_seen[:, None], seen[None, :],
                (key_first < full_begin) | (key_first >= full_end), low, high,
                shift[:, None], factor[:, None], mask_head, bias_head, mask_q, mask_k,
                bias_q, bias_k, scale, True, HAS_LEFT, HAS_RIGHT,
                MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, True,
            )  # fmt: skip
            if DROPOUT:
                index = first_index(offset, batch, head, heads, rows, len_q, len_k)
                kept = keep_tile(index, key_first, crosses, seed, threshold, BLOCK_N, False)
                dp = tl.where(kept, dp * keep_scale, 0.0)
            total += tl.where(visible, p * (dp - change[:, None]), 0.0)

    rows = own_row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = own_key * BLOCK_N + tl.arange(0, BLOCK_N)
    len_rows = len_q
    len_keys = len_k
    if SUM_ROWS:
        total = tl.sum(total, 0)[None, :]
        rows = tl.zeros([1], tl.int32)
        len_rows = 1
    if SUM_KEYS:
        total = tl.sum(total, 1)[:, None]
        columns = tl.zeros([1], tl.int32)
        len_keys = 1
    line = (tl.program_id(1) * tl.cast(own_b, tl.int64) + own_batch) * own_h + own_head
    line = line * len_rows + rows.to(tl.int64)
    stored = (rows < len_rows)[:, None] & (columns < len_keys)[None, :]
    places = dbias + (line[:, None] * len_keys + columns[None, :])
    tl.store(places, total.to(dbias.dtype.element_ty), mask=stored)
