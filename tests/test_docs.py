"""The documentation is true: its examples run, its links lead somewhere, its tables are whole."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest
import torch

from tests.house import ROOT
from tileloom import knobs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_examples_run(page):
    """One after another, as a reader would run them; each page on its own."""
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, example {number}", "exec"), names)


def test_readme_example_prints_what_a_reader_expects(capsys):
    torch.manual_seed(0)
    names = {}
    first, second = blocks(ROOT / "README.md")
    exec(first, names)
    assert capsys.readouterr().out == "torch.Size([2, 8, 100, 64]) torch.Size([2, 8, 100])\n"
    assert len(first.strip().splitlines()) <= 10
    exec(second, names)
    assert capsys.readouterr().out.startswith("reference ")


def test_printed_mask_is_the_one_in_the_text(capsys):
    page = ROOT / "docs" / "attention.md"
    block = next(b for b in blocks(page) if "materialize" in b)
    exec(block, {"torch": torch, "masks": importlib.import_module("tileloom.ops.attention.masks")})
    printed = capsys.readouterr().out.strip()
    assert f"```\n{printed}\n```" in page.read_text()


def without_blocks(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pages
def test_links_lead_somewhere(page):
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(page))  # kernel[grid](...) is no link
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose):
        if not target.startswith(("http://", "https://")):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("name", ["README.md", "docs/attention.md"])
def test_every_backend_is_described(name):
    from tileloom.ops.attention.config import BACKENDS

    text = (ROOT / name).read_text()
    for backend in BACKENDS:
        assert f"`{backend}`" in text


def test_every_knob_is_in_the_table():
    rows = (ROOT / "docs" / "settings.md").read_text().splitlines()
    for knob in knobs.KNOBS.values():
        row = next(r for r in rows if r.startswith(f"| `{knob.name}` | `{knob.variable}` |"))
        assert row.endswith(f"| {knob.help} |")


def test_contributing_shows_the_diagram_that_is_enforced():
    from tests import house

    text = (ROOT / "CONTRIBUTING.md").read_text()
    for row in house.ROWS:
        for box in row:
            is_shown = re.search(rf"\b{re.escape(box)}\b", text) is not None
            assert is_shown or box == "ops" or box.startswith("ops._"), box


def test_commands_of_make_exist():
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ([\w.-]+)", page.read_text())
        assert set(named) <= targets, page.name


def test_numbers_stand_only_beside_results():
    """A speed in the README must link to the file that holds it."""
    for line in (ROOT / "README.md").read_text().splitlines():
        if re.search(r"\d\s*(?:TFLOPS|TFLOP/s|x faster)", line):
            assert "benchmarks/results/" in line, line


DOCTESTS = (
    "tileloom.knobs",
    "tileloom.testing.cases",
    "tileloom.testing.poison",
    "tileloom.ops.attention.api",
    "tileloom.ops.rowwise.cross_entropy.api",
    "tileloom.ops.rowwise.softmax.api",
    "tileloom.tuning.grids",
    "tileloom.tuning.heuristics_lists",
)


@pytest.mark.parametrize("name", DOCTESTS)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
