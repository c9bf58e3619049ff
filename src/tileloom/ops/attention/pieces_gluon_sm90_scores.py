"""Bias and bool mask on a tile of transposed scores `[keys, queries]`, for the Hopper backward.

    P^T = exp(scale S^T + bias - LSE);   dbias = dS, summed to its shape

Both come in one of these modes, a constant of the kernel; a bias's gradient has modes of its own:

    NONE      there is none
    KEYS      one number for each key (the stride of queries is 0), from global memory
    TILE      `[queries, keys]` by TMA; ldmatrix turns it over on the way to the registers
    ANYWHERE  any strides, number by number from global memory

Packed sequences know only KEYS and ANYWHERE: TMA begins at multiples of 16 bytes, their blocks
anywhere. Rows and keys before a sequence are negative, and masked.

The gradient: KEYS sums dS over the queries, in registers; TILE stores dS by TMA out of the shared
memory in which dQ's product reads it, which then holds queries as rows; ANYWHERE stores numbers.
Each number has one writer, and sums have one order.

A key that a -inf or the mask hides gets the weight 0 by selection, whatever K and V hold for it.

Who waits for whom, beside the barriers of the kernel (mbarriers, by phase; counts in brackets):
    score_full[s]   (1)         producer's TMA -> readers: the tiles of bias and mask of slot s
    score_empty[s]  (readers)   every thread that reads them -> producer: slot s may be filled again
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tileloom.device.barriers import arrive_each_thread
from tileloom.device.compat import tma_load
from tileloom.ops.attention.pieces_gluon_sm90 import slot_of
from tileloom.ops.attention.pieces_gluon_sm90_bwd import (
    clear_outside,
    columns_start,
    following,
)

NONE = gl.constexpr(0)
KEYS = gl.constexpr(1)
TILE = gl.constexpr(2)
ANYWHERE = gl.constexpr(3)

LOG2E = gl.constexpr(1.4426950408889634)
_MIN_FLOAT32 = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def score_memory(
    bias, mask, SLOTS: gl.constexpr, BOXES: gl.constexpr, BLOCK_M: gl.constexpr,
    READERS: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Shared memory for tiles of bias and mask, and their barriers.

    BOXES tiles of 64 keys in each of SLOTS slots; what a mode does not need is 0.
    """
    bias_smem = 0
    mask_smem = 0
    full = 0
    empty = 0
    if BIAS == TILE:
        bias_smem = gl.allocate_shared_memory(
            bias.dtype, [SLOTS * BOXES, 1, 1, BLOCK_M, 64], bias.layout
        )
    if MASK == TILE:
        mask_smem = gl.allocate_shared_memory(
            gl.uint8, [SLOTS * BOXES, 1, 1, BLOCK_M, 64], mask.layout
        )
    if BIAS == TILE or MASK == TILE:
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=READERS)
    return bias_smem, mask_smem, full, empty


@gluon.jit
def _fetch(source, smem, full, first, head, row, key, BOXES: gl.constexpr):
    desc, at_batch, step_h, _q, _k = source
    at_head = head * step_h.to(gl.int32)
    for w in gl.static_range(BOXES):
        at = [at_batch.to(gl.int32), at_head, row, key + 64 * w]
        tma_load(desc, at, full, smem.index(first + w))


@gluon.jit
def fetch_scores(
    bias, mask, scores, j, head, row, key, BOXES: gl.constexpr, BIAS: gl.constexpr,
    MASK: gl.constexpr,
):  # fmt: skip
    """Load the tiles of step j by TMA; a dimension that broadcasts has the step 0, others 1."""
    bias_smem, mask_smem, full, empty = scores
    SLOTS: gl.constexpr = full.type.shape[0]
    slot, phase = slot_of(j, SLOTS)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    BIAS_BYTES: gl.constexpr = bias[0].block_type.nbytes if BIAS == TILE else 0
    MASK_BYTES: gl.constexpr = mask[0].block_type.nbytes if MASK == TILE else 0
    mbarrier.expect(full.index(slot), BOXES * (BIAS_BYTES + MASK_BYTES))
    if BIAS == TILE:
        _fetch(bias, bias_smem, full.index(slot), slot * BOXES, head, row, key, BOXES)
    if MASK == TILE:
        _fetch(mask, mask_smem, full.index(slot), slot * BOXES, head, row, key, BOXES)


@gluon.jit
def keys_first(tile, DBIAS: gl.constexpr):
    """dS^T `[keys, queries]` in shared memory, which lies as dS where TMA writes it to dbias."""
    if DBIAS == TILE:
        QUERIES: gl.constexpr = tile.type.shape[2]
        return tile.reshape([QUERIES, 64]).permute((1, 0))
    else:
        return tile


@gluon.jit
def first_number(source, batch, key, stride_b, stride_k, MODE: gl.constexpr):
    """Point at the block's keys in the first head and row, where numbers are loaded one by one."""
    if MODE == KEYS or MODE == ANYWHERE:
        return source + (batch.to(gl.int64) * stride_b + key.to(gl.int64) * stride_k)
    else:
        return source


@gluon.jit
def first_gradient(target, head_all, key, len_q, len_k, MODE: gl.constexpr):
    """`first_number` of what a bias's gradient is written to, contiguous."""
    rows = len_q if MODE == ANYWHERE else 1
    return first_number(target, head_all, key, len_k.to(gl.int64) * rows, 1, MODE)


@gluon.jit
def _places(
    first, key, row, len_q, len_k, stride_q, stride_k, QUERIES: gl.constexpr, LAYOUT: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Offsets of `[64, QUERIES / 8, 8]` numbers, and which are there; keys are counted from `key`.

    Query 8 a + b: `a` counts registers, so that what depends on it is no thread's own.
    """
    k = first + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    a = gl.arange(0, QUERIES // 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    k = gl.expand_dims(gl.expand_dims(k, 1), 2)
    a = gl.expand_dims(gl.expand_dims(8 * a, 0), 2)
    b = gl.expand_dims(gl.expand_dims(b, 0), 1)
    at = (k.to(gl.int64) * stride_k + b.to(gl.int64) * stride_q) + a.to(gl.int64) * stride_q
    if PACKED:  # blocks end where sequences do
        return at, (k >= 0 - key) & (a >= 0 - row - b)
    else:
        return at, (k < len_k - key) & (a < len_q - row - b)


@gluon.jit
def _is_key(k, key, len_k, PACKED: gl.constexpr):
    """Which keys are there, counted from `key`."""
    if PACKED:
        return k >= 0 - key
    else:
        return k < len_k - key


@gluon.jit
def _numbers(
    source, smem, scores, j, head, row, key, len_q, len_k, WG: gl.constexpr, BOXES: gl.constexpr,
    MODE: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Bias or mask of step j: 64 keys and BLOCK_M queries, `[64, 1]` in mode KEYS; 0 past those."""
    if MODE == TILE:
        SLOTS: gl.constexpr = scores[2].type.shape[0]
        slot, _phase = slot_of(j, SLOTS)
        tile = smem.index(slot * BOXES + WG)
        return tile.reshape([BLOCK_M, 64]).permute((1, 0)).load(LAYOUT)
    else:
        pointer, _batch, stride_h, stride_q, stride_k = source
        pointer += head.to(gl.int64) * stride_h + row.to(gl.int64) * stride_q
        if MODE == KEYS:
            k = 64 * WG + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            at = pointer + k.to(gl.int64) * stride_k
            there = _is_key(k, key, len_k, PACKED)
            return gl.expand_dims(gl.load(at, mask=there, other=0), 1)
        else:
            whole = gl.zeros([64, BLOCK_M], gl.float32, LAYOUT).reshape([64, BLOCK_M // 8, 8])
            OWN: gl.constexpr = whole.type.layout
            at, there = _places(
                64 * WG, key, row, len_q, len_k, stride_q, stride_k, BLOCK_M, OWN, PACKED
            )
            x = gl.load(pointer + at, mask=there, other=0).reshape([64, BLOCK_M])
            return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def next_block(row, line, head, is_last, start, stop, padded_q, BLOCK_M: gl.constexpr):
    """The query block after `row`, and its head; after the last one that block again."""
    to_row, to_line = following(row, line, start, stop, padded_q, BLOCK_M)
    to_head = head + (row + BLOCK_M == stop).to(gl.int32)
    to_head = gl.where(is_last, head, to_head)
    return gl.where(is_last, row, to_row), gl.where(is_last, line, to_line), to_head


@gluon.jit
def any_large(flags, first, count):
    """Whether one of `count` tiles of rows, from `first` on, has a row with a large LSE."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    found = gl.zeros([128], gl.int32, LAYOUT)
    for start in range(0, count, 128):
        i = start + gl.arange(0, 128, LAYOUT)
        found = gl.maximum(
            found, gl.load(flags + (first.to(gl.int64) + i), mask=i < count, other=0)
        )
    return gl.max(found, 0)


@gluon.jit
def large_rows(
    flags, lse_ptr, weight_ptr, batch, first_q, kv_head, group, heads_q, len_q, sequences, total_q,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Whether a row has a large LSE, where LSE and weights are, and their step between heads.

    Of packed sequences: whether a row of any sequence has; the pointers are those of the first row.
    """
    if PACKED:
        tiles = total_q // 64 + sequences
        found = any_large(flags, kv_head.to(gl.int64) * group * tiles, group * tiles)
        first = first_q.to(gl.int64)
        return found, lse_ptr + first, weight_ptr + first, total_q
    else:
        tiles = gl.cdiv(len_q, 64)
        found = any_large(flags, (batch * heads_q + kv_head * group) * tiles, group * tiles)
        return found, lse_ptr, weight_ptr, 0


@gluon.jit
def bias_numbers(
    bias, scores, j, head, row, key, len_q, len_k, WG: gl.constexpr, BOXES: gl.constexpr,
    BIAS: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The bias of step j in float32, where what is finite stays finite."""
    b = _numbers(
        bias, scores[0], scores, j, head, row, key, len_q, len_k, WG, BOXES, BIAS, BLOCK_M,
        LAYOUT, PACKED,
    )  # fmt: skip
    own = b.to(gl.float32)
    if b.dtype == gl.float64:
        own = gl.where((b != float("-inf")) & (b < _MIN_FLOAT32), _MIN_FLOAT32, own)
    return own


@gluon.jit
def scores_start(
    statistic, scale, bias, mask, scores, j, head, row, key, len_q, len_k,
    WG: gl.constexpr, BOXES: gl.constexpr, LAYOUT: gl.constexpr, BIAS: gl.constexpr,
    MASK: gl.constexpr, SLOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Start values of S^T: (bias - LSE) / scale, -inf where bias or mask hides.

    The product is added to them. So bias and mask are read while other products run, and what
    comes after the product is the same as without them. With SLOW only what hides is in them.
    """
    BLOCK_M: gl.constexpr = statistic.type.shape[0]
    start = columns_start(statistic, 64, LAYOUT)
    if SLOW and BIAS != NONE:
        start = gl.where(start == float("-inf"), start, 0.0)
    if BIAS == TILE or MASK == TILE:
        SLOTS: gl.constexpr = scores[2].type.shape[0]
        slot, phase = slot_of(j, SLOTS)
        mbarrier.wait(scores[2].index(slot), phase)
    if BIAS != NONE:
        if not SLOW:
            b = bias_numbers(
                bias, scores, j, head, row, key, len_q, len_k, WG, BOXES, BIAS, BLOCK_M,
                LAYOUT, PACKED,
            )  # fmt: skip
            start = b * (1.0 / scale) + start
    if MASK != NONE:
        m = _numbers(
            mask, scores[1], scores, j, head, row, key, len_q, len_k, WG, BOXES, MASK,
            BLOCK_M, LAYOUT, PACKED,
        )  # fmt: skip
        start = gl.where(m != 0, start, float("-inf"))
    return start


@gluon.jit
def large_exponent(s, scale, b, large, batch, heads, head, row, len_q, PACKED: gl.constexpr):
    """Return log2 of P where the LSE of rows is large: rounded as the forward's scores were.

    The sum is rounded before LSE, which is as large, is taken away; the weight makes up for the
    logarithm that LSE has lost by its rounding (`kernel_triton_bwd_rows.py`).
    """
    _found, lse_ptr, weight_ptr, lse_step = large
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    BLOCK_M: gl.constexpr = s.shape[1]
    i = row + gl.arange(0, BLOCK_M, COLUMNS)
    if PACKED:  # of a head, LSE has all sequences
        at = head.to(gl.int64) * lse_step + i
        there = i >= 0
    else:
        at = (batch * heads + head).to(gl.int64) * len_q + i
        there = i < len_q
    lse = gl.expand_dims(gl.load(lse_ptr + at, mask=there, other=0.0), 0)
    weight = gl.expand_dims(gl.load(weight_ptr + at, mask=there, other=1.0), 0)
    x = ((s * scale + b) - lse) * LOG2E + gl.log2(weight)
    return gl.where((s == float("-inf")) | (b == float("-inf")), float("-inf"), x)


@gluon.jit
def unpoisoned(x, poison):
    """Let a poisoned key, whose `poison` is NaN and else 0, show where it is not hidden."""
    return gl.where(x == float("-inf"), x, x + poison)


@gluon.jit
def release_scores(scores, j, BIAS: gl.constexpr, MASK: gl.constexpr):
    """Give the tiles of step j back; a proxy fence stands between their loads and this."""
    if BIAS == TILE or MASK == TILE:
        SLOTS: gl.constexpr = scores[3].type.shape[0]
        slot, _phase = slot_of(j, SLOTS)
        arrive_each_thread(scores[3].index(slot))


@gluon.jit
def _without_poison(x, LAYOUT: gl.constexpr):
    """Set NaN and infinity in a tile of shared memory to 0; return NaN for its rows that had any.

    A hidden key may hold them, and its dS is 0: the product with them would be NaN. A row that is
    seen makes P, and with it all that depends on P, NaN by what is returned, which is else 0.
    """
    D: gl.constexpr = x.type.shape[1]
    KEYS_HERE: gl.constexpr = x.type.shape[0]
    found = gl.zeros([KEYS_HERE], gl.float32, gl.SliceLayout(1, LAYOUT))
    for c in gl.static_range(D // 64):
        part = x.slice(c * 64, 64, 1)
        own = part.load(LAYOUT)
        zero = own.to(gl.float32) * 0.0
        found += gl.sum(zero, 1)
        part.store(gl.where(zero == 0.0, own, 0.0))
    fence_async_shared()
    return found


@gluon.jit
def loaded_poison(k_smem, v_smem, full, key, first, last):
    """Wait for 64 keys of K and V, clear what no query sees and what is poisoned; say which were.

    Returns `[64]`, NaN for keys that held NaN or infinity, else 0.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    k = k_smem.reshape([64, k_smem.type.shape[3]])
    v = v_smem.reshape([64, v_smem.type.shape[3]])
    mbarrier.wait(full.index(0), 0)
    mbarrier.wait(full.index(1), 0)
    if (key < first) | (key + 64 > last):
        clear_outside(k, key, first, last)
        clear_outside(v, key, first, last)
    return _without_poison(k, LAYOUT) + _without_poison(v, LAYOUT)


@gluon.jit
def row_sums(ds):
    """Sum dS^T over the queries that each thread itself holds: `[64, 4]`, and no shuffle."""
    x = gl.reshape(ds.to(gl.float32), [ds.shape[0], ds.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def store_sums(target, sums, head, key, len_k, WG: gl.constexpr, PACKED: gl.constexpr):
    """Write the sums of a warpgroup's keys to float32 `[heads, Lk]`."""
    k = 64 * WG + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
    target += head.to(gl.int64) * len_k
    there = _is_key(k, key, len_k, PACKED)
    gl.store(target + k.to(gl.int64), gl.sum(sums, 1), mask=there)


@gluon.jit
def store_scores(target, ds, head, row, key, len_q, len_k, WG: gl.constexpr, PACKED: gl.constexpr):
    """Write dS^T to contiguous `[heads, Lq, Lk]`, number by number."""
    x = gl.reshape(ds, [ds.shape[0], ds.shape[1] // 8, 8])
    LAYOUT: gl.constexpr = x.type.layout
    QUERIES: gl.constexpr = ds.shape[1]
    target += (head.to(gl.int64) * len_q + row) * len_k
    at, there = _places(
        64 * WG, key, row, len_q, len_k, len_k.to(gl.int64), 1, QUERIES, LAYOUT, PACKED
    )
    gl.store(target + at, x.to(target.dtype.element_ty), mask=there)
