"""From a user's kernel and signatures to `KernelSpec`s, which can be compiled without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tileloom.errors import OptionError
from tileloom.launch.aot import KernelSpec
from tileloom.launch.occupancy import normal_arch


@dataclass(frozen=True)
class Signature:
    """One form of a kernel's arguments to compile it for, and with which config.

    Attributes:
        types: Type of every parameter that is no constant: ``"*fp32"`` a pointer, ``"i32"``,
            ``"i64"``, ``"fp32"`` a number. With ``":16"`` behind it, as in ``"*fp32:16"``, the
            kernel is compiled for values that 16 divides, and takes no others. A descriptor is
            ``"tensordesc<bf16[64, 64]>"``.
        constants: Values of the compile-time parameters; also of others that never change, such as
            a stride of 1 or an absent tensor, None.
        layouts: For each descriptor of a Gluon kernel the arguments of its `NVMMASharedLayout`.
        num_warps: Warps of a block.
        num_stages: Depth of Triton's pipeline.
        options: Further compile options of Triton, such as ``{"maxnreg": 128}``.
        name: What to call it, for example ``"bf16"``; by default its number.
    """

    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def specs_of(
    kernel: Any, signatures: Sequence[Signature], archs: Sequence[str]
) -> list[KernelSpec]:
    """Describe a kernel's compiled variants, for `compile_in_workers` or `build_bundle`.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made, in a module that can be imported: it is
            compiled in other processes.
        signatures: The forms of its arguments, in order of preference where several fit a call.
        archs: Architectures, for example ``("sm_90",)``.

    Returns:
        One spec for each signature, named ``"kernel[signature]"``.

    Raises:
        OptionError: If the kernel cannot be imported by its name, an architecture is unknown, two
            signatures have one name, or a signature does not fit the function.

    >>> from tileloom.launch.bundle_specs import Signature, specs_of
    >>> from my_kernels import add_kernel
    >>> types = {"x": "*fp32:16", "y": "*fp32:16", "n": "i32"}
    >>> specs = specs_of(add_kernel, [Signature(types, {"BLOCK": 1024})], ["sm_90"])
    """
    function, parameters = _of_kernel(kernel)
    gluon = kernel.is_gluon()
    short = function.rpartition(":")[2]
    names = [f"{short}[{s.name or i}]" for i, s in enumerate(signatures)]
    if len(set(names)) != len(names):
        raise OptionError(
            f"bundle: two signatures of {short} have one name; the names are {', '.join(names)}. "
            "Try: Signature(..., name=...) with a name for each."
        )
    known = tuple(dict.fromkeys(normal_arch(arch) for arch in archs))
    for name, signature in zip(names, signatures):
        _check(name, signature, parameters)
    return [
        _spec(name, function, gluon, parameters, signature, known)
        for name, signature in zip(names, signatures)
    ]


def _of_kernel(kernel: Any) -> tuple[str, list[str]]:
    inner = getattr(kernel, "fn", None)
    if not callable(getattr(kernel, "is_gluon", None)) or not inspect.isfunction(inner):
        raise OptionError(
            f"bundle: kernel is a {type(kernel).__name__}; it must be a function made by "
            "triton.jit or gluon.jit, without a tuner around it. Try: the function itself, and "
            "one signature for each config."
        )
    module, name = inner.__module__, inner.__qualname__
    if module == "__main__" or "." in name:
        raise OptionError(
            f"bundle: kernel '{name}' of {module} cannot be imported by another process, where it "
            "is compiled. Try: define it at the top of a module of its own."
        )
    return f"{module}:{name}", list(kernel.arg_names)


def _check(name: str, signature: Signature, parameters: Sequence[str]) -> None:
    given = [*signature.types, *signature.constants]
    odd = sorted(set(given) ^ set(parameters) | {n for n in given if given.count(n) > 1})
    if odd:
        raise OptionError(
            f"bundle: the types and constants of {name} and the parameters of the function differ "
            f"in {', '.join(odd)}; the parameters are {', '.join(parameters)}. Try: name each of "
            "them once, in types or in constants."
        )
    if wrong := sorted(
        n for n in signature.layouts if "tensordesc" not in signature.types.get(n, "")
    ):
        raise OptionError(
            f"bundle: layouts names {', '.join(wrong)}, which is no descriptor of {name}. Try: "
            "layouts for the parameters of type tensordesc."
        )


def _spec(
    name: str,
    function: str,
    gluon: bool,
    parameters: Sequence[str],
    signature: Signature,
    archs: tuple[str, ...],
) -> KernelSpec:
    types = {n: kind.removesuffix(":16") for n, kind in signature.types.items()}
    for n in signature.layouts:
        types[n] = types[n].removesuffix(">") + ",{layout}>"
    types |= dict.fromkeys(signature.constants, "constexpr")
    return KernelSpec(
        name=name,
        function=function,
        gluon=gluon,
        signature={n: types[n] for n in parameters},
        constexprs=dict(signature.constants),
        archs=archs,
        num_warps=signature.num_warps,
        num_stages=signature.num_stages,
        layouts={n: dict(layout) for n, layout in signature.layouts.items()},
        aligned=tuple(n for n, kind in signature.types.items() if kind.endswith(":16")),
        options=dict(signature.options),
    )
