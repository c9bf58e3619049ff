"""A Triton kernel of your own, launched by tileloom.

`launch.prepare` takes what `triton.jit` made and launches it as Triton does, for less of the host's
time. Without a GPU this example runs on the emulator, which plays the kernel on the CPU.
"""

import contextlib

import torch
import triton
import triton.language as tl

import tileloom


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Add two vectors of n elements, a block of them in each program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device(torch.cuda.current_device() if has_gpu else "cpu")
    x, y = torch.randn(2, 1000, device=device)
    launcher = tileloom.launch.prepare(add_kernel, num_warps=4)
    grid = (triton.cdiv(1000, 256),)

    with contextlib.nullcontext() if has_gpu else tileloom.emulator.run():
        out = torch.zeros_like(x)
        launcher[grid](x, y, out, 1000, BLOCK=256)
        print(f"launched: off by {(out - (x + y)).abs().max():.0f}")

        # With all but the tensors fixed, a launch costs least.
        bound = launcher.bind(grid, x, y, out, 1000, BLOCK=256)
        bound.launch(x, x, out)
        print(f"bound: off by {(out - 2 * x).abs().max():.0f}")

        # A wrong launch gets a sentence.
        try:
            launcher[(0,)](x, y, out, 1000, BLOCK=256)
        except tileloom.errors.OptionError as error:
            print(f"OptionError: {error}")


if __name__ == "__main__":
    main()
