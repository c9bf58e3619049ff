"""cp.async: copies of 4, 8 or 16 bytes a thread from global to shared memory, zeros outside."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._layouts import BlockedLayout
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tileloom.device.compat import async_copy_load


@builtin
def cp_async(smem, pointer, mask=None, _semantic=None):
    """Copy elements from global to shared memory; nothing of the thread waits for it.

    `async_copy.commit_group` closes a group of copies and `wait_group` waits for groups, of the
    whole partition: the compiler lets its threads meet.

    Args:
        smem: The tile in shared memory.
        pointer: Pointers to the elements, of its shape. A thread copies 4, 8 or 16 contiguous bytes
            at a time: at least so many must lie together in its layout and in memory.
        mask: Elements that are copied; the others become 0 in shared memory, and their pointers are
            not read.

    Raises:
        ValueError: If a thread has less than 4 bytes together.
    """
    layout, itemsize = pointer.type.layout, pointer.dtype.element_ty.primitive_bitwidth // 8
    if isinstance(layout, BlockedLayout):
        together = layout.size_per_thread[layout.order[0]] * itemsize
        if together < 4:
            raise ValueError(
                f"cp_async: the layout of pointer gives a thread {together} bytes together; "
                f"cp.async copies 4, 8 or 16. Try: size_per_thread={16 // itemsize} along the "
                "contiguous dimension."
            )
    async_copy_load(smem, pointer, mask=mask, _semantic=_semantic)


@gluon.jit
def mbarrier_cp_async_arrive(barrier):
    """Let the cp.async of each thread so far arrive at an mbarrier, beyond the count it expects.

    The count goes up by one for each thread now and down as its copies complete: it takes another
    arrival to end the phase. `barriers.arrive_each_thread` is the form whose arrivals are expected.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=True)
