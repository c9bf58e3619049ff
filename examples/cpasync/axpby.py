"""The sum z = alpha x + beta y of any length, fed by a ring of cp.async.

Each thread copies 16 bytes of x and of y into slots of its own, three steps ahead, so that no
barrier is needed: a thread waits for its own copies and reads what it copied itself. The vector
that reaches past the end reads what is there and gets zeros for the rest; vectors wholly past the
end read nothing. A block takes as many steps as it has stages: many small blocks, which the
hardware starts in order, are fastest. Bytes moved: 12 for each element, the least possible.
"""

# First, since it says what to install where the DSL is missing.
from cute_support import compile_kernel, counts, example_pointer, has_hopper, pointer

# isort: split
import cutlass
import torch
from cutlass import cute

from tileloom import cpasync

THREADS, STAGES, VECTOR = 256, 4, 4
CHUNK = THREADS * VECTOR


@cute.jit
def _copy(slots, stage, x, y, at, n, size: cutlass.Constexpr, modifier: cutlass.Constexpr):
    """Copy this thread's vectors of x and y at `at` into a stage's slots, `size` bytes at once."""
    slot = slots + (stage * 2 * THREADS + cute.arch.thread_idx()[0]) * VECTOR
    for j in cutlass.range_constexpr(0, VECTOR, size // 4):
        left = cutlass.min(cutlass.max(n - at - j, 0), size // 4)
        read = cutlass.Int32(left * 4)
        for source, target in ((x, slot), (y, slot + CHUNK)):
            cpasync.cp_async_shared_global(
                target + j, source + at + j, size, modifier, src_size=read
            )


@cute.kernel
def axpby_kernel(
    x: cute.Pointer,
    y: cute.Pointer,
    z: cute.Pointer,
    n: cutlass.Int64,
    alpha: cutlass.Float32,
    beta: cutlass.Float32,
    size: cutlass.Constexpr,
    modifier: cutlass.Constexpr,
):
    thread, block, blocks = (
        cute.arch.thread_idx()[0],
        cute.arch.block_idx()[0],
        cute.arch.grid_dim()[0],
    )
    slots = cute.arch.alloc_smem(cutlass.Float32, STAGES * 2 * CHUNK, alignment=16)
    step = cutlass.Int64(blocks) * CHUNK
    at = cutlass.Int64(block) * CHUNK + thread * VECTOR
    steps = cutlass.Int32((n + step - 1) // step)
    for stage in cutlass.range_constexpr(STAGES - 1):
        _copy(slots, stage, x, y, at + step * stage, n, size, modifier)
        cpasync.cp_async_commit()
    for i in cutlass.range(steps, unroll=1):
        # The stage that was read in the last step is free: this thread alone uses its slots.
        _copy(slots, (i + STAGES - 1) % STAGES, x, y, at + step * (STAGES - 1), n, size, modifier)
        cpasync.cp_async_commit()
        cpasync.cp_async_wait(STAGES - 1)
        slot = slots + (i % STAGES * 2 * THREADS + thread) * VECTOR
        xs = cute.make_tensor(slot, cute.make_layout(VECTOR)).load()
        ys = cute.make_tensor(slot + CHUNK, cute.make_layout(VECTOR)).load()
        out = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        out.store(alpha * xs + beta * ys)
        target = cute.make_tensor((z + at).align(16), cute.make_layout(VECTOR))
        if at + VECTOR <= n:
            cute.autovec_copy(out, target)
        else:
            for j in cutlass.range_constexpr(VECTOR):
                if at + j < n:
                    target[j] = out[j]
        at += step
    cpasync.cp_async_wait(0)


@cute.jit
def launch(
    x: cute.Pointer,
    y: cute.Pointer,
    z: cute.Pointer,
    n: cutlass.Int64,
    alpha: cutlass.Float32,
    beta: cutlass.Float32,
    blocks: cutlass.Int32,
    size: cutlass.Constexpr,
    modifier: cutlass.Constexpr,
):
    axpby_kernel(x, y, z, n, alpha, beta, size, modifier).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1)
    )


def build(size=16, modifier="cg", arch="sm_90a", options=""):
    """The compiled function and its PTX, with copies of that kind; no GPU is needed."""
    any_of = example_pointer(torch.float32)
    numbers = cutlass.Int64(1), cutlass.Float32(1), cutlass.Float32(1), cutlass.Int32(1)
    arguments = any_of, any_of, any_of, *numbers, size, modifier
    return compile_kernel(launch, *arguments, arch=arch, options=options)


def axpby(compiled, alpha, x, beta, y):
    """Return alpha x + beta y of contiguous float32 vectors on the default stream."""
    z = torch.empty_like(x)
    if x.numel():
        blocks = -(-x.numel() // (STAGES * CHUNK))
        compiled(pointer(x), pointer(y), pointer(z), x.numel(), alpha, beta, blocks)
    return z


def main():
    compiled, ptx = build()
    print("axpby:", counts(ptx, "cp.async.cg", "cp.async.commit_group", "cp.async.wait_group"))
    if not has_hopper():
        print("compiled for sm_90a; not run: no Hopper GPU here")
        return
    for n in (1, 3, 4, 1023, 1025, 10_000_001):
        x, y = (torch.randn(n, device=torch.device("cuda")) for _ in range(2))
        z = axpby(compiled, 2.0, x, -0.5, y)
        print(f"{n} elements: off by {(z - (2 * x - 0.5 * y)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
