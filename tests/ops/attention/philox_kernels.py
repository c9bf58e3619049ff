"""Kernels that write what `pieces_philox` decides, in Triton and in Gluon."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.ops.attention.pieces_philox import (
    crosses_quads,
    first_index,
    keep_quad,
    keep_tile,
    philox_state,
    philox_words,
)
from tileloom.ops.attention.pieces_philox_sm90 import high_word, words_in_rows


@triton.jit(do_not_specialize=("seed", "offset", "threshold", "len_q", "len_k", "heads"))
def portable(
    out, seed_at, offset_at, seed: tl.int64, offset: tl.int64, threshold: tl.int64,
    heads: tl.int32, len_q: tl.int32, len_k: tl.int32, row: tl.int32, column: tl.int32,
    M: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the block at `row, column` of head `program_id(0)`, `[M, N]`."""
    seed, offset = philox_state(seed_at, offset_at, seed, offset)
    index = tl.cast(tl.program_id(0), tl.int64)
    rows = row + tl.arange(0, M)
    first = first_index(offset, index // heads, index % heads, heads, rows, len_q, len_k)
    crosses = crosses_quads(offset, len_k)
    kept = keep_tile(first, column, crosses, seed, threshold, N, KEYS_FIRST)
    if KEYS_FIRST:
        kept = tl.trans(kept)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + index * (M * N) + at, kept.to(tl.int8))


@gluon.jit(do_not_specialize=("seed", "offset", "threshold"))
def in_accumulator(
    out, seed: gl.int64, offset: gl.int64, threshold: gl.int64, len_q: gl.int32, len_k: gl.int32,
    LAYOUT: gl.constexpr, QUADS: gl.constexpr, N: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Write a block `[64, N]` that was brought into the layout of a wgmma accumulator."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, QUADS))
    quads = gl.arange(0, N // 4, gl.SliceLayout(0, QUADS))
    first = first_index(offset, 0, 0, 1, rows, len_q, len_k)
    lane = (first & 3).to(gl.int32)
    counter = (first >> 2)[:, None] + quads[None, :]
    crosses: gl.constexpr = not ALIGNED
    k0, k1, k2, k3 = keep_quad(counter, lane[:, None], crosses, seed, threshold)
    kept = gl.join(gl.join(k0.to(gl.int8), k2.to(gl.int8)), gl.join(k1.to(gl.int8), k3.to(gl.int8)))
    kept = gl.convert_layout(gl.reshape(kept, [64, N]), LAYOUT)
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    gl.store(out + (i[:, None] * N + j[None, :]), kept)


@gluon.jit(do_not_specialize=("seed", "offset", "threshold"))
def in_transposed_accumulator(
    out, seed: gl.int64, offset: gl.int64, threshold: gl.int64, len_q: gl.int32, len_k: gl.int32,
    LAYOUT: gl.constexpr, QUADS: gl.constexpr, N: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Write 64 keys of N rows, `[64, N]`, in the layout of an accumulator of K Q^T."""
    rows = gl.arange(0, N, gl.SliceLayout(0, QUADS))
    quads = gl.arange(0, 16, gl.SliceLayout(1, QUADS))
    first = first_index(offset, 0, 0, 1, rows, len_q, len_k)
    lane = (first & 3).to(gl.int32)
    counter = (first >> 2)[None, :] + quads[:, None]
    crosses: gl.constexpr = not ALIGNED
    k0, k1, k2, k3 = keep_quad(counter, lane[None, :], crosses, seed, threshold)
    kept = gl.join(gl.join(k0.to(gl.int8), k2.to(gl.int8)), gl.join(k1.to(gl.int8), k3.to(gl.int8)))
    kept = gl.reshape(gl.permute(kept, (0, 2, 3, 1)), [64, N])
    kept = gl.convert_layout(kept, LAYOUT)
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    gl.store(out + (i[:, None] * N + j[None, :]), kept)


@triton.jit(do_not_specialize=("first", "high", "seed"))
def both_words(
    quick, plain, first: tl.int64, high: tl.int64, seed: tl.int64, N: tl.constexpr,
    DOUBLES: tl.constexpr,
):  # fmt: skip
    """Write the words of N counters from `2^32 * high + first` on, `[4, N]`, by either way."""
    at = tl.arange(0, N)
    low = first + at
    words = words_in_rows(low.to(tl.uint32), high.to(tl.uint32), seed, DOUBLES)
    whole = philox_words((high << 32) + low, seed)
    for n in tl.static_range(4):
        tl.store(quick + n * N + at, words[n].to(tl.int32, bitcast=True))
        tl.store(plain + n * N + at, whole[n].to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=("first", "count"))
def high_words(out, turned, first: tl.int64, count: tl.int64):
    """Write what `high_word` gives."""
    high, turns = high_word(first, count)
    tl.store(out, high.to(tl.int64))
    tl.store(turned, turns.to(tl.int64))
