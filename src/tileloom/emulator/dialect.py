"""What differs between the Triton releases that the emulator reads: the one place that asks.

The printed form of TTGIR is the same from 3.6 to 3.9 but for the spelling of descriptor types,
which the reader takes either way. What differs is the compiler's own work after TTGIR, which level
``machine`` repeats: shared-memory allocation and fence insertion.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from typing import Any

import triton

from tileloom.emulator.report import LaunchError

VERSION: tuple[int, ...] = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:3])
SUPPORTED = ((3, 6), (3, 7), (3, 8), (3, 9))
# Since this release the IR says whether tma.store_wait waits for the reads of shared memory only;
# before, it always did.
STORE_WAIT_SAYS_READ_ONLY = VERSION >= (3, 8)
# Since this release the compiler lets CTAs of a cluster meet after the mbarrier.inits of barriers
# that they share.
CLUSTER_MEETS_AFTER_INIT = VERSION >= (3, 8)
# The first release whose compiler puts a proxy fence between cp.async and wgmma in a tl.dot loop.
PIPELINED_DOT_HAS_FENCE = VERSION >= (3, 7, 1)
# The first release whose compiler puts fence.mbarrier_init before a relaxed barrier of a cluster.
RELAXED_BARRIER_HAS_FENCE = VERSION >= (3, 9)
# The first release whose compiler lets the threads of a program meet before an atomic releases.
ATOMICS_MEET_BEFORE = VERSION >= (3, 9)


def check_version() -> None:
    """Refuse a Triton whose IR nobody has looked at.

    Raises:
        LaunchError: If the installed Triton is not one of `SUPPORTED`.
    """
    if VERSION[:2] not in SUPPORTED:
        known = ", ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise LaunchError(
            f"emulator: triton {triton.__version__} is installed; its IR is known for {known}. "
            "Try: install one of these."
        )


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Leave out the note of 3.9 about its default for fused multiply-add."""
    if VERSION < (3, 9):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TRITON_DEFAULT_FP_FUSION")
        yield


def run_machine_passes(module: Any, capability: int, *, fences: bool = True) -> None:
    """Repeat what the compiler does between TTGIR and LLVM: shared memory and fences.

    Args:
        module: The TTGIR module; it is changed in place.
        capability: For example 90.
        fences: Whether to insert fences as well, which takes seconds on 3.9.
    """
    from triton._C.libtriton import ir, nvidia, passes

    ptx_version = 86
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    if VERSION >= (3, 9):
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    else:
        passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    if fences:
        nvidia.passes.ttnvgpuir.add_proxy_fence_insertion(manager, capability)
    manager.run(module, "tileloom_machine")


def kept_stages(language: str, level: str) -> tuple[str, ...]:
    """Return the compiler stages that run before the emulator takes the IR.

    Args:
        language: ``gluon`` or ``triton``.
        level: ``ttir``, ``ttgir`` or ``machine``. Gluon has no TTIR: its first level is TTGIR.

    Returns:
        Stage names; `glir` is the name that Triton 3.9 gives to Gluon's own.
    """
    if level == "ttir" and language != "gluon":
        return ("ttir",)
    return ("ttir", "ttgir", "glir")
