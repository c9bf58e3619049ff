"""A kernel for each form in which a descriptor reaches it; `body` uses it."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cute import nvgpu
from cutlass.experimental import cuda

from tests.cpasync.kernels import Arguments
from tests.cpasync.probes import memory

LAUNCH = {"grid": (1, 1, 1), "block": (32, 1, 1)}


def _use(desc, body):
    smem = cute.arch.alloc_smem(cutlass.Float16, 64 * 8, alignment=1024)
    mbar = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    body(Arguments(smem, mbar, None, desc, None))


@cute.kernel
def _atom_kernel(desc: cute.CopyAtom, body: cutlass.Constexpr):
    _use(desc, body)


@cute.kernel
def _map_kernel(desc: cutlass.GridConstant[cuda.TensorMap], body: cutlass.Constexpr):
    _use(desc, body)


@cute.kernel
def _table_kernel(desc: cute.Tensor, body: cutlass.Constexpr):
    _use(desc, body)


@cute.kernel
def _pointer_kernel(desc: cute.Pointer, body: cutlass.Constexpr):
    _use(desc, body)


def _matrix(pointer):
    return cute.make_tensor(pointer, cute.make_layout((64, 64), stride=(64, 1)))


@cute.jit
def with_atom(pointer: cute.Pointer, body: cutlass.Constexpr):
    box = cute.make_layout((8, 64), stride=(64, 1))
    load = nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    atom, _ = nvgpu.cpasync.make_tiled_tma_atom(load, _matrix(pointer), box, (8, 64))
    _atom_kernel(atom, body).launch(**LAUNCH)


@cute.jit
def with_map(pointer: cute.Pointer, body: cutlass.Constexpr):
    made = cuda.create_tensor_map_tiled_from_view(_matrix(pointer), box_dims=(8, 64))
    _map_kernel(made, body).launch(**LAUNCH)


@cute.jit
def with_table(pointer: cute.Pointer, body: cutlass.Constexpr):
    # 16 words of 64 bits a descriptor.
    table = cute.make_tensor(pointer, cute.make_layout((4, 16), stride=(16, 1)))
    _table_kernel(table, body).launch(**LAUNCH)


@cute.jit
def with_pointer(pointer: cute.Pointer, body: cutlass.Constexpr):
    _pointer_kernel(pointer, body).launch(**LAUNCH)


@cute.jit
def with_plain_atom(body: cutlass.Constexpr):
    atom = cute.make_copy_atom(nvgpu.CopyUniversalOp(), cutlass.Float16)
    _atom_kernel(atom, body).launch(**LAUNCH)


def arguments(form):
    """The pointer that a form is made from."""
    if form in ("table", "pointer"):
        return [memory(cutlass.Uint64, align=64)]
    return [memory(cutlass.Float16)]
