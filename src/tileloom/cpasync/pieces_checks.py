"""What the copies know of their arguments while a kernel is traced, and refuse in words.

An address is known to be unaligned where it is a constant offset from an aligned base, or a
constant. Where nothing is known, an assertion of the DSL is left in the kernel: it costs nothing,
unless the kernel is compiled with ``--enable-assertions`` (or CUTE_DSL_ENABLE_ASSERTIONS=1). Then
the first thread that breaks the rule prints the text and stops the kernel.
"""

from __future__ import annotations

import math
import re

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass.base_dsl.typing import Integer
from cutlass.cute.testing import assert_ as assert_at_run_time
from cutlass.cutlass_dsl import CuTeDSL

from tileloom.errors import OptionError, UnsupportedError

_STATIC_OFFSET = re.compile(r'!cute\.int_tuple<"(-?\d+)">')
# Operations that give back the address of their first operand.
_SAME_ADDRESS = {
    "builtin.unrealized_conversion_cast",
    "cute.assume",
    "cute.get_iter",
    "cute.inttoptr",
    "cute.make_view",
    "cute.recast_iter",
}
_SPACES = {
    "gmem": ("global memory", ("gmem", "generic")),
    "smem": ("shared memory", ("smem", "generic", "dsmem")),
    "barrier": ("shared memory", ("smem", "generic")),
    "descriptor": ("global memory", ("gmem", "generic")),
}


def known_int(value):
    """The number behind a Python or DSL integer, or None where only the running kernel has it."""
    value = value.value if isinstance(value, Integer) else value
    return value if isinstance(value, int) else None


def _element_bytes(pointer_type):
    width = getattr(pointer_type.value_type, "width", 0)
    return width // 8 if width % 8 == 0 else 0


def _step(operation, pointer_type):
    """How many bytes an operation adds to its first operand's address; None if unknown."""
    if operation.name in _SAME_ADDRESS:
        return 0
    if operation.name == "cute.add_offset":
        offset = _STATIC_OFFSET.fullmatch(str(operation.operands[1].type))
        size = _element_bytes(pointer_type)
        return int(offset[1]) * size if offset and size else None
    if operation.name == "llvm.getelementptr" and len(operation.operands) == 1:
        indices = list(operation.attributes["rawConstantIndices"])
        width = getattr(operation.attributes["elem_type"].value, "width", 0)
        return indices[0] * (width // 8) if len(indices) == 1 and width and not width % 8 else None
    return None


def constant_offset(pointer):
    """Follow an address back to its base while only constants are added.

    Args:
        pointer: A pointer of the DSL.

    Returns:
        The constant bytes past the base, and the base's alignment in bytes: 0 for a base that is
        itself the number 0, that is for a constant address.
    """
    value, offset = getattr(pointer, "value", pointer), 0
    while True:
        operation = value.owner
        if isinstance(operation, ir.Block):
            break
        if operation.name == "arith.constant":
            return offset + operation.attributes["value"].value, 0
        step = _step(operation, value.type)
        if step is None:
            break
        offset += step
        operand = operation.operands[0]
        value = getattr(operand, "value", operand)
    return offset, getattr(value.type, "alignment", 1)


def pointer_of(function, argument, given, space, alignment, unless=False):
    """Take the pointer of an argument and check what is known of its address.

    Args:
        function: The caller's function, for the texts.
        argument: The argument's name there.
        given: A pointer, or a tensor whose first element is meant.
        space: ``"gmem"``, ``"smem"``, ``"barrier"`` for shared memory of this block only, or
            ``"descriptor"``.
        alignment: Bytes that the address must be a multiple of.
        unless: Where this run-time boolean holds, nothing lies at the address and it may be any.

    Returns:
        The pointer.

    Raises:
        OptionError: If it is no pointer, lies elsewhere, or is known to be unaligned.
    """
    pointer = given
    if isinstance(given, cute.Tensor):
        pointer = given.iterator
    elif isinstance(given, cutlass.Array):
        pointer = given.data_ptr()
    if not isinstance(pointer, cute.Pointer | cutlass.Pointer):
        raise OptionError(
            f"{function}: {argument} is of type {type(given).__name__}; accepted are pointers and "
            f"tensors of the DSL. Try: tensor.iterator."
        )
    name, accepted = _SPACES[space]
    if pointer.memspace.name not in accepted:
        raise OptionError(
            f"{function}: {argument} lies in {pointer.memspace.name}; accepted is {name}. Try: the "
            f"pointers in the order of {function}'s arguments."
        )
    if (pointer.alignment or 1) % alignment == 0:
        return pointer
    offset, base = constant_offset(pointer)
    if offset % math.gcd(base, alignment):
        where = f"the address {offset}" if base == 0 else f"{offset} bytes past an aligned address"
        raise OptionError(
            f"{function}: {argument} is {where}, no multiple of {alignment}. "
            f"Try: an offset of a multiple of {alignment} bytes."
        )
    aligned = pointer.toint() & (alignment - 1) == 0
    assert_at_run_time(
        cutlass.Boolean(aligned) | cutlass.Boolean(unless),
        f"{function}: {argument} is not a multiple of {alignment} bytes",
    )
    return pointer


def check_bulk_size(function, argument, size):
    """Refuse a byte count that bulk copies cannot have: they move multiples of 16 bytes."""
    known = known_int(size)
    if known is None:
        size = cutlass.Int32(size)
        assert_at_run_time(size & 15 == 0, f"{function}: {argument} is not a multiple of 16 bytes")
        assert_at_run_time(size > 0, f"{function}: {argument} is not positive")
    elif known <= 0 or known % 16:
        raise OptionError(
            f"{function}: {argument} is {known}; accepted are positive multiples of 16 bytes. "
            f"Try: {max(16, known // 16 * 16)} bytes, and the rest by cp_async_gs."
        )


def traced_arch():
    """The architecture that the kernel at hand is compiled for."""
    return CuTeDSL._get_dsl().get_arch_enum()


def require_tma(function):
    """Refuse an architecture without bulk copies, TMA and transaction barriers."""
    arch = traced_arch()
    if arch.major < 9:
        raise UnsupportedError(
            f"{function}: compiled for {arch.name}, which has no TMA; it begins with sm_90. Try: "
            "cp_async_gs, or the option --gpu-arch sm_90a of cute.compile."
        )


def require_cta_pairs(function):
    """Refuse an architecture without pairs of blocks: only sm_100 to sm_11x have them."""
    arch = traced_arch()
    if arch.major not in (10, 11):
        raise UnsupportedError(
            f"{function}: use_2cta is compiled for {arch.name}, which has no pairs of CTAs; "
            "sm_100a, sm_103a and sm_110a have. Try: multicast_mask, or use_2cta=False."
        )
