"""The house rules as functions from source text to complaints; test_house.py applies them.

Every complaint starts with ``file:line``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tileloom"

FILE_LINES = 500
FUNCTION_LINES = 80
KERNEL_LINES = 250

LEAVES = ("errors", "knobs", "log", "target")
# The stack of architecture.md, lowest row first: each may import the rows below it.
ROWS: tuple[tuple[str, ...], ...] = (
    LEAVES,
    ("launch",),
    ("tuning",),
    ("device",),
    ("scheduling", "cpasync"),
    ("ops._op",),
    ("ops._plans", "ops._counters"),
    ("ops.attention", "ops.gemm", "ops.rowwise"),
    ("ops.collective",),
    # `import tileloom.ops` registers every operator's schema.
    ("ops",),
    ("cli", "report", "integrations"),
)
SIDES = ("testing", "bench", "emulator")
# Within the top row: the command line draws on the other two.
EXTRA = {"cli": ("report", "integrations")}
TOP = ("cli", "report")


@dataclass(frozen=True)
class Source:
    """One parsed file; `module` is its dotted name below `tileloom`, ``""`` for the package."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST | int) -> str:
        line = node if isinstance(node, int) else node.lineno
        return f"{self.path.relative_to(ROOT) if self.path.is_absolute() else self.path}:{line}"


def parse(text: str, path: Path | str, module: str = "") -> Source:
    return Source(Path(path), module, text, ast.parse(text))


def package_sources() -> list[Source]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parse(path.read_text(), path, module))
    return found


def unit(module: str) -> str:
    """The box of the diagram that a module belongs to."""
    parts = module.split(".")
    if parts[0] != "ops":
        return parts[0]
    return ".".join(parts[:2])


def imports(source: Source, known: frozenset[str]) -> Iterator[tuple[ast.AST, str]]:
    """Every import of ours, also inside functions and by name, as a module below `tileloom`."""
    package = source.module.split(".") if source.module else []
    if source.path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tileloom":
                    yield node, alias.name.removeprefix("tileloom").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = ["tileloom", *package[: len(package) - node.level + 1], *base]
            if base[:1] != ["tileloom"]:
                continue
            for alias in node.names:
                whole = ".".join([*base[1:], alias.name])
                yield node, whole if whole in known else ".".join(base[1:])
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("tileloom."):
                yield node, str(first.value).removeprefix("tileloom.")


def _name(node: ast.AST) -> str:
    """A dotted name as text, or "" for anything else."""
    if isinstance(node, ast.Attribute):
        base = _name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def may_import(importer: str, imported: str) -> bool:
    """Whether the diagram lets one module import another (dotted, below `tileloom`)."""
    above, below = unit(importer), unit(imported)
    if above == below:
        return True
    if above in LEAVES:
        return False
    if above == "":  # the package itself names what is public; that it loads nothing is tested
        return True
    if above == "__main__":
        return below == "cli"
    if below == "":  # `import tileloom` for its version
        return above in TOP or above in SIDES
    if above in SIDES:
        if below in LEAVES or below == "launch" or imported == "tuning.measure":
            return True
        reference = below.startswith("ops.") and imported.endswith(".reference")
        return above == "testing" and (below == "emulator" or reference)
    if below in SIDES:
        return above in TOP
    if below in EXTRA.get(above, ()):
        return True
    return _row(below) < _row(above)


def _row(name: str) -> int:
    for index, row in enumerate(ROWS):
        if name in row:
            return index
    raise KeyError(f"{name} stands in no row of architecture.md's diagram: add it to ROWS")


def wrong_imports(source: Source, known: frozenset[str]) -> list[str]:
    return [
        f"{source.at(node)}: {source.module or 'tileloom'} may not import {imported}"
        for node, imported in imports(source, known)
        if not may_import(source.module, imported)
    ]


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None, "the parser gives every statement an end"
    return node.end_lineno


def too_long(source: Source) -> list[str]:
    complaints = []
    lines = source.text.count("\n")
    if lines > FILE_LINES:
        complaints.append(f"{source.at(1)}: {lines} lines; a file has at most {FILE_LINES}")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        jitted = any(
            _name(d.func if isinstance(d, ast.Call) else d).split(".")[-1] == "jit"
            for d in node.decorator_list
        )
        limit = KERNEL_LINES if jitted else FUNCTION_LINES
        size = _last_line(node) - node.lineno + 1
        if ast.get_docstring(node) is not None:  # a full docstring costs a function nothing
            size -= _last_line(node.body[0]) - node.body[0].lineno + 1
        if size > limit:
            complaints.append(
                f"{source.at(node)}: {node.name} has {size} lines beside its docstring; "
                f"at most {limit} are allowed"
            )
    return complaints


def _docstrings(tree: ast.Module) -> set[int]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
    return found


def literal_devices(source: Source) -> list[str]:
    """Texts that name a CUDA device. The kind of a `Target` is spelt like one and is none."""
    skip = _docstrings(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides):
                skip.update(id(c) for side in sides for c in ast.walk(side))
        elif isinstance(node, ast.Call) and _name(node.func) in ("Target", "target.Target"):
            skip.update(id(argument) for argument in node.args)
    return [
        f"{source.at(node)}: the literal device {node.value!r}; take the tensor's own device"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == "cuda" or node.value.startswith("cuda:"))
        and id(node) not in skip
    ]


def environment_reads(source: Source) -> list[str]:
    complaints = []
    for node in ast.walk(source.tree):
        bad = isinstance(node, ast.Attribute) and _name(node) in (
            "os.environ",
            "os.environb",
            "os.getenv",
            "os.getenvb",
        )
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            bad = any(alias.name.startswith(("environ", "getenv")) for alias in node.names)
        if bad:
            complaints.append(f"{source.at(node)}: reads the environment; only knobs.py may")
    return complaints


def triton_versions(source: Source) -> list[str]:
    complaints = []
    for node in ast.walk(source.tree):
        bad = isinstance(node, ast.Attribute) and _name(node) == "triton.__version__"
        if isinstance(node, ast.ImportFrom) and node.module == "triton":
            bad = any(alias.name == "__version__" for alias in node.names)
        if isinstance(node, ast.Call) and _name(node.func).split(".")[-1] == "version":
            bad = any(isinstance(a, ast.Constant) and a.value == "triton" for a in node.args)
        if bad:
            complaints.append(f"{source.at(node)}: reads Triton's version outside a compat file")
    return complaints
