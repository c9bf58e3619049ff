"""Do a kernel's tests have teeth? Damage one synchronisation at a time and see who notices.

A mutant removes or weakens one statement of the file's kernels: a wait, an arrive, an expect, a
fence, a count, a phase, a memory order. Each is run on the emulator; a mutant that nobody
reports, and that the file's own checks do not notice, is listed.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tileloom.emulator.check import Setting, check_file
from tileloom.emulator.replace import module_of, replaced

_REMOVABLE = {
    "wait", "arrive", "expect", "init", "fence_async_shared", "store_wait", "warpgroup_mma_wait",
    "wait_group", "commit_group", "mbarrier_arrive", "arrive_each_thread", "named_barrier_sync",
    "named_barrier_arrive", "invalidate", "debug_barrier", "thread_barrier", "barrier",
    "fence_proxy_async",
}  # fmt: skip
_WEAKER = {"store_wait", "warpgroup_mma_wait", "wait_group"}
_HARMLESS = re.compile(r"#\s*tileloom:\s*harmless\((.+)\)\s*$")
_ORDERS = [
    (re.compile(r'sem="(acq_rel|acquire|release)"'), 'sem="relaxed"'),
    (re.compile(r"\bld\.acquire\b"), "ld.relaxed"),
    (re.compile(r"\bst\.release\b"), "st.relaxed"),
    (re.compile(r"\b(red|atom)\.(acq_rel|acquire|release)\b"), r"\1.relaxed"),
]


@dataclass(frozen=True)
class Mutant:
    """One damaged copy of a file.

    Attributes:
        line: The line that was changed.
        change: What was done, in words.
        source: The line before.
        text: The whole file after.
        harmless: The reason that a comment on the line gives why nobody need notice.
    """

    line: int
    change: str
    source: str
    text: str
    harmless: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: reported, wrong result, compile error or unnoticed."""

    mutant: Mutant
    outcome: str
    detail: str = ""

    @property
    def noticed(self) -> bool:
        """Whether somebody noticed, or a comment says that nobody need."""
        return self.outcome != "unnoticed" or self.mutant.harmless is not None


def _is_kernel(node: ast.FunctionDef) -> bool:
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return any(name.split(".")[-1] == "jit" for name in names)


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class _Source:
    """A file's text, by line and column."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def replaced(self, node: ast.expr | ast.stmt, new: str) -> str:
        """Return the text with a node's source replaced."""
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self.text[:start] + new + self.text[end:]

    def mutant(self, node: ast.expr | ast.stmt, new: str, change: str) -> Mutant:
        """Return the mutant in which a node is replaced."""
        line = node.lineno
        source = self.lines[line - 1]
        harmless = _HARMLESS.search(source.rstrip())
        reason = harmless.group(1) if harmless else None
        return Mutant(line, change, source.strip(), self.replaced(node, new), reason)


def mutants(text: str) -> list[Mutant]:
    """Return every mutant of a file's text.

    Args:
        text: Python source with jitted kernels.

    Returns:
        One for each damage to a synchronising statement, in the order of the lines.
    """
    source = _Source(text)
    found: list[Mutant] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and _is_kernel(node):
            found += _of_function(source, node)
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
        if isinstance(node, ast.Expr) and _called(node.value) in _REMOVABLE:
            yield source.mutant(node, "pass", f"removed {_called(node.value)}")
        if isinstance(node, ast.Call):
            yield from _of_call(source, node)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\n" not in node.value
        ) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield from _of_string(source, node)


def _of_string(source: _Source, node: ast.Constant) -> Iterator[Mutant]:
    original = ast.get_source_segment(source.text, node) or ""
    for pattern, weaker in _ORDERS[1:]:
        match = pattern.search(original)
        if match:
            change = f"{match.group(0)} made relaxed"
            yield source.mutant(node, pattern.sub(weaker, original, count=1), change)


def _of_call(source: _Source, node: ast.Call) -> Iterator[Mutant]:
    name = _called(node)
    whole = ast.get_source_segment(source.text, node) or ""
    if name in _WEAKER and node.args:
        count = ast.get_source_segment(source.text, node.args[0]) or ""
        change = f"{name} leaves one more in flight"
        yield source.mutant(node.args[0], f"({count}) + 1", change)
    if name == "wait" and len(node.args) > 1:
        phase = ast.get_source_segment(source.text, node.args[1]) or ""
        yield source.mutant(node.args[1], f"({phase}) ^ 1", "phase inverted")
    if name == "expect" and len(node.args) > 1:
        count = ast.get_source_segment(source.text, node.args[1]) or ""
        yield source.mutant(node.args[1], f"({count}) // 2", "half the bytes expected")
    for keyword in node.keywords:
        if keyword.arg == "count" and name in ("init", "arrive"):
            count = ast.get_source_segment(source.text, keyword.value) or ""
            yield source.mutant(keyword.value, f"({count}) + 1", f"count of {name} one higher")
        if keyword.arg == "pred":
            yield source.mutant(keyword.value, "True", "predicate removed")
        strong = keyword.arg == "sem" and getattr(keyword.value, "value", "") != "relaxed"
        if strong:
            yield source.mutant(keyword.value, '"relaxed"', "memory order made relaxed")
    if name.startswith("atomic_") and not any(k.arg == "sem" for k in node.keywords):
        yield source.mutant(
            node, whole[:-1].rstrip(", \n") + ', sem="relaxed")', "memory order made relaxed"
        )


def judge(
    mutant: Mutant, path: Path, ways: Sequence[Setting], folder: Path, kernels: Path | None = None
) -> Verdict:
    """Run one mutant until somebody notices it.

    Args:
        mutant: The mutant.
        path: The file that runs it; where `kernels` is None, the file it was made from as well.
        ways: Settings to try in turn.
        folder: Where to write the copy.
        kernels: The library file it was made from, which `path` imports.

    Returns:
        What became of it.
    """
    source = kernels or path
    copy = folder / f"{source.stem}_line{mutant.line}_{abs(hash(mutant.text)) % 10**8}.py"
    if kernels is None and path.name.startswith("test_"):
        copy = folder / f"test_{copy.name}"
    copy.write_text(mutant.text)
    for way in ways:
        if kernels is None:
            result = check_file(copy, [way], max_steps=2_000_000)
        else:
            with replaced(module_of(kernels), copy):
                result = check_file(path, [way], max_steps=2_000_000)
        if result.errors:
            report = result.errors[0].report
            return Verdict(mutant, "reported", f"{report.kind} at line {report.line}")
        if result.failures:
            trace = result.failures[0][1]
            last = trace.strip().splitlines()[-1]
            outcome = "compile error" if "CompilationError" in trace else "wrong result"
            return Verdict(mutant, outcome, last[:120])
    return Verdict(mutant, "unnoticed")


def mutate_file(
    path: Path, ways: Sequence[Setting], kernels: Path | None = None
) -> Generator[Verdict]:
    """Judge every mutant of a file.

    Args:
        path: A file that `check_file` can run.
        ways: Settings that each mutant is tried under, in turn.
        kernels: Mutate this file, a module that `path` imports, and not `path` itself.

    Yields:
        A verdict for each mutant.
    """
    if kernels is not None:
        module_of(kernels)
    with tempfile.TemporaryDirectory(prefix="tileloom-mutants-") as folder:
        for mutant in mutants((kernels or path).read_text()):
            yield judge(mutant, path, ways, Path(folder), kernels)
