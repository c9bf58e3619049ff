"""The emulator's picture of a Triton module: types, operations, blocks, functions and locations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Loc:
    """A place in the user's source: file, line, column, the variable's name and the call site."""

    file: str = "?"
    line: int = 0
    col: int = 0
    name: str | None = None
    caller: Loc | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def chain(self) -> list[Loc]:
        """Return this place and the call sites around it, the innermost first."""
        places: list[Loc] = []
        here: Loc | None = self
        while here is not None:
            if here.line:
                places.append(here)
            here = here.caller
        return places


UNKNOWN = Loc()


@dataclass(frozen=True)
class Type:
    """A type of the IR.

    Attributes:
        kind: ``scalar``, ``tensor``, ``memdesc``, ``ptr``, ``desc``, ``token`` or ``other``.
        elem: The element's name, for example ``bf16``; for pointers ``ptr``.
        shape: Sizes; empty for scalars.
        text: The type as the compiler printed it.
        pointee: For pointers and tensors of pointers, the element they point to.
        layout: The layout attribute's text, if the type has one.
    """

    kind: str
    elem: str = ""
    shape: tuple[int, ...] = ()
    text: str = ""
    pointee: str = ""
    layout: str = ""

    @property
    def is_float(self) -> bool:
        """Whether the element is a floating-point number."""
        return self.elem[:1] == "f" or self.elem == "bf16"


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at a separator that stands outside every bracket and string."""
    parts: list[str] = []
    depth = 0
    start = 0
    quoted = False
    for i, char in enumerate(text):
        if char == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


_SHAPED = re.compile(r"(tensor|!ttg\.memdesc|!tt\.ptr|!tt\.tensordesc)<(.*)>$")
_DIM = re.compile(r"(\d+)x")
_POINTER = re.compile(r"!tt\.ptr<([^<>,]*)")


def _dims(text: str) -> tuple[tuple[int, ...], str]:
    shape: list[int] = []
    while match := _DIM.match(text):
        shape.append(int(match.group(1)))
        text = text[match.end() :]
    return tuple(shape), text


@cache
def parse_type(text: str) -> Type:
    """Read one printed type, for example ``tensor<64x64xbf16, #mma>``."""
    text = text.strip()
    match = _SHAPED.match(text)
    if match is None:
        kind = "token" if text == "!ttg.async.token" else "other" if text[:1] == "!" else "scalar"
        return Type(kind, text, (), text)
    head, body = match.groups()
    parts = split_top(body)
    if head == "!tt.ptr":
        return Type("ptr", "ptr", (), text, pointee=parts[0])
    if head == "!tt.tensordesc":
        inner = re.match(r"tensor<(.*)>$", parts[0])
        parts = split_top(inner.group(1)) if inner else parts
    shape, elem = _dims(parts[0])
    kind = {"tensor": "tensor", "!ttg.memdesc": "memdesc", "!tt.tensordesc": "desc"}[head]
    if kind == "desc":  # descriptors alone tell signed integers from unsigned ones
        elem = re.sub(r"^[su]i", "i", elem)
    layout = parts[1] if len(parts) > 1 else ""
    pointer = _POINTER.match(elem)
    if pointer:
        return Type(kind, "ptr", shape, text, pointer.group(1), layout)
    return Type(kind, elem, shape, text, layout=layout)


@dataclass
class Op:
    """One operation, taken apart.

    Attributes:
        name: For example ``ttng.wait_barrier``.
        results: Slots that the results go to.
        operands: Slots of all operands in the order of the text.
        groups: How many operands stand in each ``[...]`` or ``(...)`` list, in order.
        words: What is left of the text: numbers, keywords.
        strings: Quoted strings of the text, in order.
        attrs: Attribute dictionary and ``key = value`` words.
        signature: The types after the colon.
        loc: Where it comes from.
        regions: Nested blocks.
        text: The printed text without its location.
    """

    name: str
    results: list[int] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    attrs: dict[str, str] = field(default_factory=dict)
    signature: str = ""
    loc: Loc = UNKNOWN
    regions: list[list[Block]] = field(default_factory=list)
    text: str = ""
    successors: list[tuple[str, list[int]]] = field(default_factory=list)
    partition_warps: list[int] = field(default_factory=list)
    run: Any = None
    kind: int = 0

    def int_attr(self, name: str, default: int | None = None) -> int:
        """Return an integer attribute; without a default it must be there."""
        text = self.attrs.get(name)
        if text is None:
            if default is None:
                raise KeyError(f"{self.name} has no attribute '{name}'")
            return default
        return int(text.split(":")[0])

    def list_attr(self, name: str) -> tuple[int, ...]:
        """Return an ``array<i32: 1, 0>`` attribute as integers."""
        body = self.attrs[name]
        return tuple(int(x) for x in body[body.index(":") + 1 : -1].split(","))

    def result_types(self) -> list[Type]:
        """Return the types after ``->`` or ``to``, else those after the colon."""
        text = self.signature
        for arrow in (" -> ", " to "):
            _, found, after = text.rpartition(arrow)
            if found:
                text = after
                break
        if text.startswith("(") and text.endswith(")"):
            text = text[1:-1]
        return [parse_type(t) for t in split_top(text)]

    def operand_types(self) -> list[Type]:
        """Return the types before ``->`` or ``to`` (all, if there is no arrow)."""
        text = self.signature
        for arrow in (" -> ", " to "):
            before, found, _ = text.rpartition(arrow)
            if found:
                text = before
                break
        if text.startswith("(") and text.endswith(")"):
            text = text[1:-1]
        return [parse_type(t) for t in split_top(text)]

    @property
    def type(self) -> Type:
        """The type of the first result."""
        return self.result_types()[0]


@dataclass
class Block:
    """A straight run of operations, its arguments and its label."""

    args: list[int]
    ops: list[Op]
    label: str = ""
    plan: Any = None


@dataclass
class Func:
    """A function: arguments, blocks, and how many slots its values need."""

    name: str
    args: list[int]
    arg_types: list[Type]
    blocks: list[Block]
    slots: int
    loc: Loc = UNKNOWN


@dataclass
class Module:
    """A module: its attributes and its functions; the first one is the kernel."""

    attrs: dict[str, str]
    funcs: dict[str, Func]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def kernel(self) -> Func:
        """The function that a launch runs."""
        return next(iter(self.funcs.values()))

    @property
    def num_warps(self) -> int:
        """Warps of the kernel's main partition."""
        return int(self.attrs.get("ttg.num-warps", "4").split(":")[0])

    @property
    def num_ctas(self) -> int:
        """CTAs of a program: more than one is a cluster."""
        return int(self.attrs.get("ttg.num-ctas", "1").split(":")[0])

    def walk(self) -> Iterator[Op]:
        """Yield every operation of every function, outer before inner."""
        for func in self.funcs.values():
            yield from walk(func.blocks)


def walk(blocks: list[Block]) -> Iterator[Op]:
    """Yield the operations of some blocks, outer before inner."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk(region)
