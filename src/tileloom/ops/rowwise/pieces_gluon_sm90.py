"""Device code of rows that a cluster of CTAs takes on Hopper, in Gluon.

A tile is `[CTAS, WARPS, n]`: warp w of CTA c has the n columns of a row from (c WARPS + w) n on.
The vectors of a thread are 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def most(a, b):
    return gl.maximum(a, b)


@gluon.jit
def hold(x):
    """As `pieces_split.hold`."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
        pack=32 // x.dtype.primitive_bitwidth,
    )  # fmt: skip


@gluon.jit
def columns_of(layout: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, n: gl.constexpr):
    """Columns of a tile, int32 `[CTAS, WARPS, n]` in a `warp_layout`."""
    of_warps: gl.constexpr = gl.SliceLayout(2, layout)
    of_columns: gl.constexpr = gl.SliceLayout(1, layout)
    cta = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, of_warps)), 1)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, of_warps)), 0)
    column = gl.expand_dims(gl.arange(0, n, layout=gl.SliceLayout(0, of_columns)), 0)
    return gl.expand_dims((cta * WARPS + warp) * n, 2) + gl.expand_dims(column, 1)


@gluon.jit
def each(numbers):
    """A number for each warp, `[CTAS, WARPS]`, as one for each of its elements."""
    return gl.expand_dims(numbers, 2)


@gluon.jit
def row_start(tensor, row, stride, VECTOR: gl.constexpr):
    """Pointer of a row (int32); the stride is in units of VECTOR elements."""
    return tensor + row.to(gl.int64) * (stride.to(gl.int64) * VECTOR)
