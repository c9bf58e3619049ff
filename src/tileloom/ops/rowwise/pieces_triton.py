"""Device code that the row-wise kernels share: where rows lie, tiles of rows, sums over rows.

A kernel takes for each tensor the arguments of `Rows.stride_arguments` (`x_0, x_1, x_2, x_d`), the
group sizes `size_1, size_2`, and the constants GROUPS and VECTOR. They are listed in its
`do_not_specialize`, so that a new stride or length is no new kernel; the alignment that vector
loads need comes back from the multiplication with VECTOR.
"""

import triton
import triton.language as tl


@triton.jit
def row_offsets(
    rows, size_1, size_2, stride_0, stride_1, stride_2, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Offset of each row's first element, int64; `rows` are row numbers in int64, any shape."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    if GROUPS == 1:
        at = rows * (tl.cast(stride_2, tl.int64) * UNIT)
    else:
        inner = tl.cast(size_2, tl.int64)
        outside = rows // inner
        at = (rows - outside * inner) * (tl.cast(stride_2, tl.int64) * UNIT)
        if GROUPS == 2:
            at += outside * (tl.cast(stride_1, tl.int64) * UNIT)
        else:
            middle = tl.cast(size_1, tl.int64)
            outermost = outside // middle
            at += (outside - outermost * middle) * (tl.cast(stride_1, tl.int64) * UNIT)
            at += outermost * (tl.cast(stride_0, tl.int64) * UNIT)
    return at


@triton.jit
def column_offsets(columns, stride_d, VECTOR: tl.constexpr):
    """Offset of each column from its row's first element; `columns` are int32 or int64."""
    at = columns
    if VECTOR == 0:
        at = columns.to(tl.int64) * tl.cast(stride_d, tl.int64)
    return at


@triton.jit
def tile_pointers(
    pointer, rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_d,
    GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Pointers `[R, C]` of row numbers `rows` (int64 `[R]`) and `columns` `[C]`."""
    base = row_offsets(rows, size_1, size_2, stride_0, stride_1, stride_2, GROUPS, VECTOR)
    return (pointer + base)[:, None] + column_offsets(columns, stride_d, VECTOR)[None, :]
