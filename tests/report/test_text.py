import textwrap

from tileloom.report import text
from tileloom.report.text import MOST_WORDS, Passage, documentation, markdown, project_passages

PAGE = textwrap.dedent(
    """\
    # The *first* `heading`

    A paragraph with a [link](https://example.org/x) and `code`, long enough
    to be kept, as it has more than a dozen words.

    Too short.

    ```python
    never = "shown, however many words stand here, one two three four five six"
    ```

    ## Second

    - An item of a list that is long enough to be a passage of its own, with __bold__ words.
    - Another item of the same list,
      which is no sentence

    | what | the names of columns are left out |
    |---|---:|
    | a row | of a table | about words |
    | 12: a row | that begins with a number |
    | a row of numbers | 1.5 | 2.5 | 3.5 |

    <p>html is left out as well, however many words there are in it, one two three</p>
    """
)


def test_markdown_is_cut_into_passages_of_a_section():
    assert list(markdown(PAGE, "a.md")) == [
        Passage(
            "a.md, The first heading",
            "A paragraph with a link and code, long enough to be kept, as it has more than a dozen "
            "words. Too short.",
            "The first heading",
        ),
        Passage(
            "a.md, Second",
            "An item of a list that is long enough to be a passage of its own, with bold words. "
            "Another item of the same list, which is no sentence. a row: of a table: about words.",
            "The first heading. Second",
        ),
    ]


def test_a_page_without_a_heading_has_passages_without_a_title():
    words = " ".join(["word"] * text.FEWEST_WORDS)
    assert list(markdown(words, "a.md")) == [Passage("a.md", f"{words}.")]


def test_code_keeps_its_signs():
    line = "A name may be a pattern such as `a*` and `__all__`, *here* the [`x*`](y.md) is a link."
    (found,) = markdown(line, "a.md")
    assert found.text == "A name may be a pattern such as a* and __all__, here the x* is a link."


def test_what_opens_a_section_is_taken_first():
    def page(sections, items):
        item = "- Words of this section number {}, of which there are more than a dozen in a row.\n"
        return "".join(f"# S{s}\n" + item.format(s) * items for s in range(sections))

    written = list(markdown(page(4, 3), "a.md"))
    assert [p.source for p in text._documentation_sample(written, 4)] == [
        f"a.md, S{s}" for s in range(4)
    ]
    assert len(text._documentation_sample(written, 2)) == 2


def test_a_long_paragraph_is_cut_at_its_sentences():
    sentence = "This sentence has exactly eight words in it. "
    passages = list(markdown(sentence * 30, "a.md"))
    assert len(passages) > 1
    assert all(len(p.text.split()) <= MOST_WORDS and p.text.endswith("it.") for p in passages)
    assert sum(len(p.text.split()) for p in passages) == 30 * 8


def test_only_a_clone_of_tileloom_has_documentation(tmp_path):
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text(PAGE)
    assert list(documentation(tmp_path)) == []
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert list(documentation(tmp_path)) == []
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "tileloom"\n')
    assert [p.source.split(",")[0] for p in documentation(tmp_path)] == ["README.md"] * 2 + [
        "docs/b.md"
    ] * 2


def test_the_project_has_documentation_and_docstrings():
    passages = project_passages(10_000)
    sources = {p.source.split(",")[0] for p in passages}
    assert {"README.md", "tileloom.errors.bullet_list", "tileloom"} <= sources
    assert all(len(p.text.split()) >= text.FEWEST_WORDS for p in passages)
    assert not any(word in p.text for p in passages for word in ("```", "Args:", "Returns:"))


def test_by_default_each_section_has_one_passage():
    sections = {p.source for p in project_passages(10_000) if ".md" in p.source}
    passages = project_passages()
    assert {p.source for p in passages} == sections
    assert len(passages) == len(sections)
    assert all(p.title for p in passages)


def test_an_installed_package_has_its_docstrings(monkeypatch):
    monkeypatch.setattr(text, "documentation", lambda root: iter(()))
    assert len(project_passages()) == 128
    passages = project_passages(40)
    assert len(passages) == 40
    assert all(p.title.startswith("tileloom") for p in passages if p.source != "LICENSE")
    assert any(p.source.startswith("tileloom.ops") for p in passages)
    assert not any(p.source.endswith(".md") for p in passages)


def test_the_limit_takes_an_even_sample():
    everything = project_passages(10_000)
    some = project_passages(12)
    assert len(some) == 12
    assert set(some) <= set(everything)
    assert project_passages(12) == some
