"""Fences between the generic proxy, of ordinary loads and stores, and the async proxy of TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_SPACES = ("shared", "global", "all")
_SHARED = gl.constexpr("shared")  # Triton 3.6 takes a default text only so


@gluon.constexpr_function
def _proxy_ptx(space):
    if space not in _SPACES:
        raise ValueError(
            f"fence_proxy_async: space is {space!r}; known: {', '.join(_SPACES)}. "
            "Try: space='shared'."
        )
    return f"fence.proxy.async{'.global' if space == 'global' else ''}; mov.u32 $0, 0;"


@gluon.jit
def fence_proxy_async(space: gl.constexpr = _SHARED):
    """Order what this partition has read and written before with what TMA does afterwards.

    It waits for no copy. Triton 3.6 puts none anywhere. One is needed between ordinary reads and
    writes of a tile of shared memory and a TMA store of it or load over it, before the barrier that
    hands the tile on; between ordinary access to global memory and TMA access to the same; and
    between reading a flag and a TMA load of what it announces.

    Args:
        space: ``"shared"``, ``"global"``, or ``"all"`` for both.
    """
    text: gl.constexpr = _proxy_ptx(space)
    if space == "shared":
        fence_async_shared()
    else:
        gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)


@gluon.jit
def fence_barrier_init():
    """Make the mbarriers that were initialised before visible to TMA and to the cluster."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32,
        False, 1,
    )  # fmt: skip
