"""TMA operations that Gluon lacks: reductions before Triton 3.8, and a wait for the whole store."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from tileloom.device.compat import thread_barrier

_INTEGERS = ("int32", "uint32", "int64", "uint64")
# What the hardware combines, by the names of Triton's types. Source: PTX ISA, cp.reduce.async.bulk.
REDUCED = {
    "add": ("fp16", "bf16", "fp32", *_INTEGERS),
    "min": ("fp16", "bf16", *_INTEGERS),
    "max": ("fp16", "bf16", *_INTEGERS),
    "and": _INTEGERS,
    "or": _INTEGERS,
    "xor": _INTEGERS,
}


@builtin
def tma_reduce(tensor_desc, coord, src, kind="add", _semantic=None):
    """Combine a tile of shared memory with global memory, element by element and atomically.

    A proxy fence (`fence_proxy_async`) comes between writing the tile and this, and
    `tma_store_wait` before the tile is written again. In which order several programs combine is
    not fixed: sums of floats differ from run to run.

    Args:
        tensor_desc: Descriptor of the tensor in global memory.
        coord: First element of the box along each dimension, in the tensor's order.
        src: The tile in shared memory, of the descriptor's box and layout.
        kind: ``"add"``; ``"min"``, ``"max"``, not of float32; ``"and"``, ``"or"``, ``"xor"`` of
            integers. Integers have 32 or 64 bits, floats are float16, bfloat16 or float32.

    Raises:
        ValueError: For a kind or a dtype that the hardware does not combine.
    """
    kind, name = _unwrap_if_constexpr(kind), tensor_desc.dtype.name
    if kind not in REDUCED:
        raise ValueError(
            f"tma_reduce: kind is {kind!r}; known: {', '.join(REDUCED)}. Try: kind='add'."
        )
    if name not in REDUCED[kind]:
        raise ValueError(
            f"tma_reduce: kind={kind!r} of {name}; the hardware takes {', '.join(REDUCED[kind])}. "
            "Try: another dtype, or gl.atomic operations."
        )
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    how = getattr(ir.DESCRIPTOR_REDUCE_KIND, kind.upper())
    _semantic.builder.create_async_tma_reduce(how, tensor_desc.handle, coord, src.handle)


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# `tma_reduce_add(desc, coord, src)` adds a tile of shared memory to global memory, element by
# element and atomically; `tma.store_wait` waits for it, and a proxy fence must come before it.
tma_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_add


@gluon.constexpr_function
def _wait_ptx(pending):
    return f"cp.async.bulk.wait_group {pending}; mov.u32 $0, 0;"


@gluon.jit
def tma_store_wait(pending: gl.constexpr, read: gl.constexpr = True):
    """Wait until at most `pending` TMA stores and reductions of this partition are under way.

    Each store and reduction is a group of its own: Gluon commits it.

    Args:
        pending: How many may still be under way.
        read: True waits until the others have read their tiles, which may then be written again.
            False waits until they have written global memory as well: what a flag may announce
            afterwards, and what later loads of this program may read.
    """
    if read:
        tma.store_wait(pending)
    else:
        text: gl.constexpr = _wait_ptx(pending)
        gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)
        thread_barrier()  # only the thread that issued the stores has waited
