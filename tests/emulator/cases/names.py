"""Gluon names that differ between releases, and named barriers: the cases use no other part."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def barrier_text(operation, ident, threads):
    return f"bar.{operation} {ident}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def named_barrier_sync(ident: gl.constexpr, threads: gl.constexpr):
    text: gl.constexpr = barrier_text("sync", ident, threads)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def named_barrier_arrive(ident: gl.constexpr, threads: gl.constexpr):
    text: gl.constexpr = barrier_text("arrive", ident, threads)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def arrive_each_thread(barrier):
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """See the bytes of a shared buffer as another type."""
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(
        buffer, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout)
    )


def _reduction(kind):
    """A TMA reduction as Gluon has it from Triton 3.8 on; the operation itself is older."""

    @builtin
    def reduce(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        how = getattr(ir.DESCRIPTOR_REDUCE_KIND, kind)
        _semantic.builder.create_async_tma_reduce(how, tensor_desc.handle, coord, src.handle)

    return reduce


reduce_add, reduce_min, reduce_max = map(_reduction, ("ADD", "MIN", "MAX"))
reduce_and, reduce_or, reduce_xor = map(_reduction, ("AND", "OR", "XOR"))


@gluon.jit
def store_wait_all():
    """Wait until TMA stores and reductions have reached global memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


# ---- clusters: from Triton 3.7 on
if hasattr(hopper, "cluster"):
    _cluster_barrier = getattr(hopper.cluster, "barrier", None)
    _cluster_arrive = getattr(hopper.cluster, "arrive", None)
    _cluster_wait = getattr(hopper.cluster, "wait", None)
    _ONE_CALL = gl.constexpr(_cluster_barrier is not None)

    @gluon.jit
    def cluster_barrier():
        """Let the CTAs of a cluster meet, and each know what the others have done."""
        if _ONE_CALL:
            _cluster_barrier()
        else:
            _cluster_arrive()
            _cluster_wait()
