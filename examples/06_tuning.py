"""A kernel that chooses its own blocks, warps and grid.

On a GPU the first launch measures a few candidates, and keeps the winner for other processes; here
the kernel runs in the emulator, where the first candidate is taken.
"""

import contextlib

import torch
import triton
import triton.language as tl

from tileloom import emulator, errors, tuning
from tileloom.testing import assert_accurate


@tuning.reduction(sizes={"x": "rows", "r": "cols"}, hint="inner")
@triton.jit
def rms_norm_kernel(x, w, y, rows, cols, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    squares = tl.zeros((XBLOCK, R0_BLOCK), tl.float32)
    for at in range(0, cols, R0_BLOCK):
        col = at + tl.arange(0, R0_BLOCK)[None, :]
        part = tl.load(x + row * cols + col, (row < rows) & (col < cols), 0.0).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 1) / cols + 1e-6)[:, None]
    for at in range(0, cols, R0_BLOCK):
        col = at + tl.arange(0, R0_BLOCK)[None, :]
        seen = (row < rows) & (col < cols)
        part = tl.load(x + row * cols + col, seen, 0.0).to(tl.float32)
        tl.store(y + row * cols + col, part * scale * tl.load(w + col, col < cols, 0.0), seen)


def plain(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def main():
    for rows, cols in ((16384, 768), (32, 50000), (1, 1 << 20)):
        print(f"{rows} x {cols}:", *rms_norm_kernel.candidates(rows=rows, cols=cols))

    has_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    x, w = torch.randn(6, 300), torch.randn(300)
    if has_gpu:
        x, w = x.cuda(), w.cuda()
    with contextlib.nullcontext() if has_gpu else emulator.run():
        y = torch.empty_like(x)
        rms_norm_kernel(x, w, y, 6, 300)
    assert_accurate(y, plain(x.double(), w.double()), plain(x, w))
    print("as accurate as PyTorch")

    try:
        rms_norm_kernel(x, w, y, 6)
    except errors.ArgumentError as error:
        print(f"ArgumentError: {error}")


if __name__ == "__main__":
    main()
