"""From a user's kernel and signatures to `KernelSpec`s, which can be compiled without a GPU."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tileloom.errors import OptionError, shown_value
from tileloom.launch.aot import KernelSpec
from tileloom.launch.keywords import WARPS
from tileloom.launch.occupancy import normal_arch

_ELEMENT = re.compile(r"[iu](1|8|16|32|64)|fp(16|32|64)|bf16|fp8(e4nv|e5|e4b15|e4b8|e5b16)")
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[\d+(, ?\d+)*\]>")
_SPELLED = {
    "bool": "i1", "half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32",
    "float32": "fp32", "double": "fp64", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "int": "i32", **{f"int{n}": f"i{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"u{n}" for n in (8, 16, 32, 64)},
}  # fmt: skip


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
            signatures have one name, a signature does not fit the function, or anything is of
            another type than said here.

    >>> from tileloom.launch.bundle_specs import Signature, specs_of
    >>> from my_kernels import add_kernel
    >>> types = {"x": "*fp32:16", "y": "*fp32:16", "n": "i32"}
    >>> specs = specs_of(add_kernel, [Signature(types, {"BLOCK": 1024})], ["sm_90"])
    """
    function, parameters = _of_kernel(kernel)
    _check_lists(signatures, archs)
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


def _check_lists(signatures: Any, archs: Any) -> None:
    one = isinstance(signatures, Signature)
    if one or not isinstance(signatures, Sequence) or isinstance(signatures, str):
        raise OptionError(
            f"bundle: signatures is a {type(signatures).__name__}; it must be a list of "
            f"Signature. Try: {'[signature]' if one else '[Signature(types, constants)]'}."
        )
    for each in signatures:
        if not isinstance(each, Signature):
            raise OptionError(
                f"bundle: signatures has a {type(each).__name__}; each must be a Signature. Try: "
                "Signature(types, constants)."
            )
    if isinstance(archs, str) or not isinstance(archs, Sequence):
        given = repr(archs) if isinstance(archs, (str, int)) else f"a {type(archs).__name__}"
        raise OptionError(
            f"bundle: archs is {given}; it must be a list of names. Try: archs=['sm_90']."
        )
    for arch in archs:
        if not isinstance(arch, str):
            raise OptionError(
                f"bundle: archs has {shown_value(arch)}, of type {type(arch).__name__}; each must "
                "be a name. Try: archs=['sm_90']."
            )


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
    for parameter, kind in signature.types.items():
        _check_type(name, parameter, kind)
    _check_config(name, signature)
    if wrong := sorted(
        n for n in signature.layouts if "tensordesc" not in signature.types.get(n, "")
    ):
        raise OptionError(
            f"bundle: layouts names {', '.join(wrong)}, which is no descriptor of {name}. Try: "
            "layouts for the parameters of type tensordesc."
        )


def _check_type(name: str, parameter: str, kind: Any) -> None:
    text = str(kind).removeprefix("torch.")
    if isinstance(kind, str):
        inner = _DESCRIPTOR.fullmatch(kind)
        element = inner[1] if inner else re.sub(r"^\*k?|:16$", "", kind)
        if _ELEMENT.fullmatch(element):
            return
        meant = _SPELLED.get(element)
        hint = f"Did you mean '{kind.replace(element, meant, 1)}'?" if meant else ""
    else:
        meant = _SPELLED.get(text)
        hint = f"Try: '*{meant}' for a tensor, '{meant}' for a number." if meant else ""
    raise OptionError(
        f"bundle: the type of {parameter} of {name} is {shown_value(kind)}; it must be a text such "
        f"as '*bf16' (a tensor), 'i32' or 'fp32' (a number), or 'tensordesc<bf16[64, 64]>'. "
        f"{hint or 'Try: one of these; a compile-time parameter stands in constants.'}"
    )


def _check_config(name: str, signature: Signature) -> None:
    warps, stages = signature.num_warps, signature.num_stages
    if type(warps) is not int or warps not in WARPS:
        raise OptionError(
            f"bundle: num_warps of {name} is {shown_value(warps)}; Triton takes 1, 2, 4, 8, 16 or "
            "32. Try: 4."
        )
    if type(stages) is not int or stages < 0:
        raise OptionError(
            f"bundle: num_stages of {name} is {shown_value(stages)}; it must be an integer from 0 "
            "on. Try: 3."
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
