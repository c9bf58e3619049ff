"""Which compiled kernel a launch needs: Triton's specialisation of arguments, without Triton.

Triton compiles a kernel anew for every list of (type, property) pairs that its arguments give.
The rules below are those of its own binder, the same from 3.6 to 3.9; a property test compares
the two on each version.

=====================  ==========================================  ==========================
argument               type                                        property
=====================  ==========================================  ==========================
constexpr              ``"constexpr"``                             the value
None                   ``"constexpr"``                             None
bool                   ``"u1"``                                    None
int                    i32, i64 or u64, the first that holds it    ``"D"``: 16 divides it
the int 1              ``"constexpr"``                             1
float                  ``"fp32"``                                  None
tensor                 ``"*fp16"``, read-only ``"*kfp16"``         ``"D"``: 16 divides address
descriptor             ``"tensordesc<fp16[64, 64]>"``              None
=====================  ==========================================  ==========================

`do_not_specialize` leaves the property None and the 1 an i32, `do_not_specialize_on_alignment`
leaves ``""`` for ``"D"``. An annotation such as `tl.int64` gives the type.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Specialization = tuple[Any, Any]

_DTYPES = {
    "torch.bool": "u1", "torch.uint8": "u8", "torch.int8": "i8", "torch.uint16": "u16",
    "torch.int16": "i16", "torch.uint32": "u32", "torch.int32": "i32", "torch.uint64": "u64",
    "torch.int64": "i64", "torch.float16": "fp16", "torch.bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float64": "fp64", "torch.float8_e4m3fn": "fp8e4nv",
    "torch.float8_e5m2": "fp8e5", "torch.float8_e4m3fnuz": "fp8e4b8",
    "torch.float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip
_names: dict[Any, str] = {}


INTEGERS = {
    **{f"i{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"u{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""The least and the largest number of each integer type."""


class Unsupported(Exception):
    """An argument of a kind that only Triton's own path takes: a tuple, for example."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a jitted function, as its decorator and its annotation made it.

    Attributes:
        name: Its name.
        is_constexpr: Whether it is compiled in by value.
        is_const: Whether it is a read-only pointer.
        specialize: Whether the values 1 and multiples of 16 are compiled in.
        align: Whether multiples of 16 are.
        kind: The type that the annotation gives, ``""`` if none.
        default: The default, or `MISSING`.
    """

    name: str
    is_constexpr: bool
    is_const: bool
    specialize: bool
    align: bool
    kind: str
    default: Any


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


def parameters_of(kernel: Any) -> tuple[Parameter, ...] | None:
    """Read the parameters of a jitted function.

    Args:
        kernel: What `triton.jit` or `gluon.jit` made.

    Returns:
        The parameters; None if the function has some that a guard cannot pass on: those that no
        call by position reaches, and names that begin with an underscore, which the guard keeps.
    """
    import inspect

    found: list[Parameter] = []
    for p in kernel.params:
        by_position = p._param.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if not by_position or p.name.startswith("_"):
            return None
        kind = str(p.annotation_type or "")
        found.append(
            Parameter(
                p.name,
                bool(p.is_constexpr),
                bool(p.is_const),
                not p.do_not_specialize and kind != "u1" and kind[:2] not in ("fp", "bf"),
                not p.do_not_specialize_on_alignment,
                kind,
                p.default if p.has_default else MISSING,
            )
        )
    return tuple(found)


def element_name(dtype: Any) -> str:
    """Return Triton's name of a torch dtype.

    Raises:
        Unsupported: If Triton has none.
    """
    name = _names.get(dtype)
    if name is None:
        name = _DTYPES.get(str(dtype))
        if name is None:
            raise Unsupported(str(dtype))
        _names[dtype] = name
    return name


def is_descriptor(value: Any) -> bool:
    """Whether this is a TMA descriptor for tiles: Triton's `TensorDescriptor`, or Gluon's."""
    return hasattr(value, "block_shape") and not hasattr(value, "pixel_box_lower_corner")


def _plain(value: Any, is_const: bool, specialize: bool, align: bool) -> Specialization:
    kind = type(value)
    if kind is int:
        if specialize and value == 1:
            return "constexpr", 1
        name = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        if not -(2**63) <= value < 2**64:
            raise Unsupported(f"{value} needs more than 64 bits")
        return name, (("D" if align and value % 16 == 0 else "") if specialize else None)
    if kind is bool:
        return "u1", None
    if kind is float:
        return "fp32", None
    if value is None:
        return "constexpr", None
    if hasattr(value, "data_ptr"):
        name = ("*k" if is_const else "*") + element_name(value.dtype)
        if not specialize:
            return name, None
        return name, "D" if align and value.data_ptr() % 16 == 0 else ""
    if is_descriptor(value):
        layout = getattr(value, "layout", None)
        end = f",{layout!r}>" if layout is not None else ">"
        box = f"{element_name(value.base.dtype)}{list(value.block_shape)}"
        return f"tensordesc<{box}{end}", None
    raise Unsupported(f"a {kind.__name__}")


def specialize(parameter: Parameter, value: Any) -> Specialization:
    """Return type and property of one argument, as Triton's binder gives them.

    Args:
        parameter: The parameter that it is for.
        value: The argument.

    Raises:
        Unsupported: If only Triton's own path takes such an argument.
    """
    if parameter.is_constexpr:
        return "constexpr", value
    if parameter.kind:
        if not parameter.specialize:
            return parameter.kind, None
        return parameter.kind, _plain(value, parameter.is_const, True, parameter.align)[1]
    return _plain(value, parameter.is_const, parameter.specialize, parameter.align)


def reason_against(parameter: Parameter, value: Any) -> str:
    """Say why a parameter cannot have a value; empty if it can, as far as its annotation tells.

    Args:
        parameter: The parameter.
        value: The argument.
    """
    if parameter.is_constexpr:
        try:
            hash(value)
        except TypeError:
            return "compiled in by its value, which must be one that can be hashed. Try: a tuple"
        return ""
    kind = parameter.kind
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        with contextlib.suppress(TypeError):
            if low <= operator.index(value) <= high:
                return ""
        return f"annotated as {kind}, an integer from {low} to {high}. Try: another annotation"
    if kind.startswith(("fp", "bf")) and not hasattr(value, "__float__"):
        return f"annotated as {kind}, a number. Try: another annotation"
    if kind == "fp16" and 65520 <= abs(value) < math.inf:  # Triton rounds none to infinity
        return "annotated as fp16, whose largest number is 65504. Try: another annotation"
    return ""


def specializer(parameters: Sequence[Parameter]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function from a launch's arguments to the key of the kernel that it needs.

    Args:
        parameters: The jitted function's.

    Returns:
        `key(arguments)`: the pairs of `specialize`, and the types of compile-time values, because
        1, 1.0 and True are equal and are compiled differently. It raises `Unsupported` for
        arguments that cannot be told apart so.
    """
    constexprs = [i for i, p in enumerate(parameters) if p.is_constexpr]

    def key(arguments: Sequence[Any]) -> tuple[Any, ...]:
        pairs = tuple(map(specialize, parameters, arguments))
        kinds = tuple([exact(arguments[i]) for i in constexprs])
        return pairs, kinds

    return key


_BY_VALUE = frozenset({int, bool, str, type(None)})


def exact(value: Any) -> Any:
    """Return what, beside the value itself, tells a compile-time value from all that equal it.

    Raises:
        Unsupported: If equality says nothing about such values.
    """
    kind = type(value)
    if kind in _BY_VALUE or kind.__eq__ is object.__eq__:
        return kind
    if kind is float:
        return repr(value)  # 0.0 and -0.0
    if kind.__module__ == "triton.language.core" and kind.__name__ == "dtype":
        return kind
    raise Unsupported(f"a compile-time {kind.__name__}")
