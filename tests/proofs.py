"""Whether the tests and cases exist that a `test_proof.py` of an operator names.

A test is named by its file and name, `ops/gemm/test_gpu.py::test_gradients`; a case, in a list of
cases each of which goes through several tests, by its name alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent


def missing(items: Iterable[str], folders: tuple[str, ...] = ()) -> list[str]:
    """Those that are not there; cases are looked for in `folders`."""
    return [item for item in items if not _is_there(item, folders)]


def _is_there(item: str, folders: tuple[str, ...]) -> bool:
    path, _, name = item.partition("::")
    if name:
        return name in _tests(path)
    cases = _cases(folders)
    return item in cases or any(c[-1:] == "*" and item.startswith(c[:-1]) for c in cases)


@functools.cache
def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _cases(folders: tuple[str, ...]) -> set[str]:
    """The first argument of every call whose name ends in `Case`."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_case = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                if is_case and node.func.id.endswith("Case") and node.args:
                    found |= _names(node.args[0])
    return found


def _names(node: ast.expr) -> set[str]:
    """A string; of one that is put together, as in `f"A12-bias-{name}"`, all that it begins."""
    if isinstance(node, ast.Constant):
        return {str(node.value)}
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return {f"{node.values[0].value}*"}
    return set()
