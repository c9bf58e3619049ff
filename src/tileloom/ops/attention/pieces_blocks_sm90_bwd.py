"""The blocks of keys of the Hopper backward: each program's own, or drawn ones.

`work` is what is the same for all of them: heads of q and of k, lengths, the rows that a head has
with those added, blocks of keys a head, heads that turns go round, key lengths, the four bounds of
the band, offsets of packed sequences, and the progress of a fixed order (`pieces_order_sm90.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.ops.attention.pieces_gluon_sm90_bwd import band_of, keys_of_program, queries_of
from tileloom.ops.attention.pieces_order_sm90 import order_of, program_of_turn

ROWS = gl.constexpr(64)


@gluon.jit
def block_of(
    program, work, ROWS: gl.constexpr, KEYS: gl.constexpr, PACKED: gl.constexpr,
    SHARED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Where a block of KEYS keys is, which rows it has, ROWS a step, and what of both is hidden.

    Also its place in a fixed order, and its batch. SHARED is that of `keys_of_program`.
    """
    (heads_q, heads_kv, len_q, len_k, padded_q, key_blocks, _round, lengths_ptr, left_top,
     right_top, left_bottom, right_bottom, packed, progress) = work  # fmt: skip
    batch, kv_head, key, batch_q, batch_k, rows, keys, missing, line = keys_of_program(
        program, key_blocks, heads_q, heads_kv, len_q, len_k, padded_q, packed, ROWS, KEYS, PACKED,
        SHARED,
    )  # fmt: skip
    lo, hi, end, first, last = band_of(
        lengths_ptr, batch, rows, keys, left_top, right_top, left_bottom, right_bottom,
        HAS_LENGTHS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    if PACKED:  # rows are counted from the front of the first block
        lo -= missing
        hi -= missing
        # No key is there, or nobody who sees one, whatever the band.
        last = gl.where((key == -KEYS) | (rows == 0), key, last)
    start, stop = queries_of(key, last, rows + missing, lo, hi, ROWS, KEYS, HAS_LEFT, HAS_RIGHT)
    line += start
    order = ()
    if ORDERED:
        order = order_of(
            progress, program, key, last, rows + missing, keys, lo, hi, ROWS, KEYS, HAS_LEFT,
            HAS_RIGHT, PACKED,
        )  # fmt: skip
    keys = (batch_k, kv_head, key, first, last, keys, end, lo, hi)
    return keys, (batch_q, start, stop, missing, line), order, batch


@gluon.jit
def batch_to_load(batch, key, last, PACKED: gl.constexpr):
    """Where a block's keys are loaded from; of packed sequences that nobody sees, nowhere: zeros.

    A sequence without queries may hold NaN in its keys, and 0 * NaN would reach their gradients.
    To clear them where they are used costs registers (but in the kernel for 192 columns, where this
    does).
    """
    if PACKED:
        return gl.where(key >= last, -1, batch)
    else:
        return batch


@gluon.jit
def drawn(
    turn, units, work, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """What `block_of` gives for the block of a turn, of 64 rows a step and 128 keys."""
    key_blocks, heads_a_round = work[5], work[6]
    heads = units // key_blocks
    program = program_of_turn(turn, heads, key_blocks, heads_a_round, ORDERED and not PACKED)
    return block_of(
        program, work, ROWS, 128, PACKED, False, HAS_LENGTHS, HAS_LEFT, HAS_RIGHT, ORDERED
    )
