"""SwiGLU, forward and backward, in portable Triton (sm_80 and later).

Mathematics, element by element in float32, with s = sigmoid(gate):

    out = gate * s * up
    dgate = dout * up * (s + gate * s * (1 - s)),   dup = dout * gate * s

Tile picture: a program takes ROWS rows of BLOCK columns once; programs count the tiles of columns
first, then those of rows. Contiguous tensors come as one long row.

Bytes moved: every tensor once. Offsets are 64-bit: see `pieces_triton.py`.
"""

import triton
import triton.language as tl

from tileloom.ops.rowwise.pieces_triton import tile_pointers

_SIZES = ("count", "splits", "width_units", "size_1", "size_2")
_GATE_UP = ("g_0", "g_1", "g_2", "g_d", "u_0", "u_1", "u_2", "u_d", "o_0", "o_1", "o_2", "o_d")
FORWARD_INTEGERS = (*_SIZES, *_GATE_UP)
BACKWARD_INTEGERS = (*FORWARD_INTEGERS, "p_0", "p_1", "p_2", "p_d", "q_0", "q_1", "q_2", "q_d")


@triton.jit
def _tile(
    count, splits, width_units, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    """Rows (int64 `[R]`), columns (int64 `[C]`) and mask of this program's tile."""
    UNIT: tl.constexpr = VECTOR if VECTOR > 0 else 1
    program = tl.program_id(0)
    rows = tl.cast(program // splits, tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.cast(program % splits, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = tl.cast(width_units, tl.int64) * UNIT
    return rows, columns, (rows < count)[:, None] & (columns < width)[None, :]


@triton.jit(do_not_specialize=FORWARD_INTEGERS)
def swiglu_fwd_kernel(
    gate, up, out, count, splits, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, u_0, u_1, u_2, u_d, o_0, o_1, o_2, o_d,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write one tile of out; `splits` tiles of columns make a row."""
    rows, columns, seen = _tile(count, splits, width_units, ROWS, BLOCK, VECTOR)
    at = tile_pointers(gate, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    g = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    at = tile_pointers(up, rows, columns, size_1, size_2, u_0, u_1, u_2, u_d, GROUPS, VECTOR)
    u = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    y = g * tl.sigmoid(g) * u
    at = tile_pointers(out, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
    tl.store(at, y.to(out.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=BACKWARD_INTEGERS)
def swiglu_bwd_kernel(
    gate, up, grad, dgate, dup, count, splits, width_units, size_1, size_2,
    g_0, g_1, g_2, g_d, u_0, u_1, u_2, u_d, o_0, o_1, o_2, o_d,
    p_0, p_1, p_2, p_d, q_0, q_1, q_2, q_d,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write one tile of dgate (strides p_*) and dup (q_*); grad has strides o_*."""
    rows, columns, seen = _tile(count, splits, width_units, ROWS, BLOCK, VECTOR)
    at = tile_pointers(gate, rows, columns, size_1, size_2, g_0, g_1, g_2, g_d, GROUPS, VECTOR)
    g = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    at = tile_pointers(up, rows, columns, size_1, size_2, u_0, u_1, u_2, u_d, GROUPS, VECTOR)
    u = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    at = tile_pointers(grad, rows, columns, size_1, size_2, o_0, o_1, o_2, o_d, GROUPS, VECTOR)
    dout = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    at = tile_pointers(dgate, rows, columns, size_1, size_2, p_0, p_1, p_2, p_d, GROUPS, VECTOR)
    slope = s + silu * (1.0 - s)
    tl.store(at, (dout * u * slope).to(dgate.dtype.element_ty), mask=seen)
    at = tile_pointers(dup, rows, columns, size_1, size_2, q_0, q_1, q_2, q_d, GROUPS, VECTOR)
    tl.store(at, (dout * silu).to(dup.dtype.element_ty), mask=seen)
