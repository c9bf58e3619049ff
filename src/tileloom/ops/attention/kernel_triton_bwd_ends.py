"""What runs before and after the Hopper attention backward.

    before:  statistic = -LSE / unit,  -delta = dLSE - rowsum(dO * O),  buffer = 0
    after:   dQ = scale * buffer, from the order of fragments into rows

The unit is the scale, or ln 2 where the main kernel adds the statistic to an exponent of 2. Rows
past the last query, and rows that see no key, get the statistic -inf, so that P is 0. The
buffer is float32 `[B * Hq, Lq rounded up to BLOCK, D rounded up]`, in pieces of 64 rows; inside a
piece in the order of `pieces_gluon_sm90_bwd.fragment_order`.

Packed sequences: the buffer has the order of `pieces_packed.row_of_place`.

Strides and the head dim come in units of 8 elements, so that the compiler knows that they are
multiples of 16 bytes; no integer is specialised, and one compiled kernel takes every size.

Launched with `launch_pdl`, as the main kernel is too: each begins while the one ahead ends, and
waits for it (`gdc_wait`) before it touches memory.

Bytes moved: O and dO once, the buffer written once before; read once after, and dQ written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileloom.ops.attention.pieces_packed import row_of_place

INT32_ARGUMENTS = ("heads", "len_q", "blocks", "head_dim_8", "sequences", "total_q")
INT64_BEFORE = ("out_batch", "out_head", "out_row", "dout_batch", "dout_head", "dout_row")
INT64_AFTER = ("dq_batch", "dq_head", "dq_row")


@triton.jit(do_not_specialize=("unit", *INT32_ARGUMENTS, *INT64_BEFORE))
def attention_bwd_before_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, statistic_ptr, delta_ptr, buffer_ptr, unit,
    heads: tl.int32, len_q: tl.int32, blocks: tl.int32, head_dim_8: tl.int32,
    cu_q, sequences: tl.int32, total_q: tl.int32,
    out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
    dout_batch: tl.int64, dout_head: tl.int64, dout_row: tl.int64,
    HAS_DLSE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head, which has `blocks` times as many; `head_dim_8` is that of O."""
    gdc_launch_dependents()
    gdc_wait()
    index = tl.program_id(0) // blocks
    place = (tl.program_id(0) - index * blocks) * ROWS
    batch = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    line_0 = index.to(tl.int64) * len_q
    if cu_q is not None:
        first, len_q, place = row_of_place(place, cu_q, sequences, total_q, len_q, BLOCK)
        batch = first.to(tl.int64)
        line_0 = index.to(tl.int64) * total_q + first
    i = place + tl.arange(0, ROWS)
    is_row = (i >= 0) & (i < len_q)
    c = tl.arange(0, D_V)
    row = i.to(tl.int64)[:, None]
    shown = is_row[:, None] & (c < head_dim_8 * 8)[None, :]
    at = out_ptr + (batch * out_batch + head * out_head) * 8
    o = tl.load(at + (row * out_row * 8 + c[None, :]), mask=shown, other=0.0)
    at = dout_ptr + (batch * dout_batch + head * dout_head) * 8
    do = tl.load(at + (row * dout_row * 8 + c[None, :]), mask=shown, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    line = line_0 + i
    lse = tl.load(lse_ptr + line, mask=is_row, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line, mask=is_row, other=0.0)
    is_empty = lse == float("-inf")
    padded = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(statistic_ptr + padded, tl.where(is_empty, float("-inf"), -lse / unit))
    tl.store(delta_ptr + padded, tl.where(is_empty, 0.0, -delta))
    flat = tl.program_id(0).to(tl.int64) * (ROWS * D)
    for part in tl.static_range(D // 64):
        numbers = part * (ROWS * 64) + tl.arange(0, ROWS * 64)
        tl.store(buffer_ptr + (flat + numbers), tl.zeros([ROWS * 64], tl.float32))


@triton.jit(do_not_specialize=("scale", *INT32_ARGUMENTS, *INT64_AFTER))
def attention_bwd_after_kernel(
    buffer_ptr, dq_ptr, scale,
    heads: tl.int32, len_q: tl.int32, blocks: tl.int32, head_dim_8: tl.int32,
    cu_q, sequences: tl.int32, total_q: tl.int32,
    dq_batch: tl.int64, dq_head: tl.int64, dq_row: tl.int64, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One piece of 64 rows, 64 columns of it: read as it lies, put in order between threads."""
    PARTS: tl.constexpr = D // 64
    gdc_wait()
    piece = tl.program_id(0) // PARTS
    part = tl.program_id(0) - piece * PARTS
    index = piece // blocks
    x = tl.load(buffer_ptr + (tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)))
    x = (x * scale).to(dq_ptr.dtype.element_ty)
    x = tl.reshape(x, [4, 4, 2, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 2, 3, 0, 5, 4, 6]), [64, 64])
    place = (piece - index * blocks) * 64
    batch = (index // heads).to(tl.int64)
    if cu_q is not None:
        first, len_q, place = row_of_place(place, cu_q, sequences, total_q, len_q, BLOCK)
        batch = first.to(tl.int64)
    i = place + tl.arange(0, 64)[:, None]
    c = part * 64 + tl.arange(0, 64)[None, :]
    head = (index % heads).to(tl.int64)
    at = dq_ptr + (batch * dq_batch + head * dq_head) * 8
    shown = (i >= 0) & (i < len_q) & (c < head_dim_8 * 8)
    tl.store(at + (i.to(tl.int64) * dq_row * 8 + c), x, mask=shown)
