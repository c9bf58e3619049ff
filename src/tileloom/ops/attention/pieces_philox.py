"""Dropout's decisions on the device: Philox4x32-10, by the layout of `mem_eff_attention`.

    index = offset + ((b * H + h) * Lq + i) * Lk + j           64 bits
    word  = Philox(key = seed, counter = index // 4)[index % 4]
    kept  where word >= threshold, which stands for `word * 2^-32 + 2^-33 > p` in float32

Four neighbouring indices share one Philox call of some 50 instructions, which is what dropout
costs: where a thread decides on four neighbouring keys, one call does for them if every row starts
at a multiple of 4, which `len_k` and `offset` decide; else two.

Nothing here assumes a layout, and both `triton.jit` and `gluon.jit` functions may call it: tensors
come in and go out in the caller's layout; only `keep_tile` needs Triton's automatic ones.

A wgmma accumulator gives a thread two neighbouring keys, with the other two in the next lane: key
bits 0, 1, 2, 3 lie in register, lane 0, lane 1, register. Computed in that layout each call would
be made twice. Cheaper: give `keep_quad` the quads in a linear layout with key bit 2 in lane 1, key
bit 3 in **lane 0**, the rest of keys and rows as in the accumulator, so that every lane makes
different calls; then exchange lane 0's bit, `gl.convert_layout` of the joined decisions to the
accumulator's layout: one warp shuffle for two scores, or for eight where they are packed first.
In an accumulator of K Q^T key bits 0 and 1 lie in lanes 2 and 3: let there be bits of the query
instead, such as 3 and 4, and exchange those two. `tests/ops/attention/philox_kernels.py` does both.
"""

import triton
import triton.language as tl

_LOW_32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def split_keys(seed):
    """Give the two words of the key of the first round."""
    return (seed & _LOW_32).to(tl.uint32), ((seed >> 32) & _LOW_32).to(tl.uint32)


@triton.jit
def next_keys(key_a, key_b):
    """Give the key of the next round."""
    KEY_A: tl.constexpr = 0x9E3779B9
    KEY_B: tl.constexpr = 0xBB67AE85
    key_a = tl.add(key_a, KEY_A, sanitize_overflow=False)
    return key_a, tl.add(key_b, KEY_B, sanitize_overflow=False)


@triton.jit
def whole_product(word, factor):
    """Multiply 32 bits by 32: the upper and the lower half of the product, by one instruction."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_words(counter, seed):
    """Give the four 32-bit words of each counter.

    `counter` is int64, of any shape, its low 62 bits count; `seed` is an int64 number.
    """
    A: tl.constexpr = 0xD2511F53
    B: tl.constexpr = 0xCD9E8D57
    key_a, key_b = split_keys(seed)
    low = (counter & _LOW_32).to(tl.uint32)
    high = ((counter >> 32) & 0x3FFFFFFF).to(tl.uint32)
    # The first round: words 2 and 3 of the counter are 0.
    high_a, c3 = whole_product(low, A)
    c0 = high ^ key_a
    c1 = low ^ low
    c2 = high_a ^ key_b
    for _ in tl.static_range(9):
        key_a, key_b = next_keys(key_a, key_b)
        high_a, low_a = whole_product(c0, A)
        high_b, low_b = whole_product(c2, B)
        c0 = high_b ^ c1 ^ key_a
        c2 = high_a ^ c3 ^ key_b
        c1 = low_b
        c3 = low_a
    return c0, c1, c2, c3


@triton.jit
def philox_state(seed_at, offset_at, seed, offset):
    """Read seed and offset where they lie on the device; else return what came as numbers."""
    if seed_at is not None:
        seed = tl.load(seed_at)
        offset = tl.load(offset_at)
    return seed, offset


@triton.jit
def first_index(offset, batch, head, heads, rows, len_q, len_k):
    """Give the 64-bit index of key 0 of each row; `batch` and `head` are 64-bit numbers."""
    return offset + ((batch * heads + head) * len_q + rows.to(tl.int64)) * len_k


@triton.jit
def crosses_quads(offset, len_k):
    """Whether four keys from a multiple of 4 on may take numbers of two Philox calls."""
    return ((offset | len_k) & 3) != 0


@triton.jit
def quad_words(counter, lane, crosses, seed):
    """Give the words of four neighbouring scores.

    Those of indices `4 * counter + lane` and the next three; `counter` is an int64 tensor, `lane`
    broadcasts to it. `crosses` is that of `crosses_quads`, or a constexpr False where it is known:
    then `lane` is 0 and not looked at.
    """
    w0, w1, w2, w3 = philox_words(counter, seed)
    if crosses:
        x0, x1, x2, _x3 = philox_words(counter + 1, seed)
        by_one = (lane & 1) != 0
        w0 = tl.where(by_one, w1, w0)
        w1 = tl.where(by_one, w2, w1)
        w2 = tl.where(by_one, w3, w2)
        w3 = tl.where(by_one, x0, w3)
        x0 = tl.where(by_one, x1, x0)
        x1 = tl.where(by_one, x2, x1)
        by_two = lane >= 2
        w0 = tl.where(by_two, w2, w0)
        w1 = tl.where(by_two, w3, w1)
        w2 = tl.where(by_two, x0, w2)
        w3 = tl.where(by_two, x1, w3)
    return w0, w1, w2, w3


@triton.jit
def keep_quad(counter, lane, crosses, seed, threshold):
    """Decide on four neighbouring scores, those of `quad_words`: return four bool tensors.

    `threshold` is an int64 number of 32 bits.
    """
    limit = threshold.to(tl.uint32)
    w0, w1, w2, w3 = quad_words(counter, lane, crosses, seed)
    return w0 >= limit, w1 >= limit, w2 >= limit, w3 >= limit


@triton.jit
def keep_tile(
    first, column, crosses, seed, threshold, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Decide on a block of scores: bool `[M, BLOCK_N]`, with KEYS_FIRST `[BLOCK_N, M]`.

    `first` has the indices of key 0 of the M rows, `column` is the block's first key, a multiple
    of 4.
    """
    quads = column // 4 + tl.arange(0, BLOCK_N // 4)
    counter = first >> 2
    lane = (first & 3).to(tl.int32)
    M: tl.constexpr = first.shape[0]
    if KEYS_FIRST:
        k0, k1, k2, k3 = keep_quad(
            counter[None, :] + quads[:, None], lane[None, :], crosses, seed, threshold
        )
    else:
        k0, k1, k2, k3 = keep_quad(
            counter[:, None] + quads[None, :], lane[:, None], crosses, seed, threshold
        )
    kept = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    if KEYS_FIRST:
        return tl.reshape(tl.permute(kept, (0, 2, 3, 1)), [BLOCK_N, M])
    else:
        return tl.reshape(kept, [M, BLOCK_N])
