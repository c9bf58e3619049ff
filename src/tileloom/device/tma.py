"""TMA operations that Gluon has only from Triton 3.8 on."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# `tma_reduce_add(desc, coord, src)` adds a tile of shared memory to global memory, element by
# element and atomically; `tma.store_wait` waits for it, and a proxy fence must come before it.
tma_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_add
