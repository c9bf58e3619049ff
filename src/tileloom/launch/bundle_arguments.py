"""From a call's arguments to a variant that takes them, or a sentence that says why none does."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tileloom.errors import DeviceError, OptionError
from tileloom.launch.bundle_format import Parameter, Variant
from tileloom.launch.bundle_parameters import block_of
from tileloom.launch.specialize import INTEGERS, Unsupported, element_name, is_descriptor

_TRUTHS = ("i1", "u1")


def bind(
    name: str, parameters: Sequence[Parameter], args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Give each argument of a call the name of its parameter.

    Args:
        name: The kernel's, for the texts.
        parameters: The function's.
        args: Arguments by position.
        named: Arguments by keyword.

    Returns:
        The arguments by name; compile-time parameters may be missing.

    Raises:
        OptionError: If there are too many arguments, one is unknown, given twice or missing.
    """
    names = [p.name for p in parameters]
    whole = f"{name}({', '.join(names)})"
    if len(args) > len(names):
        raise OptionError(
            f"bundle: {len(args)} arguments are given, {whole} takes {len(names)}. Try: name "
            "compile options when the bundle is built, not at the launch."
        )
    values = dict(zip(names, args))
    for given, value in named.items():
        if given in values:
            raise OptionError(f"bundle: {given} is given twice to {whole}. Try: give it once.")
        if given not in names:
            near = difflib.get_close_matches(given, names, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Try: the names above."
            raise OptionError(f"bundle: {whole} has no parameter {given}. {hint}")
        values[given] = value
    missing = [p.name for p in parameters if p.name not in values and not p.optional]
    if missing:
        raise OptionError(
            f"bundle: {', '.join(missing)} of {whole} {'is' if len(missing) == 1 else 'are'} not "
            "given. Try: give every parameter that is no compile-time constant."
        )
    return values


def device_of(name: str, values: Mapping[str, Any]) -> Any:
    """Return the GPU on which all tensors of a call lie, None if there is no tensor.

    Args:
        name: The kernel's, for the texts.
        values: The arguments by name.

    Raises:
        DeviceError: If a tensor is on no GPU, or two are on different ones.
    """
    found: tuple[str, Any] | None = None
    for parameter, value in values.items():
        device = getattr(value, "device", None)
        if device is None:
            device = getattr(getattr(value, "base", None), "device", None)  # of a descriptor
            if device is None:
                continue
        if device.type != "cuda":
            raise DeviceError(
                f"bundle: {parameter} of kernel '{name}' is on the device {device}; a bundled "
                f"kernel takes tensors on a GPU. Try: {parameter}.to(a GPU)."
            )
        if found is not None and device != found[1]:
            raise DeviceError(
                f"bundle: {found[0]} and {parameter} of kernel '{name}' are on {found[1]} and "
                f"{device}; all tensors of a launch lie on one GPU. Try: {parameter}.to({found[0]}"
                ".device)."
            )
        found = found or (parameter, device)
    return found and found[1]


def choose(name: str, variants: Sequence[Variant], values: Mapping[str, Any]) -> Variant:
    """Return the first variant that takes the arguments.

    Args:
        name: The kernel's, for the texts.
        variants: All for one architecture, in order of preference.
        values: What `bind` made.

    Raises:
        OptionError: If none takes them; the text says for each one why. Also if several take them
            that differ in a compile-time parameter which the call leaves out.
    """
    against = [reasons_against(variant, values) for variant in variants]
    fits = [variant for variant, why in zip(variants, against) if not why]
    if not fits:
        raise OptionError(_nothing_fits(name, variants, against))
    for parameter in fits[0].parameters:
        if parameter.name in values:
            continue
        known = {repr(other.constants[parameter.name]) for other in fits}
        if len(known) > 1:
            raise OptionError(
                f"bundle: kernel '{name}' takes these arguments with {parameter.name} as "
                f"{' or '.join(sorted(known))}. Try: give {parameter.name}."
            )
    return fits[0]


def form_of(values: Mapping[str, Any], exact: Collection[str]) -> tuple[Any, ...]:
    """Return all of a call's arguments that `choose` looks at: calls of one form get one variant.

    Args:
        values: What `bind` made.
        exact: Parameters that are a constant in some variant: of these the value itself counts.

    Returns:
        A key, which may turn out not to be hashable.
    """
    form: list[Any] = [*values]
    for name, value in values.items():
        kind = type(value)
        if hasattr(value, "data_ptr"):
            form += (value.dtype, value.data_ptr() & 15 == 0)
        elif name in exact:
            form += (kind, value)
        elif kind is int:  # bits without the sign: what decides whether a type holds it
            form += ((~value if value < 0 else value).bit_length(), value < 0, value & 15 == 0)
        elif is_descriptor(value):
            layout = getattr(value, "layout", None)
            form += (value.base.dtype, tuple(value.block_shape), layout)
        else:
            form.append(kind)
    return tuple(form)


_SHOWN = 8


def _nothing_fits(name: str, variants: Sequence[Variant], against: Sequence[Sequence[str]]) -> str:
    remedy = "Try: other arguments, or a bundle that is built for these."
    if len(variants) == 1:
        why = "; ".join(against[0])
        return f"bundle: kernel '{name}' does not take these arguments: {why}. {remedy}"
    # The nearest first: what has the fewest reasons is what the caller most likely meant.
    order = sorted(range(len(variants)), key=lambda i: len(against[i]))
    lines = [f"- {variants[i].name}: {'; '.join(against[i])}" for i in order[:_SHOWN]]
    if len(order) > _SHOWN:
        lines.append(f"- and {len(order) - _SHOWN} more variants, which are farther off")
    return "\n".join(
        [f"bundle: no variant of kernel '{name}' takes these arguments:", *lines, remedy]
    )


def reasons_against(variant: Variant, values: Mapping[str, Any]) -> list[str]:
    """Say why a variant does not take the arguments; nothing if it does.

    Args:
        variant: The variant.
        values: What `bind` made.
    """
    found: list[str] = []
    for parameter in variant.parameters:
        if parameter.name not in values:
            continue
        why = _reason(parameter, values[parameter.name])
        if why:
            found.append(f"{parameter.name} {why}")
    return found


def _reason(parameter: Parameter, value: Any) -> str:
    kind = parameter.type
    if kind == "constexpr":
        same = value == parameter.value and type(value) is type(parameter.value)
        # A type of Triton's is kept by its name.
        if same or (type(parameter.value) is str and str(value) == parameter.value):
            return ""
        return f"is {_shown(value)}, it takes {parameter.value!r}"
    if kind.startswith("*"):
        return _pointer_reason(parameter, value)
    if parameter.descriptor is not None:
        return _descriptor_reason(parameter, value)
    if kind in _TRUTHS:
        return "" if type(value) is bool else f"is {_shown(value)}, it takes True or False"
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        if type(value) is not int or not low <= value <= high:
            return f"is {_shown(value)}, it takes an integer from {low} to {high}"
        if parameter.aligned and value % 16:
            return f"is {value}, it takes multiples of 16"
        return ""
    if type(value) not in (int, float) or (type(value) is int and abs(value) >= 2**1023):
        return f"is {_shown(value)}, it takes a number"
    return ""


def _pointer_reason(parameter: Parameter, value: Any) -> str:
    address = value
    if type(value) is not int:
        if not hasattr(value, "data_ptr"):
            return f"is {_shown(value)}, it takes a tensor"
        element = _element(value)
        wanted = parameter.type[1:].removeprefix("k")  # of a read-only pointer
        if element != wanted:
            return f"has elements of type {element}, it takes {wanted}"
        address = value.data_ptr()
    if not 0 <= address < 2**64:
        return f"is {address}, it takes an address"
    if parameter.aligned and address % 16:
        return "begins at an address that 16 does not divide, it takes only aligned ones"
    return ""


def _descriptor_reason(parameter: Parameter, value: Any) -> str:
    if not is_descriptor(value):
        return f"is {_shown(value)}, it takes a TMA descriptor"
    block = block_of(parameter.type)
    assert block is not None, "a parameter with a descriptor has a descriptor's type"
    element, box = block
    if _element(value.base) != element:
        return f"has elements of type {_element(value.base)}, it takes {element}"
    if tuple(value.block_shape) != box:
        return f"has blocks of {list(value.block_shape)}, it takes {list(box)}"
    layout = getattr(value, "layout", None)
    wanted = parameter.type.partition(">")[0].partition("],")[2]
    if layout is not None and wanted and _squeezed(repr(layout)) != _squeezed(wanted):
        return f"has the layout {layout}, it takes {wanted}"
    return ""


def _squeezed(text: str) -> str:
    return text.replace(" ", "")


def _element(tensor: Any) -> str:
    dtype = getattr(tensor, "dtype", "unknown")
    try:
        return element_name(dtype)
    except Unsupported:
        return str(dtype)


def _shown(value: Any) -> str:
    """A short text of a value; of anything with contents only its type."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 40 else value[:37] + "...")
    return f"a {type(value).__name__}"
