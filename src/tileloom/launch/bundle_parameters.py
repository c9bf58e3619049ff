"""What a kernel that Triton compiled is launched with: its parameters, and their values.

In order: a pointer or number for each parameter that is no constant; for a descriptor its tensor
map, then the tensor's sizes as 32-bit and its strides as 64-bit numbers; at the end two pointers to
scratch memory. Triton 3.6 to 3.9 agree in this, and `ptx_fields` checks it for every kernel.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tileloom.launch import descriptors, driver
from tileloom.launch.bundle_format import Parameter
from tileloom.launch.scratch import POINTERS

_BLOCK = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")


def block_of(kind: str) -> tuple[str, tuple[int, ...]] | None:
    """Return element type and block of a descriptor's type, None for any other type."""
    match = _BLOCK.match(kind)
    return match and (match[1], tuple(int(n) for n in match[2].split(",")))


def types_of(parameters: Sequence[Parameter]) -> list[str]:
    """List the types of the binary's parameters in the driver's words.

    Args:
        parameters: The function's parameters.

    Returns:
        Types for `driver.packed_launch`; the last two are the scratch pointers.
    """
    types: list[str] = []
    for parameter in parameters:
        if (block := block_of(parameter.type)) is not None:
            rank = len(block[1])
            types += [driver.TENSOR_MAP, *["i32"] * rank, *["i64"] * rank]
        elif parameter.type == "bf16":
            types.append("u16")  # its bits
        elif parameter.type != "constexpr":
            types.append(parameter.type)
    return [*types, *POINTERS]


def values_of(parameters: Sequence[Parameter], arguments: Mapping[str, Any]) -> list[Any]:
    """List the values of the binary's parameters, without the scratch pointers.

    Args:
        parameters: The function's parameters.
        arguments: The call's arguments by name; they fit the parameters.

    Raises:
        LaunchError: If the driver refuses to encode a descriptor.
    """
    values: list[Any] = []
    for parameter in parameters:
        kind = parameter.type
        if kind == "constexpr":
            continue
        value = arguments[parameter.name]
        if parameter.descriptor is not None:
            maps = descriptors.tensor_maps(descriptors.of(value), parameter.descriptor)
            values.append(maps[value.base.data_ptr()])
            values += [*map(int, value.shape), *map(int, value.strides)]
        elif kind.startswith("*"):
            values.append(value if type(value) is int else value.data_ptr())
        elif kind == "fp32":  # as C converts, beyond the largest number lies infinity
            values.append(ctypes.c_float(value).value)
        elif kind == "fp16":
            values.append(value if abs(value) < 65520 else math.copysign(math.inf, value))
        elif kind == "bf16":  # as Triton's launcher converts: the upper half
            values.append(struct.unpack("<I", bytes(ctypes.c_float(value)))[0] >> 16)
        else:
            values.append(value)
    return values


def fields_of(types: Sequence[str]) -> list[tuple[int, int]]:
    """Return offset and size that each parameter has in a PTX text, at its natural alignment.

    Args:
        types: What `types_of` made.

    Raises:
        OptionError: If a type cannot be packed.
    """
    sizes = [struct.calcsize("<" + driver.slot_code(kind).rstrip("x")) for kind in types]
    return _laid_out((size, min(size, 64)) for size in sizes)


def _laid_out(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    fields: list[tuple[int, int]] = []
    end = 0
    for size, unit in sizes:
        start = -(-end // unit) * unit
        fields.append((start, size))
        end = start + size
    return fields


_PTX_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\(([^)]*)\)")
_PTX_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?")


def ptx_fields(ptx: str) -> list[tuple[int, int]]:
    """Return offset and size of every parameter that a PTX text declares.

    Args:
        ptx: The text of one kernel.
    """
    entry = _PTX_ENTRY.search(ptx)
    found = _PTX_PARAMETER.findall(entry[1] if entry else "")
    sizes = [(int(align or 0), int(bits) // 8 * int(count or 1)) for align, bits, count in found]
    return _laid_out((size, align or size) for align, size in sizes)
