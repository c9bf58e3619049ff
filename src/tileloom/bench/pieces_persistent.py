"""Triton's persistent matrix product, a peer: what its compiler makes of the loop with TMA."""

import triton
import triton.language as tl


@triton.jit
def persistent_matmul_kernel(
    a_desc, b_desc, out_desc, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = A B^T by blocks that take tile after tile; b is `[n, k]`, as a layer's weight lies.

    Tiles are taken in groups of GROUP rows of tiles, column by column.
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tiles_m * tiles_n, step, flatten=True):
        top = tile // (GROUP * tiles_n) * GROUP
        height = min(tiles_m - top, GROUP)
        rest = tile % (GROUP * tiles_n)
        row, column = (top + rest % height) * BLOCK_M, rest // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(steps):
            a = a_desc.load([row, at * BLOCK_K])
            b = b_desc.load([column, at * BLOCK_K])
            acc = tl.dot(a, b.T, acc)
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        out_desc.store([row, column], left.to(out_desc.dtype))
        out_desc.store([row, column + BLOCK_N // 2], right.to(out_desc.dtype))
