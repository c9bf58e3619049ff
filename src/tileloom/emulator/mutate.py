"""Damaging one synchronisation of a kernel at a time: which mutants a source has.

A mutant removes or weakens one statement of a jitted function: a wait, an arrive, an expect, a
fence, a count, a phase, a memory order; or lets a release stand before what it releases. A
function of the source that does nothing but synchronise counts as a statement of its own where it
is called. PTX is damaged where its text stands, in a jitted function or a `constexpr_function`.
`judge` tells who notices.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

# Names of Gluon, and those that `tileloom.cpasync.gluon` gives the same.
_MBARRIER_WAITS = {"wait", "mbarrier_wait"}
_EXPECTS = {"expect", "arrive_and_expect_tx"}
_INITS = {"init", "mbarrier_init"}
_WEAKER = {"store_wait", "tma_store_wait", "warpgroup_mma_wait", "wait_group", "cp_async_wait"}
_WAITS = {
    *_MBARRIER_WAITS, *_WEAKER, "named_barrier_sync", "barrier", "debug_barrier", "thread_barrier",
}  # fmt: skip
_RELEASES = {
    "arrive", "mbarrier_arrive", "arrive_each_thread", "mbarrier_arrive_each_thread",
    "mbarrier_cp_async_arrive", "mbarrier_cp_async_arrive_noinc", "named_barrier_arrive",
    "commit_group", "cp_async_commit",
}  # fmt: skip
_OTHERS = {
    *_EXPECTS, *_INITS, "invalidate", "mbarrier_invalidate", "fence_async_shared",
    "fence_proxy_async", "fence_barrier_init",
}  # fmt: skip
# What a release may release: an access before it, or a wait for one.
_RELEASED = _WAITS | {"load", "store", "warpgroup_mma", "gather", "scatter"}
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
        harmless: The reason that a comment on the line gives why nobody need notice.
    """

    line: int
    change: str
    source: str
    text: str
    function: str
    harmless: str | None = None


def _decorators(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef):
        return set()
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return {name.split(".")[-1] for name in names}


def _is_kernel(node: ast.AST) -> bool:
    return "jit" in _decorators(node)


def _is_of_a_kernel(node: ast.AST) -> bool:
    """Whether a node is a kernel or computes what one is made of, its PTX."""
    return bool({"jit", "constexpr_function"} & _decorators(node))


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@dataclass(frozen=True)
class Helpers:
    """Functions that only synchronise: names that `mutants` treats like the library's own.

    Attributes:
        releases: Those that only hand something on.
        others: Those that also wait.
    """

    releases: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()

    @staticmethod
    def of(texts: Iterable[str]) -> Helpers:
        """Find them in sources.

        Args:
            texts: Python sources; those that call the helpers and those that define them.
        """
        functions = [
            node for text in texts for node in ast.walk(ast.parse(text)) if _is_kernel(node)
        ]
        releases, others = set(_RELEASES), _WAITS | _OTHERS
        while True:
            before = len(releases) + len(others)
            for function in functions:
                assert isinstance(function, ast.FunctionDef), "a kernel is a function"
                calls = _statements(function)
                if calls and calls <= releases:
                    releases.add(function.name)
                elif calls and calls <= releases | others:
                    others.add(function.name)
            if len(releases) + len(others) == before:
                return Helpers(
                    frozenset(releases - _RELEASES), frozenset(others - _WAITS - _OTHERS)
                )


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
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and _is_of_a_kernel(node):
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
    trees = [ast.parse(text) for text in texts]
    return sorted({getattr(n, "name", "") for t in trees for n in ast.walk(t) if _is_kernel(n)})


def _statements(function: ast.FunctionDef) -> set[str]:
    """Names of what a function calls as statements; "" among them if it does anything else."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return {_called(node.value) if isinstance(node, ast.Expr) else "" for node in body}


class _Source:
    """A file's text, by line and column, and the function that is being changed."""

    def __init__(self, text: str, helpers: Helpers) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.releases = _RELEASES | helpers.releases
        self.removable = self.releases | _WAITS | _OTHERS | helpers.others
        self.function = ""
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
        return self._mutant(
            node.lineno, (data[:start] + new.encode() + data[end:]).decode(), change
        )

    def within(self, node: ast.expr, span: tuple[int, int], new: str, change: str) -> Mutant:
        """Return the mutant in which a part of a node's source is replaced."""
        segment = self.segment(node)
        start = self._span(node)[0] + len(segment[: span[0]].encode())
        data = self.text.encode()
        text = data[:start] + new.encode() + data[start + len(segment[slice(*span)].encode()) :]
        line = node.lineno + segment.count("\n", 0, span[0])
        return self._mutant(line, text.decode(), change)

    def swapped(self, first: ast.stmt, second: ast.stmt, change: str) -> Mutant:
        """Return the mutant in which two neighbours have changed places."""
        (a, b), (c, d) = self._span(first), self._span(second)
        data = self.text.encode()
        text = data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
        return self._mutant(second.lineno, text.decode(), change)

    def _mutant(self, line: int, text: str, change: str) -> Mutant:
        source = self.lines[line - 1].rstrip()
        harmless = _HARMLESS.search(source)
        reason = harmless.group(1) if harmless else None
        return Mutant(line, change, source.strip(), text, self.function, reason)


def mutants(text: str, helpers: Helpers | None = None) -> list[Mutant]:
    """Return every mutant of a file's text.

    Args:
        text: Python source with jitted kernels.
        helpers: Further functions that only synchronise; those of the text itself are found.

    Returns:
        One for each damage to a synchronising statement, in the order of the lines.
    """
    own = Helpers.of([text])
    if helpers is not None:
        own = Helpers(own.releases | helpers.releases, own.others | helpers.others)
    source = _Source(text, own)
    found: list[Mutant] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and _is_kernel(node):
            source.function = node.name
            found += _of_function(source, node)
        if isinstance(node, ast.FunctionDef) and _is_of_a_kernel(node):
            source.function = node.name
            found += _of_strings(source, node)
    unique = {(m.line, m.change, m.text): m for m in found if _compiles(m.text)}
    return sorted(unique.values(), key=lambda m: (m.line, m.change))


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _of_function(source: _Source, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and _called(node.value) in source.removable:
            yield source.mutant(node, "pass", f"removed {_called(node.value)}")
        if isinstance(node, ast.Call):
            yield from _of_call(source, node)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                yield from _of_body(source, body)


def _of_body(source: _Source, body: list[ast.stmt]) -> Iterator[Mutant]:
    """Let a release stand before the access or wait above it."""
    for before, node in pairwise(body):
        if not isinstance(node, ast.Expr) or _called(node.value) not in source.releases:
            continue
        if not isinstance(before, (ast.Expr, ast.Assign, ast.AnnAssign)):
            continue
        called = [_called(n) for n in ast.walk(before)]
        released = next((name for name in called if name in _RELEASED), None)
        if released:
            change = f"{_called(node.value)} before the {released} above it"
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
    name = _called(node)
    if name in _WEAKER and node.args:
        change = f"{name} leaves one more in flight"
        yield source.mutant(node.args[0], f"({source.segment(node.args[0])}) + 1", change)
    if name in _MBARRIER_WAITS and len(node.args) > 1:
        yield source.mutant(node.args[1], f"({source.segment(node.args[1])}) ^ 1", "phase inverted")
    if name in _EXPECTS and len(node.args) > 1:
        count = source.segment(node.args[1])
        yield source.mutant(node.args[1], f"({count}) // 2", "half the bytes expected")
    for keyword in node.keywords:
        if keyword.arg == "count" and name in {*_INITS, "arrive", "mbarrier_arrive"}:
            count = source.segment(keyword.value)
            yield source.mutant(keyword.value, f"({count}) + 1", f"count of {name} one higher")
            if name in _INITS and count != "1":
                yield source.mutant(keyword.value, f"({count}) // 2", "half the arrivals expected")
        if keyword.arg == "pred":
            yield source.mutant(keyword.value, "True", "predicate removed")
        strong = keyword.arg == "sem" and getattr(keyword.value, "value", "") != "relaxed"
        if strong:
            yield source.mutant(keyword.value, '"relaxed"', "memory order made relaxed")
    if name.startswith("atomic_") and not any(k.arg == "sem" for k in node.keywords):
        whole = source.segment(node)[:-1].rstrip(", \n")
        yield source.mutant(node, whole + ', sem="relaxed")', "memory order made relaxed")
