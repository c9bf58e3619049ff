"""RMS and layer norm forward in portable Triton (sm_80 and later).

Mathematics, for a row h of n elements (h = x, or x + residual rounded to x's dtype: the stream):

    rms:    rstd = 1 / sqrt(sum h^2 / n + eps),            out = h * rstd * weight
    layer:  mean = sum h / n,  rstd = 1 / sqrt(sum (h - mean)^2 / n + eps),
            out = (h - mean) * rstd * weight + bias

Tile picture: one program takes ROWS whole rows of BLOCK >= n columns, keeps them in registers as
float32, and sums twice for the variance. Longer rows: `kernel_triton_split.py`.

Bytes moved: x and residual once, out and the stream once; the weight once a program, from L2.

Offsets are 64-bit: see `pieces_triton.py` for strides and their units.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_split import hold
from tileloom.ops.rowwise.pieces_triton import column_offsets, tile_pointers

INTEGERS = (
    *("count", "width_units", "size_1", "size_2"),
    *("x_0", "x_1", "x_2", "x_d", "r_0", "r_1", "r_2", "r_d", "o_0", "o_1", "o_2", "o_d"),
    *("weight_d", "bias_d"),
)


@triton.jit
def _vector(
    pointer, columns, seen, stride_d, EVEN: tl.constexpr, VECTOR: tl.constexpr, KEEP: tl.constexpr
):
    """Load the weight or bias at some columns, `[1, C]` in float32."""
    at = pointer + column_offsets(columns, stride_d, VECTOR)
    if EVEN:
        values = tl.load(at, eviction_policy=KEEP)
    else:
        values = tl.load(at, mask=seen, other=0.0)
    return values.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=INTEGERS)
def norm_fwd_kernel(
    x, residual, weight, bias, out, stream, mean, rstd, eps,
    count, width_units, size_1, size_2,
    x_0, x_1, x_2, x_d, r_0, r_1, r_2, r_d, o_0, o_1, o_2, o_d, weight_d, bias_d,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS whole rows.

    Absent tensors are None. `stream` has out's strides; `mean` and `rstd` have one float32 a row.
    EVEN says that BLOCK is n and ROWS divides the number of rows: nothing is masked.
    """
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    # Rows pass through the caches, vectors stay, and 16 bits wait for their sum as they came: on an
    # H200 1 % faster with 8192 and 16384 columns, the same with 4096, 7 % slower with 32768.
    IS_HALF: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    STREAMS: tl.constexpr = EVEN and IS_HALF and (BLOCK == 8192 or BLOCK == 16384)
    PASS: tl.constexpr = "evict_first" if STREAMS else ""
    KEEP: tl.constexpr = "evict_last" if STREAMS else ""
    width = width_units * UNIT
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    there = columns < width
    seen = (rows < count)[:, None] & there[None, :]
    at = tile_pointers(x, rows, columns, size_1, size_2, x_0, x_1, x_2, x_d, GROUPS, VECTOR)
    if EVEN:
        h = tl.load(at, eviction_policy=PASS)
    else:
        h = tl.load(at, mask=seen, other=0.0)
    out_at = tile_pointers(out, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
    if residual is not None:
        at = tile_pointers(
            residual, rows, columns, size_1, size_2, r_0, r_1, r_2, r_d, GROUPS, VECTOR
        )
        if EVEN:
            added = tl.load(at)
        else:
            added = tl.load(at, mask=seen, other=0.0)
        h = (h.to(tl.float32) + added.to(tl.float32)).to(out.dtype.element_ty)
        at = tile_pointers(
            stream, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR
        )
        if EVEN:
            tl.store(at, h)
        else:
            tl.store(at, h, mask=seen)
    of_h = h
    h = h.to(tl.float32)
    if CENTRED:
        centre = tl.sum(h, 1) / width
        if mean is not None:
            tl.store(mean + rows, centre, mask=rows < count)
        h = h - centre[:, None]
        if not EVEN:
            h = tl.where(there[None, :], h, 0.0)
    scale = tl.rsqrt(tl.sum(h * h, 1) / width + eps)
    if rstd is not None:
        tl.store(rstd + rows, scale, mask=rows < count)
    if STREAMS:
        h = hold(of_h).to(tl.float32)
        if CENTRED:
            h = h - centre[:, None]
    y = h * scale[:, None]
    if weight is not None:
        y = y * _vector(weight, columns, there, weight_d, EVEN, VECTOR, KEEP)
    if bias is not None:
        y = y + _vector(bias, columns, there, bias_d, EVEN, VECTOR, KEEP)
    if EVEN:
        tl.store(out_at, y.to(out.dtype.element_ty), eviction_policy=PASS)
    else:
        tl.store(out_at, y.to(out.dtype.element_ty), mask=seen)
