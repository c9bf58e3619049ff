"""Device code of norms over whose rows clusters walk: two elements of 16 bits lie in one int32.

A row is taken in pieces: of each, a warp has n int32 side by side, in the order of all warps of the
cluster. A piece is `[CTAS, WARPS, n]`, and the next one begins CTAS * WARPS * n int32 later.
"""

# ruff: noqa: RUF005  (Triton knows no *tuple inside a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.cp_async import cp_async
from tileloom.ops.rowwise.pieces_gluon_sm90 import hold

_TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.constexpr_function
def _plain(ctas):
    bases = [[1 << bit, 0, 0] for bit in range(ctas.bit_length() - 1)]
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0], bases)


@gluon.constexpr_function
def pieces_of(size):
    """How many pieces a warp's columns are taken in, so that few of them are in registers."""
    return max(1, size // 512)


@gluon.jit
def ring_of(
    CTAS: gl.constexpr, WARPS: gl.constexpr, n: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of STAGES rows: for each piece `[STAGES, CTAS, WARPS, n]`, int32."""
    ring = ()
    for _ in gl.static_range(PIECES):
        ring = ring + (gl.allocate_shared_memory(gl.int32, [STAGES, CTAS, WARPS, n], _plain(CTAS)),)
    return ring


@gluon.jit
def ask(rows, slot, tensor, row, count, stride, columns, step: gl.constexpr):
    """Copy a row into its place, if there is such a row."""
    if row < count:
        for k in gl.static_range(len(rows)):
            cp_async(rows[k].index(slot), tensor + row * stride + columns + k * step)


@gluon.jit
def pair_of(x, IS_BF16: gl.constexpr):
    """The two elements of 16 bits in each int32, in float32."""
    if IS_BF16:
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
    else:
        low = x.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (x >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def join_pair(low, high, IS_BF16: gl.constexpr):
    """Two elements rounded to 16 bits in one int32, by one instruction."""
    TEXT: gl.constexpr = _TO_BF16 if IS_BF16 else _TO_F16
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [low, high], gl.int32, True, 1)


@gluon.jit
def _vector(pointer, columns):
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        return (gl.load(gl.cast(pointer, gl.pointer_type(gl.int32)) + columns),)
    else:  # two neighbours as one number, so that 16 bytes are loaded at a time
        both = gl.load(gl.cast(pointer, gl.pointer_type(gl.int64)) + columns)
        low = both.to(gl.int32).to(gl.float32, bitcast=True)
        return low, (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def vector_of(pointer, columns, step: gl.constexpr, PIECES: gl.constexpr):
    """Load the weight or bias: of each piece two elements of 16 bits in one int32, or both."""
    vector = ()
    for k in gl.static_range(PIECES):
        vector = vector + (_vector(pointer, columns + k * step),)
    return vector


@gluon.jit
def both_of(vector, kind: gl.constexpr):
    if kind.primitive_bitwidth == 16:
        return pair_of(hold(vector[0]), kind == gl.bfloat16)
    else:
        return vector


@gluon.jit
def leave(share, both, WIDTH: gl.constexpr):
    """Store a piece of a cluster's shares, float32: its even columns, and n / 2 on its odd ones."""
    gl.store(share, both[0])
    gl.store(share + WIDTH // 2, both[1])
