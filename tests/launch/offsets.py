"""Find 32-bit offsets in the IR of a compiled kernel that may overflow.

`tt.addptr` with a 32-bit offset wraps beyond 2^31 elements. One is harmless where its range follows
from the code alone: constants and `make_range`, and arithmetic of these, are offsets inside a tile.
Anything else needs a proof, listed by the kernel's name in `PROVED_32BIT` of its operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
LIMIT = 2**31

_FUNCTION = re.compile(r"^\s*tt\.func\b.*?@([^\s(]+)\(")
_ASSIGN = re.compile(r"^\s*(%[\w.$-]+) = (.*)$")
_ADDPTR = re.compile(r"tt\.addptr (%[\w.$#-]+), (%[\w.$#-]+)(?: \{[^}]*\})? : (.*)$")
_OFFSET_TYPE = re.compile(r", (?:tensor<(?:\d+x)*)?(i\d+)\b")
_CONSTANT = re.compile(r"arith\.constant (?:dense<)?(-?\d+)>?")
_RANGE = re.compile(r"tt\.make_range \{end = (\d+) : i32, start = (\d+) : i32\}")
_SAME = re.compile(
    r"(?:tt\.(?:splat|broadcast|expand_dims|reshape|trans)|ttg\.convert_layout|arith\.extsi"
    r"|arith\.trunci) (%[\w.$#-]+)"
)
_BINARY = re.compile(r"arith\.(addi|subi|muli|minsi|maxsi|remsi|andi) (%[\w.$#-]+), (%[\w.$#-]+)")
_LOCATION = re.compile(r"^(#loc\d*) = (loc\(.*\))$")


@dataclass(frozen=True)
class Offset:
    """A 32-bit offset whose range is not known from the code: where it is, and its name."""

    function: str
    value: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.function} adds the 32-bit offset {self.value} to a pointer"


def unbounded_offsets(text: str) -> list[Offset]:
    """Offsets of 32 bits or fewer in TTIR or TTGIR text that may leave a tile.

    Raises:
        ValueError: If the text has an addptr that cannot be read, or no function at all.
    """
    locations = dict(m.groups() for m in map(_LOCATION.match, text.splitlines()) if m)
    found = [
        offset
        for name, lines in _functions(text)
        for offset in _of_function(name, lines, locations)
    ]
    return list(dict.fromkeys(found))


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines, count = "", [], 0
    for line in text.splitlines():
        start = _FUNCTION.match(line)
        if start:
            if name:
                yield name, lines
            name, lines, count = start.group(1), [], count + 1
        lines.append(line)
    if not count:
        raise ValueError("the text has no tt.func: is it TTIR or TTGIR?")
    yield name, lines


def _of_function(name: str, lines: list[str], locations: dict[str, str]) -> Iterator[Offset]:
    definitions = dict(m.groups() for m in map(_ASSIGN.match, lines) if m)
    for line in lines:
        if "tt.addptr" not in line:
            continue
        add = _ADDPTR.search(line)
        kind = _OFFSET_TYPE.search(add.group(3)) if add else None
        if add is None or kind is None:
            raise ValueError(f"an addptr of {name} cannot be read: {line.strip()}")
        if int(kind.group(1)[1:]) > 32:
            continue
        low, high = range_of(add.group(2), definitions)
        if not (low >= -LIMIT and high < LIMIT):
            yield Offset(name, add.group(2), _place(line, locations))


def range_of(value: str, definitions: dict[str, str]) -> Range:
    """Bounds of an integer value that follow from constants and ranges alone."""
    text = definitions.get(value, "")
    if constant := _CONSTANT.match(text):
        return float(constant.group(1)), float(constant.group(1))
    if made := _RANGE.match(text):
        return float(made.group(2)), float(made.group(1)) - 1
    if same := _SAME.match(text):
        return range_of(same.group(1), definitions)
    if binary := _BINARY.match(text):
        a, b = (range_of(binary.group(i), definitions) for i in (2, 3))
        return _combine(binary.group(1), a, b)
    return ANY


def _combine(operation: str, a: Range, b: Range) -> Range:
    # A 32-bit intermediate that may wrap makes anything possible.
    result = ANY
    if operation == "addi":
        result = a[0] + b[0], a[1] + b[1]
    elif operation == "subi":
        result = a[0] - b[1], a[1] - b[0]
    elif operation == "muli" and ANY not in (a, b):
        ends = [x * y for x in a for y in b]
        result = min(ends), max(ends)
    elif operation in ("minsi", "maxsi"):
        pick = min if operation == "minsi" else max
        result = pick(a[0], b[0]), pick(a[1], b[1])
    elif operation == "remsi" and b[0] > 0 and b[1] < LIMIT:
        result = (0.0 if a[0] >= 0 else 1 - b[1]), b[1] - 1
    elif operation == "andi" and (a[0] >= 0 or b[0] >= 0):
        result = 0.0, min(x[1] for x in (a, b) if x[0] >= 0)
    return result if result[0] >= -LIMIT and result[1] < LIMIT else ANY


def _place(line: str, locations: dict[str, str]) -> str:
    """File and line of the source that an operation came from; of the callee if inlined."""
    at = line[line.rfind(" loc(") + 1 :]
    for _ in range(20):
        file = re.search(r'"([^"]+)":(\d+)', at)
        if file:
            return f"{file.group(1)}:{file.group(2)}"
        name = re.search(r"#loc\d*", at)
        if name is None or name.group() not in locations:
            break
        at = locations[name.group()]
    return "unknown place"
