"""Gluon's TMA copies and mbarrier waits with their arguments checked while a kernel is traced.

Gluon hands them on as they are, and what is wrong comes back from deep inside the compiler, or, as
a wait for a parity that there is not, from nowhere.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileloom.device import compat, tma


@builtin
def tma_load(tensor_desc, coord, barrier, result, *rest, _semantic=None, **more):
    """Load a box of a tensor into shared memory; the bytes arrive at an mbarrier.

    Args:
        tensor_desc: Descriptor of the tensor.
        coord: First element of the box along each dimension, in the tensor's order.
        barrier: One mbarrier, told by `arrive_and_expect_tx` how many bytes come.
        result: The tile in shared memory, of the box's shape.
        rest: ``pred``: whether to load; later versions of Triton take more.
        more: The same by name.

    Raises:
        ValueError: If one of them is of another kind or shape.
    """
    _check_copy("tma_load", tensor_desc, coord, result, "result")
    if not isinstance(barrier, gl.shared_memory_descriptor):
        raise ValueError(
            f"tma_load: barrier is {_kind(barrier)}; it must be an mbarrier in shared memory. Try: "
            "bars.index(0) of bars = cp.mbarrier_allocate(1)."
        )
    compat.tma_load(tensor_desc, coord, barrier, result, *rest, _semantic=_semantic, **more)


@builtin
def tma_store(tensor_desc, coord, src, *rest, _semantic=None, **more):
    """Store a tile of shared memory into a box of a tensor; `tma_store_wait` waits for it.

    Args:
        tensor_desc: Descriptor of the tensor.
        coord: First element of the box along each dimension, in the tensor's order.
        src: The tile in shared memory, of the box's shape.
        rest: What later versions of Triton take.
        more: The same by name.

    Raises:
        ValueError: If one of them is of another kind or shape.
    """
    _check_copy("tma_store", tensor_desc, coord, src, "src")
    compat.tma_store(tensor_desc, coord, src, *rest, _semantic=_semantic, **more)


@builtin
def tma_reduce(tensor_desc, coord, src, kind="add", _semantic=None):
    """Combine a tile of shared memory with global memory; see `device.tma.tma_reduce`.

    Raises:
        ValueError: If an argument is of another kind or shape, or the hardware does not combine so.
    """
    _check_copy("tma_reduce", tensor_desc, coord, src, "src")
    tma.tma_reduce(tensor_desc, coord, src, kind, _semantic=_semantic)


@builtin
def mbarrier_wait(bar, phase, *rest, _semantic=None, **more):
    """Wait until the phase of an mbarrier with a parity has ended.

    Args:
        bar: One mbarrier.
        phase: The parity, 0 or 1: of the n-th phase ``n & 1``.
        rest: ``pred`` and ``deps``, as Gluon's.
        more: The same by name.

    Raises:
        ValueError: If the parity is known while the kernel is traced and is neither.
    """
    known = _unwrap_if_constexpr(phase)
    if isinstance(known, int) and known not in (0, 1):
        raise ValueError(
            f"mbarrier_wait: phase is {known}; it is a parity, 0 or 1. Try: {known} & 1, where "
            f"{known} counts phases."
        )
    mbarrier.wait(bar, phase, *rest, _semantic=_semantic, **more)


def _kind(value):
    """Say of what kind a traced value is."""
    value = _unwrap_if_constexpr(value)
    if isinstance(value, gl.shared_memory_descriptor):
        return f"a tile of {value.dtype} {_sizes(value.shape)} in shared memory"
    if _is_descriptor(value):
        return f"a TMA descriptor of {value.dtype} {_sizes(value.block_shape)}"
    if isinstance(value, gl.tensor):
        scalar = value.type if not value.type.is_block() else value.type.scalar
        shape = f" of shape {_sizes(value.type.shape)}" if value.type.is_block() else ""
        return f"{scalar}{shape}"
    return f"{value!r}"


def _is_descriptor(value):
    return hasattr(value, "block_shape") and hasattr(value, "layout") and hasattr(value, "handle")


def _sizes(shape):
    return [int(_unwrap_if_constexpr(size)) for size in shape]


def _check_copy(name, desc, coord, tile, tile_name):
    if not _is_descriptor(desc):
        raise ValueError(
            f"{name}: tensor_desc is {_kind(desc)}; it must be a TMA descriptor. Try: "
            "TensorDescriptor.from_tensor(tensor, block_shape, layout) as the argument of the "
            "launch."
        )
    box = _sizes(desc.block_shape)
    given = _unwrap_if_constexpr(coord)
    is_list = hasattr(given, "__len__") and not isinstance(given, gl.tensor)
    if not is_list or len(given) != len(box):
        found = f"has length {len(given)}" if is_list else f"is {_kind(given)}"
        raise ValueError(
            f"{name}: coord {found}; the descriptor's box {box} takes {len(box)}, one for each "
            f"dimension. Try: [{', '.join(['0'] * len(box))}]."
        )
    if not isinstance(tile, gl.shared_memory_descriptor):
        raise ValueError(
            f"{name}: {tile_name} is {_kind(tile)}; it must be a tile in shared memory. Try: "
            f"gl.allocate_shared_memory(tensor_desc.dtype, {box}, tensor_desc.layout)."
        )
    if _sizes(tile.shape) != box or tile.dtype != desc.dtype:
        raise ValueError(
            f"{name}: {tile_name} is {_kind(tile)}; the descriptor's box is of {desc.dtype} {box}. "
            f"Try: gl.allocate_shared_memory(tensor_desc.dtype, {box}, tensor_desc.layout)."
        )
