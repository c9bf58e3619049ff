"""Which functions of kernels do nothing but synchronise, however their statements are wrapped.

Such a helper waits, arrives or fences and else only computes: it may branch, loop, call other
helpers, say PTX, and return what it has computed. Where it is called it is one statement of
synchronisation; `mutate` damages it like the library's own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

# Names of Gluon, and those that `tileloom.cpasync.gluon` gives the same.
MBARRIER_WAITS = {"wait", "mbarrier_wait"}
EXPECTS = {"expect", "arrive_and_expect_tx"}
INITS = {"init", "mbarrier_init"}
WEAKER = {"store_wait", "tma_store_wait", "warpgroup_mma_wait", "wait_group", "cp_async_wait"}
WAITS = {
    *MBARRIER_WAITS, *WEAKER, "named_barrier_sync", "barrier", "debug_barrier", "thread_barrier",
}  # fmt: skip
RELEASES = {
    "arrive", "mbarrier_arrive", "arrive_each_thread", "mbarrier_arrive_each_thread",
    "mbarrier_cp_async_arrive", "mbarrier_cp_async_arrive_noinc", "named_barrier_arrive",
    "commit_group", "cp_async_commit",
}  # fmt: skip
OTHERS = {
    *EXPECTS, *INITS, "invalidate", "mbarrier_invalidate", "fence_async_shared",
    "fence_proxy_async", "fence_barrier_init",
}  # fmt: skip
LIBRARY = WAITS | RELEASES | OTHERS

_ASM = "inline_asm_elementwise"
# PTX that synchronises, but not under a predicate of its own, and of it what hands on.
_SYNCHRONISES = re.compile(
    r"(?:^|(?<!@p)[;{}\s])(?:(?:bar|barrier|mbarrier|fence|membar)\.|(?:ld|atom|red)\.acq|"
    r"(?:st|atom|red)\.rel|cp\.async\.(?:bulk\.)?(?:wait|commit|mbarrier))"
)
_HANDS_ON = re.compile(r"\barrive\b|(?:st|red)\.release|commit_group")
_WAITS_TOO = re.compile(r"\bsync\b|\bwait|wait\b|acq|\bfence\.|\bmembar\.")
_ACCESSES = re.compile(r"(?:^|[;{}\s])(?:ld|st|red|atom|cp|wgmma|mma|ldmatrix|stmatrix)\b")
# Calls of the language that are more than arithmetic.
_WORKS = re.compile(r"load|store|copy|gather|scatter|atomic|tma_|_mma|allocate|print|specialize")
_NOT_FOLLOWED = {"triton", "torch", *sys.stdlib_module_names}


@lru_cache(maxsize=256)
def parsed(text: str) -> ast.Module:
    """Return a source's tree, which nobody changes."""
    return ast.parse(text)


def _decorators(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef):
        return set()
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return {name.split(".")[-1] for name in names}


def is_kernel(node: ast.AST) -> bool:
    """Whether a node is a jitted function."""
    return "jit" in _decorators(node)


def is_of_a_kernel(node: ast.AST) -> bool:
    """Whether a node is a kernel or computes what one is made of, its PTX."""
    return bool({"jit", "constexpr_function"} & _decorators(node))


def called(node: ast.AST | None) -> str:
    """Return the last name of what a node calls, or nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@dataclass(frozen=True)
class Helpers:
    """Jitted functions by what they do: names that `mutants` treats like the library's own.

    Attributes:
        releases: Those that only synchronise, and at the end hand something on.
        others: Those that only synchronise, and end otherwise: with a wait or a fence.
        working: Those that do anything else that others may see.
        texts: What the functions say that compute PTX.
    """

    releases: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    working: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of(texts: Iterable[str]) -> Helpers:
        """Find them in sources: in those that call them and in those that define them."""
        nodes = [node for text in texts for node in ast.walk(parsed(text))]
        jitted = [n for n in nodes if isinstance(n, ast.FunctionDef) and is_kernel(n)]
        found = Helpers(texts=_texts_of(nodes))
        deeds = [(f.name, [found.deeds(s, f) for s in _body(f)]) for f in jitted]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                deeds += [(a.asname, [[a.name]]) for a in node.names if a.asname]
        for _ in deeds:  # each round looks one call deeper
            before, found = found, found._looking_deeper(deeds)
            if found == before:
                break
        return found

    def _looking_deeper(self, deeds: Iterable[tuple[str, list[list[str]]]]) -> Helpers:
        kinds: dict[str, set[str]] = {}
        last: dict[str, set[str]] = {}
        for name, statements in deeds:
            done = [what for what in (self._kinds(s) for s in statements) if what]
            kinds.setdefault(name, set()).update(*done)
            last.setdefault(name, set()).update(*done[-1:])
        named = {name: kind for name, kind in kinds.items() if name not in LIBRARY}
        only = {name for name, kind in named.items() if kind and "work" not in kind}
        releases = frozenset(name for name in only if last[name] == {"release"})
        working = frozenset(name for name, kind in named.items() if "work" in kind)
        return Helpers(releases, frozenset(only) - releases, working, self.texts)

    def deeds(self, node: ast.AST, function: ast.FunctionDef) -> list[str]:
        """Name what a node of a function calls; for PTX, what that does: `<release>` and so on."""
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        return [_kind_of_ptx(self._ptx(n, function)) if called(n) == _ASM else called(n)
                for n in calls]  # fmt: skip

    def _kinds(self, deeds: Iterable[str]) -> set[str]:
        return {self._kind(name) for name in deeds} - {""}

    def _kind(self, name: str) -> str:
        if name in RELEASES or name in self.releases or name == "<release>":
            return "release"
        if name in WAITS | OTHERS or name in self.others or name == "<other>":
            return "other"
        is_work = name in self.working or name == "<work>" or _WORKS.search(name)
        return "work" if is_work and not name.startswith("static_") else ""

    def hands_on(self, node: ast.AST, function: ast.FunctionDef) -> bool:
        """Whether what a node of a function calls is a release."""
        return self._kinds(self.deeds(node, function)) == {"release"}

    def synchronises(self, node: ast.AST, function: ast.FunctionDef) -> bool:
        """Whether a node of a function synchronises and does no work besides."""
        kinds = self._kinds(self.deeds(node, function))
        return bool(kinds) and "work" not in kinds

    def _ptx(self, node: ast.Call, function: ast.FunctionDef) -> str:
        """Return what the text of an inline assembly may say, its arguments put beside it."""
        parts: list[str] = []
        waiting: list[ast.AST] = list(node.args[:1])
        seen: set[str] = set()
        while waiting:
            part = waiting.pop()
            parts.append(_said(part))
            for name in ast.walk(part):
                if isinstance(name, ast.Name) and name.id not in seen:
                    seen.add(name.id)
                    parts.append(self.texts.get(name.id, ""))
                    waiting += _values_of(name.id, function)
        return "\n".join(parts)


def _texts_of(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What the functions of some sources that compute PTX say, by name."""
    texts: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and is_of_a_kernel(node) and not is_kernel(node):
            texts.setdefault(node.name, []).extend(_said(part) for part in _body(node))
    return {name: "\n".join(parts) for name, parts in texts.items()}


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _said(node: ast.AST) -> str:
    """All string constants of a node."""
    return " ".join(
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def _values_of(name: str, function: ast.FunctionDef) -> list[ast.expr]:
    """What a function assigns to a name."""
    found: list[ast.expr] = []
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and value is not None:
            found.append(value)
    return found


def _kind_of_ptx(text: str) -> str:
    if _SYNCHRONISES.search(text):
        is_release = _HANDS_ON.search(text) and not _WAITS_TOO.search(text)
        return "<release>" if is_release else "<other>"
    return "<work>" if _ACCESSES.search(text) else ""


def with_imports(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the texts of sources and of what they import, all the way; nothing is executed.

    Left out are Triton, PyTorch, Python's own modules, and what has no kernels.
    """
    found: dict[Path, str] = {}
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = text = path.read_text(encoding="utf-8")
        for node in ast.walk(parsed(text)):
            origins = [_origin(name, path.parent) for name in _imported(node)]
            waiting += [o for o in origins if o is not None and _has_kernels(o)]
    return found


def _imported(node: ast.AST) -> list[str]:
    """What may be modules of what a statement imports; relative names begin with points."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    name = "." * node.level + (node.module or "")
    point = "." if node.module else ""
    return [*([name] if node.module else []), *(f"{name}{point}{a.name}" for a in node.names)]


def _has_kernels(path: Path) -> bool:
    return path.suffix == ".py" and re.search(rb"\bjit\b", path.read_bytes()) is not None


def _origin(module: str, folder: Path) -> Path | None:
    """Return the file of a module that a file of a folder imports, or nothing."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    parts = name.split(".")
    if level == 0 and parts[0] in _NOT_FOLLOWED:
        return None
    places = [str(folder), *sys.path] if level == 0 else [str([folder, *folder.parents][level - 1])]
    spec = None
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin else None
