"""Attention backward in portable Triton (sm_80 and later): dK and dV by key blocks, dQ by rows.

With P = exp(S - LSE), which no one stored, and delta = rowsum(dO * O) - dLSE:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)
    dQ = scale * dS K  dK = scale * dS^T Q

With dropout, and Z = 1 / (1 - p) where a score is kept, else 0: dV = (P * Z)^T dO, dP = Z * dO V^T;
Z comes from the same random numbers as in the forward (`pieces_philox.py`).

Two kernels, so that each program owns what it writes: no atomics, the same bits in every run. One
program of the first has a block of keys and goes over the rows of all query heads of its group; one
of the second has a block of rows and goes over its keys. Both compute S and dP: 7 products where 5
would do. Above head dim 256 the first kernel runs twice, for dV and for dK, since no program has
the registers for both: 8 products.

Tile picture: for a block of rows it is the forward's (`kernel_triton.py`). For a block of keys:

    |  hidden  | cut by right bound | sees every key | cut by left bound |  hidden  |   rows
    0        begin              full_begin        full_end              end

Blocks outside begin..end are never loaded.

Hidden keys reach no gradient, NaN or not: in the first kernel a key is a row of S^T and of what is
written, so selecting there is enough; in the second, keys that no row of the tile sees are loaded
as 0. A row that sees no key has LSE -inf, read as +inf: P = 0.

The gradient of a bias with an entry for each score is dS itself, and the second kernel writes it;
`kernel_triton_bwd_bias.py` has the gradients of biases that broadcast.

Bytes moved: the first kernel reads K and V once and Q, dO once for each block of keys, the second
the other way round; from L2, mostly, since the blocks of a head run side by side.

Of packed sequences a block has the rows of one, found by its number (`pieces_packed.py`); the batch
in an address is then the sequence's first row.

Offsets and units of strides are as in `kernel_triton.py`.
"""

import triton
import triton.language as tl

from tileloom.ops.attention.pieces_packed import block_of
from tileloom.ops.attention.pieces_philox import (
    crosses_quads,
    first_index,
    keep_tile,
    philox_state,
)
from tileloom.ops.attention.pieces_triton_bwd import (
    add_product,
    band_of,
    chunked_product,
    key_range,
    keys_of,
    load_rows,
    load_tile,
    row_range,
    scores_of,
    tile_at,
    weigh,
)

INT64_ARGUMENTS = (
    *("q_b", "q_h", "q_l", "q_d", "k_b", "k_h", "k_l", "k_d", "v_b", "v_h", "v_l", "v_d"),
    *("do_b", "do_h", "do_l", "out_b", "out_h", "out_l", "dlse_b", "dlse_h", "dlse_l"),
    *("mask_b", "mask_h", "mask_q", "mask_k", "bias_b", "bias_h", "bias_q", "bias_k"),
    *("dq_b", "dq_h", "dq_l", "dk_b", "dk_h", "dk_l", "dv_b", "dv_h", "dv_l"),
    *("dbias_b", "dbias_h", "dbias_l", "lengths_b"),
    *("left_top", "right_top", "left_bottom", "right_bottom", "seed", "offset", "threshold"),
)
INT32_ARGUMENTS = (
    *("heads", "group", "tiles", "len_q", "len_k", "sequences", "total_q", "total_k"),
)


@triton.jit
def _dkv_steps(
    dk, dv, k, v, q, do, q_wide, do_wide, lse, delta, weight, mask, bias,
    begin, full_begin, full_end, end, columns, n, len_q, most_k, low, high, q_l, do_l,
    q_step, k_step, v_step, mask_q, mask_k, bias_q, bias_k, scale,
    head_index, key_first, crosses, seed, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK_D: tl.constexpr, CHUNK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK_MODE: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BIAS_MODE: tl.constexpr, BIAS_VECTOR: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take the row blocks `begin .. end` of one query head.

    `q`, `do`, `lse`, ... point at row block 0; `k` and `v` are the blocks themselves, or point at
    their first CHUNK columns. `head_index` is the place of the head's first score in dropout's
    random numbers, `most_k` how many of them each row has.
    """
    BLOCK_N: tl.constexpr = columns.shape[0]
    HIDES: tl.constexpr = MASK_MODE > 0 or BIAS_MODE > 0
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    keys_seen = columns < n
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        there = rows < len_q
        is_cut = (start < full_begin) | (start >= full_end)
        at = tl.cast(start, tl.int64)
        shift, change, factor = load_rows(lse, delta, weight, rows.to(tl.int64), there, WEIGHTED)
        if CHUNK_D == BLOCK_D:
            q_block = load_tile(q_wide + at * q_l, there, dims < HEAD_DIM, True, HEAD_DIM < BLOCK_D)
            s = tl.dot(k, tl.trans(q_block), input_precision="ieee")
        else:
            s = chunked_product(
                k, q + at * q_l, k_step, q_step, keys_seen, there, HEAD_DIM, BLOCK_D, CHUNK_D
            )
        if CHUNK_DV == BLOCK_DV:
            do_block = load_tile(
                do_wide + at * do_l, there, dims_v < HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV
            )
        if HAS_DK and CHUNK_DV == BLOCK_DV:
            dp = tl.dot(v, tl.trans(do_block), input_precision="ieee")
        elif HAS_DK:
            dp = chunked_product(
                v, do + at * do_l, v_step, 1, keys_seen, there, HEAD_DIM_V, BLOCK_DV, CHUNK_DV
            )
        p, visible = weigh(
            s, rows[None, :], columns[:, None], there[None, :], keys_seen[:, None], is_cut,
            low, high, shift[None, :], factor[None, :], mask, bias, mask_q, mask_k,
            bias_q, bias_k, scale, HAS_LEFT or HAS_RIGHT, HAS_LEFT, HAS_RIGHT,
            MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, WEIGHTED,
        )  # fmt: skip
        if DROPOUT:
            index = head_index + rows.to(tl.int64) * most_k
            kept = keep_tile(index, key_first, crosses, seed, threshold, BLOCK_N, True)
        if HAS_DV:
            if CHUNK_DV < BLOCK_DV:
                do_block = load_tile(
                    do_wide + at * do_l, there, dims_v < HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV
                )
            if DROPOUT:
                dv = add_product(dv, tl.where(kept, p, 0.0), do_block)
            else:
                dv = add_product(dv, p, do_block)
        if HAS_DK:
            if DROPOUT:
                dp = tl.where(kept, dp * keep_scale, 0.0)
            ds = p * (dp - change[None, :])
            if HIDES:
                ds = tl.where(visible, ds, 0.0)
            if CHUNK_D < BLOCK_D:
                q_block = load_tile(
                    q_wide + at * q_l, there, dims < HEAD_DIM, True, HEAD_DIM < BLOCK_D
                )
            dk = add_product(dk, ds, q_block)
    return dk, dv


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def attention_dkv_kernel(
    do, q, k, v, lse, delta, weight, mask, bias, lengths, seed_at, offset_at, dk, dv,
    scale, scale_out, keep_scale,
    do_b: tl.int64, do_h: tl.int64, do_l: tl.int64,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_l: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_l: tl.int64,
    dv_b: tl.int64, dv_h: tl.int64, dv_l: tl.int64, lengths_b: tl.int64,
    heads: tl.int32, group: tl.int32, tiles: tl.int32, len_q: tl.int32, len_k: tl.int32,
    cu_q, cu_k, sequences: tl.int32, total_q: tl.int32, total_k: tl.int32,
    left_top: tl.int64, right_top: tl.int64, left_bottom: tl.int64, right_bottom: tl.int64,
    seed: tl.int64, offset: tl.int64, threshold: tl.int64,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK_D: tl.constexpr, CHUNK_DV: tl.constexpr,
    VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr,
    MASK_MODE: tl.constexpr, BIAS_MODE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV, or one of them, of BLOCK_N keys of one key head, by steps of BLOCK_M."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    head_all = program // tiles
    heads_kv = heads // group
    batch = tl.cast(head_all // heads_kv, tl.int64)
    head_kv = head_all % heads_kv
    block = program % tiles
    most_q = len_q
    most_k = len_k
    if cu_q is None:
        batch_q = batch
        batch_k = batch
        rows_of_head = tl.cast(len_q, tl.int64)
        row_of_all = batch * heads * rows_of_head
    else:
        batch, block, batch_k, len_k, batch_q, len_q = block_of(
            block, cu_k, cu_q, sequences, total_k, total_q, len_k, len_q, BLOCK_N, False
        )
        rows_of_head = tl.cast(total_q, tl.int64)
        row_of_all = batch_q
    key_first = block * BLOCK_N
    n = keys_of(lengths, batch, lengths_b, len_k, HAS_LENGTHS)
    low, high = band_of(n, len_q, len_k, left_top, right_top, left_bottom, right_bottom)
    begin, full_begin, full_end, end = row_range(
        key_first, n, len_q, low, high, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )

    columns = key_first + tl.arange(0, BLOCK_N)
    keys_seen = columns < n
    keys_at = columns.to(tl.int64)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    wide = tl.arange(0, BLOCK_D).to(tl.int64)
    wide_v = tl.arange(0, BLOCK_DV).to(tl.int64)
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
    k += batch_k * (k_b * UNIT) + head_kv * (k_h * UNIT)
    v += batch_k * (v_b * UNIT) + head_kv * (v_h * UNIT)
    k_block = tile_at(k, keys_at, narrow, k_l, k_d, VECTOR)
    v_block = tile_at(v, keys_at, narrow_v, v_l, v_d, VECTOR)
    if CHUNK_D == BLOCK_D:
        k_block = load_tile(k_block, keys_seen, narrow < HEAD_DIM, True, HEAD_DIM < BLOCK_D)
    if CHUNK_DV == BLOCK_DV:
        v_block = load_tile(v_block, keys_seen, narrow_v < HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV)

    seed, offset = philox_state(seed_at, offset_at, seed, offset)
    crosses = crosses_quads(offset, most_k)
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group):
        head = tl.cast(head_kv * group + member, tl.int64)
        row_of_head = row_of_all + head * rows_of_head
        q_head = q + (batch_q * (q_b * UNIT) + head * (q_h * UNIT))
        do_head = do + (batch_q * (do_b * UNIT) + head * (do_h * UNIT))
        q_tile = tile_at(q_head, rows, narrow, q_l, q_d, VECTOR)
        q_wide = tile_at(q_head, rows, wide, q_l, q_d, VECTOR)
        do_tile = do_head + (rows[:, None] * (do_l * UNIT) + narrow_v[None, :])
        do_wide = do_head + (rows[:, None] * (do_l * UNIT) + wide_v[None, :])
        mask_head = scores_of(mask, batch, head, mask_b, mask_h, MASK_MODE, MASK_VECTOR)
        bias_head = scores_of(bias, batch, head, bias_b, bias_h, BIAS_MODE, BIAS_VECTOR)
        weight_head = weight
        if WEIGHTED:
            weight_head = weight + row_of_head
        dk_sum, dv_sum = _dkv_steps(
            dk_sum, dv_sum, k_block, v_block, q_tile, do_tile, q_wide, do_wide,
            lse + row_of_head, delta + row_of_head, weight_head, mask_head, bias_head,
            begin, full_begin, full_end, end, columns, n, len_q, most_k, low, high,
            q_l * UNIT, do_l * UNIT, q_step, k_step, v_step, mask_q, mask_k, bias_q, bias_k, scale,
            offset + (batch * heads + head) * most_q * most_k,
            key_first, crosses, seed, threshold, keep_scale,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, CHUNK_D, CHUNK_DV,
            HAS_LEFT, HAS_RIGHT, MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, WEIGHTED,
            HAS_DK, HAS_DV, DROPOUT,
        )  # fmt: skip

    # Keys that no row sees have no gradient, whatever was summed for them.
    seen = keys_seen
    if HAS_RIGHT:
        seen = seen & (columns < len_q + high)
    if HAS_LEFT:
        seen = seen & (columns >= low)
    stored = (columns < len_k)[:, None]
    if HAS_DK:
        dk += batch_k * (dk_b * UNIT) + head_kv * (dk_h * UNIT)
        dk_tile = dk + (keys_at[:, None] * (dk_l * UNIT) + wide[None, :])
        dk_sum = tl.where(seen[:, None], dk_sum * scale_out, 0.0).to(dk.dtype.element_ty)
        tl.store(dk_tile, dk_sum, mask=stored & (wide < HEAD_DIM)[None, :])
    if HAS_DV:
        dv += batch_k * (dv_b * UNIT) + head_kv * (dv_h * UNIT)
        dv_tile = dv + (keys_at[:, None] * (dv_l * UNIT) + wide_v[None, :])
        dv_sum = tl.where(seen[:, None], dv_sum * keep_scale, 0.0).to(dv.dtype.element_ty)
        tl.store(dv_tile, dv_sum, mask=stored & (wide_v < HEAD_DIM_V)[None, :])


@triton.jit
def _dq_steps(
    dq, q, do, k, v, k_wide, dbias, mask, bias, begin, full_begin, full_end, end, rows, rows_seen,
    first, beyond, low, high, shift, change, factor, k_l, v_l, q_step, k_step, v_step,
    mask_q, mask_k, bias_q, bias_k, scale, index, crosses, seed, threshold, keep_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK_D: tl.constexpr, CHUNK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASK_MODE: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BIAS_MODE: tl.constexpr, BIAS_VECTOR: tl.constexpr, WEIGHTED: tl.constexpr,
    BIAS_GRAD: tl.constexpr, HAS_DQ: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take the key blocks `begin .. end`.

    `k`, `v` and `dbias` point at key block 0; `q` and `do` are the blocks themselves, or point at
    their first CHUNK columns. `index` has the place of each row's key 0 in dropout's random
    numbers.
    """
    HIDES: tl.constexpr = MASK_MODE > 0 or BIAS_MODE > 0
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        at = tl.cast(start, tl.int64)
        seen = (columns >= first) & (columns < beyond)
        is_cut = (start < full_begin) | (start >= full_end)
        if CHUNK_D == BLOCK_D:
            k_block = load_tile(k_wide + at * k_l, seen, dims < HEAD_DIM, True, HEAD_DIM < BLOCK_D)
            s = tl.dot(q, tl.trans(k_block), input_precision="ieee")
        else:
            s = chunked_product(
                q, k + at * k_l, q_step, k_step, rows_seen, seen, HEAD_DIM, BLOCK_D, CHUNK_D
            )
        if CHUNK_DV == BLOCK_DV:
            v_block = load_tile(
                v + at * v_l, seen, dims_v < HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV
            )
            dp = tl.dot(do, tl.trans(v_block), input_precision="ieee")
        else:
            dp = chunked_product(
                do, v + at * v_l, 1, v_step, rows_seen, seen, HEAD_DIM_V, BLOCK_DV, CHUNK_DV
            )
        p, visible = weigh(
            s, rows[:, None], columns[None, :], rows_seen[:, None], seen[None, :], is_cut,
            low, high, shift[:, None], factor[:, None], mask, bias, mask_q, mask_k,
            bias_q, bias_k, scale, True, HAS_LEFT, HAS_RIGHT,
            MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, WEIGHTED,
        )  # fmt: skip
        if DROPOUT:
            kept = keep_tile(index, start, crosses, seed, threshold, BLOCK_N, False)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - change[:, None])
        if HIDES:
            ds = tl.where(visible, ds, 0.0)
            seen = tl.max(visible.to(tl.int32), 0) != 0
        if BIAS_GRAD:
            rounded = ds.to(dbias.dtype.element_ty)
            if is_cut:
                tl.store(dbias + at, rounded, mask=rows_seen[:, None] & (columns < beyond)[None, :])
            else:
                tl.store(dbias + at, rounded, mask=rows_seen[:, None])
        if HAS_DQ:
            if HIDES or CHUNK_D < BLOCK_D:
                k_block = load_tile(
                    k_wide + at * k_l, seen, dims < HEAD_DIM, True, HEAD_DIM < BLOCK_D
                )
            dq = add_product(dq, ds, k_block)
    return dq


@triton.jit(do_not_specialize=(*INT64_ARGUMENTS, *INT32_ARGUMENTS))
def attention_dq_kernel(
    do, q, k, v, lse, delta, weight, mask, bias, lengths, seed_at, offset_at, dq, dbias,
    scale, scale_out, keep_scale,
    do_b: tl.int64, do_h: tl.int64, do_l: tl.int64,
    q_b: tl.int64, q_h: tl.int64, q_l: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_l: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_l: tl.int64, v_d: tl.int64,
    mask_b: tl.int64, mask_h: tl.int64, mask_q: tl.int64, mask_k: tl.int64,
    bias_b: tl.int64, bias_h: tl.int64, bias_q: tl.int64, bias_k: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_l: tl.int64, dbias_l: tl.int64, lengths_b: tl.int64,
    heads: tl.int32, group: tl.int32, tiles: tl.int32, len_q: tl.int32, len_k: tl.int32,
    cu_q, cu_k, sequences: tl.int32, total_q: tl.int32, total_k: tl.int32,
    left_top: tl.int64, right_top: tl.int64, left_bottom: tl.int64, right_bottom: tl.int64,
    seed: tl.int64, offset: tl.int64, threshold: tl.int64,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK_D: tl.constexpr, CHUNK_DV: tl.constexpr,
    VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr,
    DBIAS_VECTOR: tl.constexpr, MASK_MODE: tl.constexpr, BIAS_MODE: tl.constexpr,
    BIAS_GRAD: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, WEIGHTED: tl.constexpr, HAS_DQ: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M rows of one head, and with BIAS_GRAD their rows of dS."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    head_all = program // tiles
    tile = program % tiles
    batch = tl.cast(head_all // heads, tl.int64)
    head = tl.cast(head_all % heads, tl.int64)
    head_kv = head // group
    most_q = len_q
    most_k = len_k
    if cu_q is None:
        if HAS_RIGHT:
            tile = tiles - 1 - tile  # those with the most keys first
        batch_q = batch
        batch_k = batch
        row_of_all = tl.cast(head_all, tl.int64) * len_q
        row_of_bias = row_of_all
    else:
        batch, tile, batch_q, len_q, batch_k, len_k = block_of(
            tile, cu_q, cu_k, sequences, total_q, total_k, len_q, len_k, BLOCK_M, HAS_RIGHT
        )
        row_of_all = head * total_q + batch_q
        row_of_bias = (batch * heads + head) * most_q
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
    keys = tl.arange(0, BLOCK_N).to(tl.int64)
    wide = tl.arange(0, BLOCK_D).to(tl.int64)
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
    q += batch_q * (q_b * UNIT) + head * (q_h * UNIT)
    k += batch_k * (k_b * UNIT) + head_kv * (k_h * UNIT)
    v += batch_k * (v_b * UNIT) + head_kv * (v_h * UNIT)
    do += batch_q * (do_b * UNIT) + head * (do_h * UNIT)
    k_tile = tile_at(k, keys, narrow, k_l, k_d, VECTOR)
    k_wide = tile_at(k, keys, wide, k_l, k_d, VECTOR)
    v_tile = tile_at(v, keys, narrow_v, v_l, v_d, VECTOR)
    q_block = tile_at(q, rows_at, narrow, q_l, q_d, VECTOR)
    do_block = do + (rows_at[:, None] * (do_l * UNIT) + narrow_v[None, :])
    if CHUNK_D == BLOCK_D:
        q_block = load_tile(q_block, rows_seen, narrow < HEAD_DIM, True, HEAD_DIM < BLOCK_D)
    if CHUNK_DV == BLOCK_DV:
        do_block = load_tile(
            do_block, rows_seen, narrow_v < HEAD_DIM_V, True, HEAD_DIM_V < BLOCK_DV
        )
    shift, change, factor = load_rows(lse, delta, weight, row_of_all + rows_at, rows_seen, WEIGHTED)
    mask = scores_of(mask, batch, head, mask_b, mask_h, MASK_MODE, MASK_VECTOR)
    bias = scores_of(bias, batch, head, bias_b, bias_h, BIAS_MODE, BIAS_VECTOR)
    if BIAS_GRAD:
        dbias = dbias + (row_of_bias + rows_at)[:, None] * (dbias_l * DBIAS_VECTOR) + keys[None, :]

    seed, offset = philox_state(seed_at, offset_at, seed, offset)
    index = first_index(offset, batch, head, heads, rows, most_q, most_k)
    dq_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq_sum = _dq_steps(
        dq_sum, q_block, do_block, k_tile, v_tile, k_wide, dbias, mask, bias,
        begin, full_begin, full_end, end, rows, rows_seen, first, beyond, low, high,
        shift, change, factor, k_l * UNIT, v_l * UNIT, q_step, k_step, v_step,
        mask_q, mask_k, bias_q, bias_k, scale,
        index, crosses_quads(offset, most_k), seed, threshold, keep_scale,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, CHUNK_D, CHUNK_DV,
        HAS_LEFT, HAS_RIGHT, MASK_MODE, MASK_VECTOR, BIAS_MODE, BIAS_VECTOR, WEIGHTED, BIAS_GRAD,
        HAS_DQ, DROPOUT,
    )  # fmt: skip

    if HAS_DQ:
        dq += batch_q * (dq_b * UNIT) + head * (dq_h * UNIT)
        dq_tile = dq + (rows_at[:, None] * (dq_l * UNIT) + wide[None, :])
        stored = rows_seen[:, None] & (wide < HEAD_DIM)[None, :]
        tl.store(dq_tile, (dq_sum * scale_out).to(dq.dtype.element_ty), mask=stored)
