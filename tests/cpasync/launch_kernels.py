"""Host functions that `compile_cubin` refuses: no kernel, two, and blocks that it cannot launch."""

from __future__ import annotations

import cutlass
from cutlass import cute


@cute.kernel
def _kernel(out: cute.Pointer):
    cute.make_tensor(out, cute.make_layout(128))[cute.arch.thread_idx()[0]] = cutlass.Float32(1)


@cute.jit
def none(out: cute.Pointer, n: cutlass.Int32):
    pass


@cute.jit
def two(out: cute.Pointer, n: cutlass.Int32):
    _kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1))
    _kernel(out).launch(grid=(2, 1, 1), block=(32, 1, 1))


@cute.jit
def square(out: cute.Pointer, n: cutlass.Int32):
    _kernel(out).launch(grid=(1, 1, 1), block=(32, 4, 1))


@cute.jit
def of_any_size(out: cute.Pointer, n: cutlass.Int32):
    _kernel(out).launch(grid=(1, 1, 1), block=(n, 1, 1))
