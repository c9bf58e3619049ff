"""From the launch that a plan makes to a `KernelSpec`, so that what ships is what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tileloom.launch.aot import KernelSpec

ARCHS = ("sm_80", "sm_90", "sm_100")


def row_spec(
    name: str,
    kernel: Any,
    tensors: Sequence[str | None],
    fixed: Sequence[Any],
    num_warps: int,
    registers: int | None = None,
    archs: tuple[str, ...] = ARCHS,
    spills: tuple[int, str] = (0, ""),
    ctas: int = 1,
) -> KernelSpec:
    """Describe a launch of a jitted kernel.

    Args:
        name: The spec's name.
        kernel: The function that `triton.jit` made.
        tensors: Type of each of the kernel's first arguments, such as ``"*bf16"``; None for one
            that is not given. All are taken to be aligned.
        fixed: Its other arguments in order, as the plan passes them.
        num_warps: Warps of a program.
        registers: Registers of a thread at most; None for what the compiler likes.
        archs: Architectures that the launch ships for.
        spills: Bytes of spills that are allowed, and why.
        ctas: CTAs of a cluster, of a Gluon kernel whose programs are clusters.
    """
    constant = {p.name for p in kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    for parameter, value in zip(kernel.arg_names, (*tensors, *fixed), strict=True):
        if parameter in constant or value is None:
            signature[parameter] = "constexpr"
            constexprs[parameter] = value
        elif isinstance(value, str):
            signature[parameter] = value
        elif isinstance(value, float):
            signature[parameter] = "fp32"
        else:
            signature[parameter] = "i32" if -(2**31) <= value < 2**31 else "i64"
    options = {} if registers is None else {"maxnreg": registers}
    if ctas > 1:
        options["num_ctas"] = ctas
    return KernelSpec(
        name=name,
        function=f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        gluon=ctas > 1,
        signature=signature,
        constexprs=constexprs,
        archs=archs,
        num_warps=num_warps,
        options=options,
        aligned=tuple(n for n, kind in signature.items() if kind.startswith("*")),
        spill_budget=spills[0],
        spill_reason=spills[1],
    )
