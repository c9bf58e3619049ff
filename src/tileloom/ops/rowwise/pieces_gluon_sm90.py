"""Device code of rows that a cluster of CTAs takes on Hopper, in Gluon.

A tile is `[CTAS, BLOCK]`: CTA c of a cluster has its row c, which are BLOCK columns of the tensor's
row from c BLOCK on. The vectors of a thread are 16 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cluster import cta_bases


@gluon.constexpr_function
def layout_of(warps, ctas, vector):
    return gl.BlockedLayout([1, vector], [1, 32], [1, warps], [1, 0], cta_bases(ctas, 2))


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
def row_start(tensor, row, stride, VECTOR: gl.constexpr):
    """Pointer of a row (int32); the stride is in units of VECTOR elements."""
    return tensor + row.to(gl.int64) * (stride.to(gl.int64) * VECTOR)


@gluon.jit
def load_part(start, columns, seen, EVEN: gl.constexpr, other: gl.constexpr = 0.0):
    """Load `[CTAS, BLOCK]` of a row; `other` where not seen."""
    if EVEN:
        return gl.load(start + columns)
    else:
        return gl.load(start + columns, mask=seen, other=other)


@gluon.jit
def store_part(start, columns, seen, values, EVEN: gl.constexpr):
    gl.store(start + columns, values, mask=None if EVEN else seen)


@gluon.jit
def all_of(found, CTAS: gl.constexpr):
    """Add up what the CTAs have shown each other, a number each."""
    total = found[0]
    for j in gl.static_range(1, CTAS):
        total += found[j]
    return total
