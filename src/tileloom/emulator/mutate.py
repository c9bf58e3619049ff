"""Damaging one synchronisation of a kernel at a time: which mutants a source has.

A mutant removes or weakens one statement of a jitted function: a wait, an arrive, an expect, a
fence, a count, a phase, a memory order; or lets a release stand before what it releases. A
function that does nothing but synchronise (`synchronising`) counts as a statement of its own where
it is called, and so do PTX that synchronises and a loop that polls. PTX is damaged where its text
stands, in a jitted function or a `constexpr_function`. `judge` tells who notices.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tileloom.emulator.synchronising import (
    EXPECTS,
    INITS,
    LIBRARY,
    MBARRIER_WAITS,
    WAITS,
    WEAKER,
    Helpers,
    called,
    is_kernel,
    is_of_a_kernel,
    parsed,
)

# What a release may release: an access before it, or a wait for one.
_RELEASED = WAITS | {"load", "store", "warpgroup_mma", "gather", "scatter"}
_HARMLESS = re.compile(r"#\s*tileloom:\s*harmless\((.+)\)\s*$")
# What is weakened in PTX: how, and what that is called.
_PTX = [
    (re.compile(r"\bld\.acquire\b"), "ld.relaxed", "{} made relaxed"),
    (re.compile(r"\bst\.release\b"), "st.relaxed", "{} made relaxed"),
    (re.compile(r"\b(red|atom)\.(acq_rel|acquire|release)\b"), r"\1.relaxed", "{} made relaxed"),
    (re.compile(r"\bfence\.proxy\.async\b[^;]*;"), "", "removed {}"),
]


@dataclass(frozen=True)
class Mutant:
    """One damaged copy of a file.

    Attributes:
        line: The line that was changed.
        change: What was done, in words.
        source: The line before.
        text: The whole file after.
        function: The jitted function that it stands in.
        lines: First and last line of the statements, or of the PTX's function, that it changes; no
            operation of a kernel without any of them is changed.
        harmless: The reason that a comment on the line gives why nobody need notice.
    """

    line: int
    change: str
    source: str
    text: str
    function: str
    lines: tuple[int, int]
    harmless: str | None = None


def functions_of(kernel: str, texts: Iterable[str]) -> frozenset[str]:
    """Return the jitted functions that a kernel is made of: itself and what it names, all the way.

    Args:
        kernel: The kernel's name.
        texts: Python sources.

    Returns:
        Their names; empty if no source has such a kernel.
    """
    names: dict[str, set[str]] = {}
    for text in texts:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef) and is_of_a_kernel(node):
                words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                words |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                names.setdefault(node.name, set()).update(words)
    found: set[str] = set()
    waiting = [kernel]
    while waiting:
        name = waiting.pop()
        if name in names and name not in found:
            found.add(name)
            waiting += names[name]
    return frozenset(found)


def kernels_of(texts: Iterable[str]) -> list[str]:
    """Return the names of all jitted functions of some sources, sorted."""
    trees = [parsed(text) for text in texts]
    return sorted({getattr(n, "name", "") for t in trees for n in ast.walk(t) if is_kernel(n)})


def _lines(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


class _Source:
    """A file's text, by line and column, and the function that is being changed."""

    def __init__(self, text: str, helpers: Helpers) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.helpers = helpers
        self.removable = LIBRARY | helpers.releases | helpers.others
        self.released = _RELEASED | helpers.others | helpers.working
        self.function: ast.FunctionDef  # that `mutants` is at
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line.encode()))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's source."""
        start, end = self._span(node)
        return self.text.encode()[start:end].decode()

    def mutant(self, node: ast.expr | ast.stmt, new: str, change: str) -> Mutant:
        """Return the mutant in which a node is replaced."""
        start, end = self._span(node)
        data = self.text.encode()
        text = (data[:start] + new.encode() + data[end:]).decode()
        return self._mutant(node.lineno, text, change, self._statement(node))

    def within(self, node: ast.expr, span: tuple[int, int], new: str, change: str) -> Mutant:
        """Return the mutant in which a part of a node's source is replaced."""
        segment = self.segment(node)
        start = self._span(node)[0] + len(segment[: span[0]].encode())
        data = self.text.encode()
        text = data[:start] + new.encode() + data[start + len(segment[slice(*span)].encode()) :]
        line = node.lineno + segment.count("\n", 0, span[0])
        return self._mutant(line, text.decode(), change, _lines(self.function))

    def swapped(self, first: ast.stmt, second: ast.stmt, change: str) -> Mutant:
        """Return the mutant in which two neighbours have changed places."""
        (a, b), (c, d) = self._span(first), self._span(second)
        data = self.text.encode()
        text = data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
        lines = first.lineno, second.end_lineno or 0
        return self._mutant(second.lineno, text.decode(), change, lines)

    def _statement(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The lines of the innermost statement that a node of the function is in."""
        start, end = _lines(node)
        spans = [_lines(n) for n in ast.walk(self.function) if isinstance(n, ast.stmt)]
        return max(span for span in spans if span[0] <= start and end <= span[1])

    def compiles(self, mutant: Mutant, function: ast.FunctionDef) -> bool:
        """Whether a mutant of a function is Python; only that function is parsed."""
        start, end = self._span(function)
        behind = len(self.text.encode()) - end
        damaged = mutant.text.encode()
        lines = damaged[start : len(damaged) - behind].decode()
        try:
            ast.parse(
                f"if True:\n{' ' * function.col_offset}{lines}" if function.col_offset else lines
            )
        except SyntaxError:
            return False
        return True

    def _mutant(self, line: int, text: str, change: str, lines: tuple[int, int]) -> Mutant:
        source = self.lines[line - 1].rstrip()
        harmless = _HARMLESS.search(source)
        reason = harmless.group(1) if harmless else None
        name = self.function.name
        return Mutant(line, change, source.strip(), text, name, lines, reason)


def mutants(text: str, helpers: Helpers | None = None) -> list[Mutant]:
    """Return every mutant of a file's text.

    Args:
        text: Python source with jitted kernels.
        helpers: What the functions do that the text calls; default: those that it has itself.

    Returns:
        One for each damage to a synchronising statement, in the order of the lines.
    """
    source = _Source(text, Helpers.of([text]) if helpers is None else helpers)
    found: dict[tuple[int, str, str], Mutant] = {}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef) and is_of_a_kernel(node):
            source.function = node
            some = [*_of_function(source, node)] if is_kernel(node) else []
            for mutant in [*some, *_of_strings(source, node)]:
                if source.compiles(mutant, node):
                    found[mutant.line, mutant.change, mutant.text] = mutant
    return sorted(found.values(), key=lambda m: (m.line, m.change))


def _of_function(source: _Source, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and _is_removable(source, node, function):
            yield source.mutant(node, "pass", f"removed {called(node.value)}")
        if isinstance(node, ast.Call):
            yield from _of_call(source, node)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                yield from _of_body(source, function, body)
    arguments = [a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)]
    yield from _of_results(source, function, function.body, set(arguments))


def _is_removable(source: _Source, node: ast.Expr, function: ast.FunctionDef) -> bool:
    if called(node.value) == "inline_asm_elementwise":
        return source.helpers.synchronises(node, function)
    return called(node.value) in source.removable


def _of_results(
    source: _Source, function: ast.FunctionDef, body: list[ast.stmt], bound: set[str]
) -> Iterator[Mutant]:
    """Leave out helpers whose result has a value before, and loops that poll."""
    for node in body:
        targets = _targets(node)
        helper = called(getattr(node, "value", None))
        if isinstance(node, ast.While) and _polls(source, node, function):
            yield source.mutant(node, "pass", "removed the loop that polls")
        elif targets and targets <= bound and helper in source.removable - LIBRARY:
            if source.helpers.synchronises(node, function):
                yield source.mutant(node, "pass", f"removed {helper}")
        else:
            for inner in (getattr(node, "body", []), getattr(node, "orelse", [])):
                yield from _of_results(source, function, inner, bound | _targets(node))
        bound = bound | targets


def _polls(source: _Source, node: ast.While, function: ast.FunctionDef) -> bool:
    is_plain = all(isinstance(inner, (ast.Assign, ast.Pass)) for inner in node.body)
    return is_plain and source.helpers.synchronises(node, function)


def _targets(node: ast.stmt) -> set[str]:
    """The names that a statement gives values."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}


def _of_body(source: _Source, function: ast.FunctionDef, body: list[ast.stmt]) -> Iterator[Mutant]:
    """Let a release stand before the access or wait above it, unless it needs its result."""
    for before, node in pairwise(body):
        if not isinstance(node, ast.Expr) or not source.helpers.hands_on(node, function):
            continue
        if not isinstance(before, (ast.Expr, ast.Assign, ast.AnnAssign)):
            continue
        if _targets(before) & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            continue
        names = [called(n) for n in ast.walk(before)]
        released = next((name for name in names if name in source.released), None)
        if released:
            change = f"{called(node.value)} before the {released} above it"
            yield source.swapped(before, node, change)


def _of_strings(source: _Source, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Weaken what the PTX of a function says; a string that is a statement only documents."""
    said = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            for pattern, weaker, change in _PTX:
                for match in pattern.finditer(source.segment(node)):
                    new = match.expand(weaker)
                    named = change.format(match.group(0).rstrip(";"))
                    yield source.within(node, match.span(), new, named)


def _of_call(source: _Source, node: ast.Call) -> Iterator[Mutant]:
    name = called(node)
    if name in WEAKER and node.args:
        change = f"{name} leaves one more in flight"
        yield source.mutant(node.args[0], f"({source.segment(node.args[0])}) + 1", change)
    if name in MBARRIER_WAITS and len(node.args) > 1:
        yield source.mutant(node.args[1], f"({source.segment(node.args[1])}) ^ 1", "phase inverted")
    if name in EXPECTS and len(node.args) > 1:
        count = source.segment(node.args[1])
        yield source.mutant(node.args[1], f"({count}) // 2", "half the bytes expected")
    for keyword in node.keywords:
        if keyword.arg == "count" and name in {*INITS, "arrive", "mbarrier_arrive"}:
            count = source.segment(keyword.value)
            yield source.mutant(keyword.value, f"({count}) + 1", f"count of {name} one higher")
            if name in INITS and count != "1":
                yield source.mutant(keyword.value, f"({count}) // 2", "half the arrivals expected")
        if keyword.arg == "pred":
            yield source.mutant(keyword.value, "True", "predicate removed")
        strong = keyword.arg == "sem" and getattr(keyword.value, "value", "") != "relaxed"
        if strong:
            yield source.mutant(keyword.value, '"relaxed"', "memory order made relaxed")
    if name.startswith("atomic_") and not any(k.arg == "sem" for k in node.keywords):
        whole = source.segment(node)[:-1].rstrip(", \n")
        yield source.mutant(node, whole + ', sem="relaxed")', "memory order made relaxed")
