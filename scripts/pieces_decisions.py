"""Dropout's decisions alone, whose cost `time_philox.py` takes the time of."""

# ruff: noqa: ANN001, ANN201

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.ops.attention.pieces_dropout_sm90 import kept_bits, numbers_of_rows


@gluon.jit
def decisions(out, seed: gl.int64, threshold: gl.int64, len_k, blocks):
    """Decide on 64 rows and `blocks` blocks of 128 keys, and write what comes of all words."""
    i = gl.program_id(0)
    rows = numbers_of_rows(seed * 0, i, i * 0, 1, i * 0, 64, len_k, len_k)
    total = kept_bits(rows, len_k - 128, seed, threshold, 128)
    for block in range(2, blocks + 1):
        total = (total * 3) ^ kept_bits(rows, len_k - 128 * block, seed, threshold, 128)
    LAYOUT: gl.constexpr = total.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    quad = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(row * 4, 1) + gl.expand_dims(quad, 0)
    gl.store(out + (i * 256 + at), total)
