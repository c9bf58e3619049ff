"""Gradients of RMS and layer norm of few rows in portable Triton (sm_80 and later): one launch.

Mathematics as in `kernel_triton_bwd.py`. The gradients of weight and bias need no sum over a row,
as mean and rstd are those of the forward, so that nothing is handed from one program to another:

    programs 0 .. count - 1     a row each: dh
    the others                  COLUMNS columns of all rows, ROWS at a time: dweight and dbias

Bytes moved: g and h twice, the second time from L2; e once, dh once. For few rows that is less than
what a second launch costs, which adds up shares.

Offsets are 64-bit: see `pieces_triton.py` for strides and their units.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.norm.kernel_triton_bwd import INTEGERS, add_both, distance
from tileloom.ops.rowwise.pieces_triton import column_offsets, tile_pointers


@triton.jit
def _row(
    g, e, h, weight, mean, rstd, dh, row, width, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Write dh of one row."""
    rows = tl.cast(row, tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    seen = (columns < width)[None, :]
    at = tile_pointers(h, rows, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
    of_h = tl.load(at, mask=seen, other=0.0)
    at = tile_pointers(g, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    a = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    if weight is not None:
        at = weight + column_offsets(columns, weight_d, VECTOR)
        a = a * tl.load(at[None, :], mask=seen, other=0.0).to(tl.float32)
    scale = tl.load(rstd + rows)
    centre = scale
    if CENTRED:
        centre = tl.load(mean + rows)
    xhat = distance(of_h, centre, scale, seen, CENTRED, False)
    if CENTRED:
        c_1, c_2 = tl.reduce((a * xhat, a), 1, add_both)
        y = a - xhat * (c_1 / width)[:, None] - (c_2 / width)[:, None]
    else:
        y = a - xhat * (tl.sum(a * xhat, 1) / width)[:, None]
    y = y * scale[:, None]
    if e is not None:
        at = tile_pointers(e, rows, columns, size_1, size_2, e_0, e_1, e_2, e_d, GROUPS, VECTOR)
        y += tl.load(at, mask=seen, other=0.0).to(tl.float32)
    at = tile_pointers(dh, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
    tl.store(at, y.to(dh.dtype.element_ty), mask=seen)


@triton.jit
def _columns(
    g, h, mean, rstd, dweight, dbias, first, count, width, size_1, size_2,
    g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Write dweight and dbias of the columns from `first` on."""
    columns = first + tl.arange(0, COLUMNS)
    there = columns < width
    of_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        rows_seen = rows < count
        seen = rows_seen[:, None] & there[None, :]
        at = tile_pointers(g, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
        a = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        if dweight is not None:
            at = tile_pointers(h, rows, columns, size_1, size_2, h_0, h_1, h_2, h_d, GROUPS, VECTOR)
            of_h = tl.load(at, mask=seen, other=0.0)
            scale = tl.load(rstd + rows, mask=rows_seen, other=0.0)
            centre = scale
            if CENTRED:
                centre = tl.load(mean + rows, mask=rows_seen, other=0.0)
            of_weight += a * distance(of_h, centre, scale, seen, CENTRED, False)
        of_bias += a
    if dweight is not None:
        result = tl.sum(of_weight, 0).to(dweight.dtype.element_ty)
        tl.store(dweight + columns, result, mask=there)
    if dbias is not None:
        tl.store(dbias + columns, tl.sum(of_bias, 0).to(dbias.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=INTEGERS)
def norm_bwd_few_kernel(
    g, e, h, weight, mean, rstd, dh, dweight, dbias,
    count, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d, weight_d,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Take one row, or COLUMNS columns of all rows. Absent tensors are None."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    width = width_units * UNIT
    program = tl.program_id(0)
    if program < count:
        _row(
            g, e, h, weight, mean, rstd, dh, program, width, size_1, size_2,
            g_0, g_1, g_2, g_d, e_0, e_1, e_2, e_d, h_0, h_1, h_2, h_d, o_0, o_1, o_2, o_d,
            weight_d, BLOCK, GROUPS, VECTOR, CENTRED,
        )  # fmt: skip
    else:
        _columns(
            g, h, mean, rstd, dweight, dbias, (program - count) * COLUMNS, count, width,
            size_1, size_2, g_0, g_1, g_2, g_d, h_0, h_1, h_2, h_d,
            ROWS, COLUMNS, GROUPS, VECTOR, CENTRED,
        )  # fmt: skip
