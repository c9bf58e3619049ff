"""The project's own English text, cut into passages: its documentation and its docstrings."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FEWEST_WORDS = 12
MOST_WORDS = 60

_SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Memory|Math):", re.M
)
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.M | re.S)
_COLUMNS = re.compile(r"^[ ]*\|.*\n[ ]*\|[\s:|-]+\|[ ]*$", re.M)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LIST_ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+")


@dataclass(frozen=True)
class Passage:
    """A piece of text, and where it stands.

    Attributes:
        source: The file and the nearest heading, ``"docs/masks.md, Windows"``, or a Python name.
        text: The text.
        title: What it is about, in words: the page's first heading and the nearest one.
    """

    source: str
    text: str
    title: str = ""


def project_passages(limit: int | None = None) -> list[Passage]:
    """Collect passages of the project's documentation and docstrings.

    In a clone the documentation is README.md, CONTRIBUTING.md and docs/; an installed package has
    its docstrings and its licence.

    Args:
        limit: Passages at most. Documentation goes first, and of it what opens a section; of what
            is too much, an even sample. Default: what opens a section, each; without
            documentation 128.

    Returns:
        The passages, documentation first, in a fixed order.
    """
    package = Path(__file__).resolve().parents[1]
    written = list(documentation(package.parents[1]))
    docstrings = [p for path in sorted(package.rglob("*.py")) for p in _docstrings(path, package)]
    if not written:
        docstrings += _licence()
    if limit is None:
        limit = len({p.source for p in written}) or 128
    written = _documentation_sample(written, limit)
    return written + _sample(docstrings, limit - len(written))


def _documentation_sample(written: Sequence[Passage], limit: int) -> list[Passage]:
    """The first passage of each section says best what the section is about."""
    openings = {p.source: i for i, p in reversed(list(enumerate(written)))}.values()
    chosen = _sample(sorted(openings), limit)
    others = [i for i in range(len(written)) if i not in chosen]
    return [written[i] for i in sorted(chosen + _sample(others, limit - len(chosen)))]


def _sample(given: Sequence[T], limit: int) -> list[T]:
    if len(given) <= limit:
        return list(given)
    return [given[i * len(given) // limit] for i in range(limit)]


def documentation(root: Path) -> Iterator[Passage]:
    """Read the Markdown files of a clone.

    Args:
        root: The clone's folder; where it has no pyproject.toml of tileloom nothing is read.

    Yields:
        Passages in the order of the files.
    """
    project = root / "pyproject.toml"
    if not project.is_file() or 'name = "tileloom"' not in project.read_text(encoding="utf-8"):
        return
    for path in (root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md"))):
        if path.is_file():
            yield from markdown(path.read_text(encoding="utf-8"), str(path.relative_to(root)))


def markdown(text: str, name: str) -> Iterator[Passage]:
    """Cut Markdown into passages of one section each, the paragraphs and rows of words in turn.

    Args:
        text: The file's text; code, pictures and rows of numbers are left out.
        name: The file's name.

    Yields:
        Passages; their source is the file's name and the nearest heading.
    """
    page, heading, pieces = "", "", [""]
    for line in [*_COLUMNS.sub("", _FENCE.sub("", text)).splitlines(), "#"]:
        piece = line.strip()
        if line.startswith("#"):
            source = f"{name}, {heading}" if heading else name
            title = page if heading == page else f"{page}. {heading}"
            yield from _passages(" ".join(map(_ended, filter(None, pieces))), source, title)
            heading, pieces = _plain(line.lstrip("#").strip()), [""]
            page = page or heading
        elif piece.startswith("|"):
            pieces += [_row(piece), ""]
        elif not piece or piece.startswith("<"):
            pieces.append("")
        elif _LIST_ITEM.match(line):
            pieces.append(_LIST_ITEM.sub("", line).strip())
        else:
            pieces[-1] = f"{pieces[-1]} {piece}".strip()


def _row(line: str) -> str:
    """Return a row of a table as words, or nothing if it begins with a number or many are some."""
    words = ": ".join(filter(None, map(str.strip, line.strip("|").split("|")))).split()
    is_data = bool(words) and words[0][0].isdigit()
    return "" if is_data or sum(map(_has_digit, words)) > 0.4 * len(words) else " ".join(words)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


def _ended(piece: str) -> str:
    """Give a paragraph without a stop one, so that it is no part of the next."""
    return piece if piece[-1] in ".!?:;," else f"{piece}."


def _plain(text: str) -> str:
    """Take the marks out of a line of Markdown."""
    code = re.split(r"`([^`]*)`", _LINK.sub(r"\1", text))
    prose = [re.sub(r"[`*]|__", "", piece) for piece in code[::2]]
    return "".join(a + b for a, b in zip(prose, [*code[1::2], ""], strict=True)).strip()


def _passages(text: str, source: str, title: str) -> Iterator[Passage]:
    """Cut a text that is too long at its sentences; leave out one that is too short."""
    words: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", _plain(text)):
        more = sentence.split()
        if words and len(words) + len(more) > MOST_WORDS:
            yield from _one(words, source, title)
            words = []
        words += more
    yield from _one(words, source, title)


def _one(words: Sequence[str], source: str, title: str) -> Iterator[Passage]:
    if len(words) >= FEWEST_WORDS:
        yield Passage(source, " ".join(words), title)


def _docstrings(path: Path, package: Path) -> Iterator[Passage]:
    module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    module = module.removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _docstring(tree, module)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield from _docstring(node, f"{module}.{node.name}")


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef, source: str) -> Iterator[Passage]:
    text = _SECTION.split(ast.get_docstring(node) or "", maxsplit=1)[0]
    shown = [p for p in inspect.cleandoc(text).split("\n\n") if not p.startswith((" ", ">>>"))]
    about = " ".join(source.replace("_", " ").split("."))
    yield from _passages(" ".join(" ".join(shown).split()), source, about)


def _licence() -> Iterator[Passage]:
    """The licence text that an installed package carries."""
    try:
        files = importlib.metadata.files("tileloom") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "LICENSE":
            for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
                yield from _passages(" ".join(paragraph.split()), "LICENSE", "LICENSE")
