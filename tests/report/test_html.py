import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.report.sample import sample

from tileloom.report.findings import KernelRow, Played, PlayedRow
from tileloom.report.html import render, sci, write_page

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects text by tag, and fails on tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def test_every_finding_is_on_the_page():
    page = Page(render(sample()))
    for text in (
        "tileloom on a <model> & more",
        "80 passages (2,760 words)",
        "all checks passed",
        "NVIDIA H100 80GB HBM3, 132 multiprocessors",
        "float16 4.1e-04 0.9999991 3.0e-04 3.9e-04 1.7e-01 holds on 16 texts",
        "0.610 Text & more. docs/a.md, One",
        "30 triton float32, 12 heads of 32 the first gluon_sm90 refused: dtype torch.float32",
        "PyTorch cuDNN 61.0 µs 1.48 x [1.46, 1.50]",
        "PyTorch flash refused RuntimeError: no mask <here>",
        "attention_fwd_gluon_sm90[d64] sm_90 168 0 B 112.0 KiB 2 1 4.2 s",
        "attention_fwd_triton[d32] sm_90 175 0 B 16.0 KiB 1 2 cached",
        "By Triton 3.7.1; none of these 2 has a fault. tileloom inspect shows every architecture, "
        "and 24 kernels that were left out",
        "60 attention calls, by gluon_sm90, triton",
        "attention layer computes with: 4 texts, 12 heads of 32, cast to float16.",
        "Largest difference from float64: 6.7e-04, where the plain formula in float16 is off by "
        "5.9e-03. the accuracy rule holds nothing to report in 1,504 memory accesses of 4 programs",
        "kernel.py:203 mbarrier.wait(full, phase)",
        "as shipped as late as they may 6.7e-04 holds 0",
        "one wait removed at once 6.8e-04 holds 2",
        "one wait removed as late as they may NaN broken 3",
        "[race] shared buffer <ring> is read at kernel.py:207",
    ):
        assert text in page.words, text


def test_texts_are_escaped_and_nothing_is_loaded():
    text = render(sample())
    page = Page(text)
    assert "script" not in page.tags
    assert "What is <script>alert(1)</script>?" in page.words
    assert not {name for _, name, _ in page.attributes} & {"src", "onload"}
    # What it links to lies beside it, and is fetched only by a click.
    links = [(tag, value) for tag, name, value in page.attributes if name == "href"]
    assert links == [("a", "timeline.json")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_sections_without_findings_are_left_out_or_explained():
    findings = sample()
    findings.contests, findings.kernels = [], []
    findings.no_contest = "This machine has no GPU."
    findings.played = None
    page = Page(render(findings))
    assert "Hopper kernel" not in page.words
    assert "This machine has no GPU." in page.words
    assert "The kernels, compiled" not in page.words
    assert "svg" not in page.tags


def test_a_kernel_that_was_not_played_says_why():
    findings = sample()
    findings.played = Played("2 texts", "The Hopper kernel does not take it: head dim 12.")
    words = Page(render(findings)).words
    assert "not emulated The Hopper kernel does not take it: head dim 12." in words
    assert "one wait" not in words


def test_faults_come_first():
    findings = sample()
    findings.agreements[0] = replace(findings.agreements[0], rule="an element is off by 0.1")
    findings.kernels.append(KernelRow("k[d8]", "sm_90", faults=("it does not compile",)))
    assert findings.faults == [
        "embeddings in float16: an element is off by 0.1",
        "k[d8] for sm_90: it does not compile",
    ]
    words = Page(render(findings)).words
    assert "2 faults found embeddings in float16: an element is off by 0.1" in words
    assert "k[d8] sm_90 did not compile it does not compile" in words
    assert "1 of these 3 has a fault" in words


@pytest.mark.parametrize("status", ["wrong", "refused"])
def test_only_our_own_result_is_a_fault(status):
    findings = sample()
    assert findings.faults == []  # PyTorch's rows are refused and wrong there
    contest = findings.contests[0]
    rows = (replace(contest.rows[0], status=status, note="off"), *contest.rows[1:])
    findings.contests = [replace(contest, title="One call", rows=rows)]
    assert findings.faults == [f"One call: tileloom is {status}: off"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (PlayedRow("as shipped", "late", 0.1, "off", 0), "as shipped, emulated (late): off"),
        (PlayedRow("as shipped", "late", 0.1, "", 2), "as shipped, emulated (late): 2 reports"),
        (
            PlayedRow("one wait removed", "eager", 0.1, "", 0, changed=True),
            "one wait removed, emulated (eager): nobody noticed",
        ),
    ],
)
def test_the_emulator_finds_nothing_but_the_damage(row, fault):
    findings = sample()
    findings.played = replace(findings.played, rows=(row,))
    assert findings.faults == [f"the Hopper kernel {fault}"]


def test_the_page_is_written_into_a_folder_that_is_made(tmp_path):
    path = write_page(sample(), tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "report.html"
    assert path.read_text(encoding="utf-8") == render(sample())


def test_small_numbers():
    assert [sci(x) for x in (0.0, 1.94e-7, 0.17, float("nan"))] == [
        "0", "1.9e-07", "1.7e-01", "NaN",
    ]  # fmt: skip
