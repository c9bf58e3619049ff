import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.report.sample import sample

from tileloom.report.findings import KernelRow
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
    ):
        assert text in page.words, text


def test_texts_are_escaped_and_nothing_is_loaded():
    text = render(sample())
    page = Page(text)
    assert "script" not in page.tags
    assert "What is <script>alert(1)</script>?" in page.words
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "onload"}
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_sections_without_findings_are_left_out_or_explained():
    findings = sample()
    findings.contests, findings.kernels = [], []
    findings.no_contest = "This machine has no GPU."
    page = Page(render(findings))
    assert "This machine has no GPU." in page.words
    assert "The kernels, compiled" not in page.words
    assert "svg" not in page.tags


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


def test_the_page_is_written_into_a_folder_that_is_made(tmp_path):
    path = write_page(sample(), tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "report.html"
    assert path.read_text(encoding="utf-8") == render(sample())


def test_small_numbers():
    assert [sci(x) for x in (0.0, 1.94e-7, 0.17)] == ["0", "1.9e-07", "1.7e-01"]
