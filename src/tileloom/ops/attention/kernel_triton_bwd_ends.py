"""What runs before and after the Hopper attention backward.

    before:  statistic = -LSE / scale,  -delta = dLSE - rowsum(dO * O),  buffer = 0
    after:   dQ = scale * buffer, from the order of fragments into rows

Rows past the last query, and rows that see no key, get the statistic -inf, so that P is 0. The
buffer is float32 `[B * Hq, Lq rounded up to BLOCK, D rounded up]`, in pieces of 64 rows; inside a
piece in the order of `pieces_gluon_sm90_bwd.fragment_order`.

Bytes moved: O and dO once, the buffer written once before; read once after, and dQ written once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_bwd_before_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, statistic_ptr, delta_ptr, buffer_ptr, scale, heads,
    len_q, padded_q, head_dim, out_batch, out_head, out_row, dout_batch, dout_head, dout_row,
    dout_column, HAS_DLSE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks = padded_q // ROWS
    index = tl.program_id(0) // blocks
    i = (tl.program_id(0) - index * blocks) * ROWS + tl.arange(0, ROWS)
    batch = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    c = tl.arange(0, D)
    row = i.to(tl.int64)[:, None]
    shown = (i < len_q)[:, None] & (c < head_dim)[None, :]
    at = out_ptr + batch * out_batch + head * out_head
    o = tl.load(at + (row * out_row + c[None, :]), mask=shown, other=0.0)
    at = dout_ptr + batch * dout_batch + head * dout_head
    do = tl.load(
        at + (row * dout_row + c[None, :].to(tl.int64) * dout_column), mask=shown, other=0.0
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    line = index.to(tl.int64) * len_q + i
    lse = tl.load(lse_ptr + line, mask=i < len_q, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line, mask=i < len_q, other=0.0)
    is_empty = lse == float("-inf")
    padded = index.to(tl.int64) * padded_q + i
    tl.store(statistic_ptr + padded, tl.where(is_empty, float("-inf"), -lse / scale))
    tl.store(delta_ptr + padded, tl.where(is_empty, 0.0, -delta))
    flat = tl.program_id(0).to(tl.int64) * (ROWS * D)
    tl.store(buffer_ptr + (flat + tl.arange(0, ROWS * D)), tl.zeros([ROWS * D], tl.float32))


@triton.jit
def attention_bwd_after_kernel(
    buffer_ptr, dq_ptr, scale, heads, len_q, padded_q, head_dim, dq_batch, dq_head, dq_row,
    D: tl.constexpr,
):  # fmt: skip
    """One piece of 64 rows, 64 columns of it: read as it lies, put in order between threads."""
    PARTS: tl.constexpr = D // 64
    piece = tl.program_id(0) // PARTS
    part = tl.program_id(0) - piece * PARTS
    blocks = padded_q // 64
    index = piece // blocks
    x = tl.load(buffer_ptr + (tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)))
    x = (x * scale).to(dq_ptr.dtype.element_ty)
    x = tl.reshape(x, [4, 4, 2, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 2, 3, 0, 5, 4, 6]), [64, 64])
    i = (piece - index * blocks) * 64 + tl.arange(0, 64)[:, None]
    c = part * 64 + tl.arange(0, 64)[None, :]
    batch = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    at = dq_ptr + batch * dq_batch + head * dq_head + (i.to(tl.int64) * dq_row + c)
    tl.store(at, x, mask=(i < len_q) & (c < head_dim))
