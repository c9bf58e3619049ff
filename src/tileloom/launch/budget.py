"""What a shipped kernel must keep to: the one statement of it, for tests and `tileloom inspect`."""

from __future__ import annotations

import re

from tileloom.launch import compat
from tileloom.launch.aot import CompiledKernel, CompileResult, KernelSpec, serialises_wgmma
from tileloom.launch.occupancy import limits_of


def faults(spec: KernelSpec, result: CompileResult) -> tuple[str, ...]:
    """List what is wrong with a compiled kernel.

    Args:
        spec: The kernel, with its budget.
        result: What the compiler made of it.

    Returns:
        One sentence for each fault; empty if the kernel may ship. A failed compile is a fault, and
        so are spills over the budget, a budget without a reason, more shared memory than a block
        may have, a block that no SM can hold, serialised wgmma, an unfenced pipeline (see
        `is_unfenced`), and a spec whose `threads` is not what the kernel is launched with.
    """
    if result.error is not None:
        return (result.error,)
    limits = limits_of(result.arch)
    found: list[str] = []
    if result.spill_bytes > spec.spill_budget:
        found.append(f"spills {result.spill_bytes} bytes, its budget is {spec.spill_budget}")
    if spec.spill_budget and not spec.spill_reason.strip():
        found.append(f"may spill {spec.spill_budget} bytes, but names no measurement as a reason")
    if result.shared_bytes > limits.shared_bytes_block:
        found.append(
            f"needs {result.shared_bytes} bytes of shared memory, a block of {result.arch} may "
            f"have {limits.shared_bytes_block}"
        )
    elif result.occupancy == 0:
        found.append(
            f"cannot be launched: {result.threads} threads of {result.registers} registers do not "
            f"fit an SM of {result.arch}"
        )
    found += [f"ptxas: {text}" for text in result.ptxas_warnings if serialises_wgmma(text)]
    if is_unfenced(result):
        found.append(
            f"feeds wgmma by cp.async, and Triton {result.triton} puts no proxy fence between them"
        )
    if spec.threads is not None and spec.threads != result.threads:
        found.append(f"has {result.threads} threads, its spec says {spec.threads}")
    return tuple(found)


def is_unfenced(kernel: CompiledKernel) -> bool:
    """Say whether a kernel may read stale shared memory: cp.async into wgmma without a fence.

    wgmma reads shared memory through the asynchronous proxy, cp.async writes it through the
    generic one; before 3.7.1 Triton's pipeliner puts no `fence.proxy.async` between the two. The
    test is that one kernel has both instructions: cp.async that feeds something else counts too,
    which no kernel of the package needs. TMA copies (`cp.async.bulk`) go through the asynchronous
    proxy themselves and need no fence.
    """
    if compat.has_wgmma_proxy_fence(compat.parse_version(kernel.triton)):
        return False
    ptx = kernel.ptx
    return "wgmma.mma_async" in ptx and re.search(r"cp\.async\.c[ag]\.", ptx) is not None
