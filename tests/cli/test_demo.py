import json
import re
import socket
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.integrations.tiny_models import save_tiny_bert

from tileloom.cli import demo
from tileloom.cli.main import main
from tileloom.integrations import hf_attention
from tileloom.report import compiled
from tileloom.report.findings import KernelRow
from tileloom.report.text import Passage, project_passages


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the demo wants to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_network")
def test_the_demo_on_the_real_model(tmp_path, capsys):
    """The main job, from the command line to the page; only the compile table is left out."""
    before = [dict(table) for table in hf_attention.interfaces()]
    out = tmp_path / "a folder"
    # Asked for its own words, a section must find itself, whatever the documentation says today.
    passage = project_passages(24)[9]
    query = f"{passage.title}. {passage.text}"
    arguments = ["--texts", "24", "--compile-seconds", "0", "--query", query]
    status = main(["demo", *arguments, "--out", str(out)])
    printed = capsys.readouterr()
    assert status == 0, printed
    assert [dict(table) for table in hf_attention.interfaces()] == before

    difference = re.search(
        r"largest difference (\S+), smallest cosine (\S+) \(24 texts", printed.out
    )
    assert float(difference[1]) < 2e-6
    assert float(difference[2]) > 1 - 1e-6
    careless = re.search(r"with padding seen it would be off by (\S+)", printed.out)
    assert float(careless[1]) > 1e-3
    assert "accuracy rule (16 texts): holds" in printed.out
    hits = re.findall(r"^    (\d\.\d{3})  (.*)", printed.out, re.M)
    scores = [float(score) for score, _ in hits]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.8
    assert hits[0][1].startswith(f"{passage.source}: {passage.text[:60]}")
    # 24 texts are 2 batches through 6 layers
    assert re.search(r"\b12\b.* reference .*12 heads of 32", printed.out)
    assert "key lengths" in " ".join(printed.out.split())  # the table may break the line there
    assert "gluon_sm90" in printed.out
    _check_the_emulated_part(printed.out, out)
    assert f"written: {out / 'report.html'}" in printed.out
    assert "12 attention calls" in printed.err
    assert "\x1b" not in printed.out + printed.err  # nobody looks on: no colours, no spinner

    page = (out / "report.html").read_text(encoding="utf-8")
    assert "all checks passed" in page
    assert f"<small>{escape(passage.source)}</small>" in page
    assert "tileloom on all-MiniLM-L6-v2" in page


def _check_the_emulated_part(printed, folder):
    rows = re.findall(r"(as shipped|one wait removed).* (\S+) .* (holds|broken) .* (\d) ", printed)
    shipped, lucky, unlucky = rows
    assert shipped[2:] == ("holds", "0")
    assert float(shipped[1]) < 2e-3  # float16
    assert lucky[1:3] == shipped[1:3]  # to the bit, as nothing was late
    assert int(lucky[3]) >= 1
    assert unlucky[2] == "broken"
    assert int(unlucky[3]) >= 1
    removed = re.search(r"wait that was removed: (\S+):(\d+)  (.*)", printed)
    source = (Path(demo.__file__).parents[1] / "ops/attention" / removed[1]).read_text()
    assert source.splitlines()[int(removed[2]) - 1].strip() == removed[3]
    assert re.search(
        r"\[race\] shared buffer ring\[0\].* is read by a wgmma while a TMA load", printed
    )
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"process_name", "TMA load of _producer"} <= {event["name"] for event in events}


@pytest.fixture
def tiny_demo(tmp_path, monkeypatch):
    """The demo on a tiny model, with two kernels that need no compiling."""
    folder = save_tiny_bert(tmp_path / "tiny model", max_length=128)
    rows = [
        KernelRow("k[a]", "sm_90", 40, 0, 1024, 2, 4, 1.25),
        KernelRow("k[b]", "sm_90", 41, 0, 0),
    ]

    def compile_rows(pairs, *, seconds, on_result):
        assert {arch for _, arch in pairs} == {"sm_90"}
        gluon = [spec.gluon for spec, _ in pairs]
        assert gluon[:6] == [True, False] * 3  # Hopper and portable kernels in turn
        return rows, "3.7.1", 5

    monkeypatch.setattr(compiled, "compile_rows", compile_rows)

    def run(*arguments):
        out = tmp_path / "out"
        return main(
            [
                "demo",
                "--texts",
                "16",
                "--model",
                str(folder),
                "--out",
                str(out),
                "--no-emulator",
                *arguments,
            ]
        )

    run.rows, run.page = rows, tmp_path / "out" / "report.html"
    return run


def test_another_model_and_the_compile_table(tiny_demo, capsys):
    assert tiny_demo() == 0
    out = capsys.readouterr().out
    assert "compiled by Triton 3.7.1; 5 left out (see tileloom inspect)" in out
    assert re.search(r"k\[a\].*sm_90.*40.*0 B.*1.0 KiB.*2.*4.*1.2 s.*none", out)
    assert all(query in out for query in demo.QUERIES)
    page = tiny_demo.page.read_text(encoding="utf-8")
    assert "tileloom on tiny model" in page
    assert "2 of 2" in page


class OneWord:
    """Embeds a text by its first letter."""

    def cast(self, dtype, device):
        return self

    def use(self, name):
        return self

    def tokenize(self, texts, batch_size):
        return [list(texts)]

    def embed(self, batches):
        letters = [ord(text[0]) - ord("a") for batch in batches for text in batch]
        return torch.eye(26)[letters]


def test_a_title_counts_like_its_text_and_a_section_is_found_once():
    passages = [
        Passage("page, text alone", "apple", "other"),
        Passage("page, both", "apple", "apple"),
        Passage("page, both", "another", "apple"),
        Passage("page, title alone", "other", "apple"),
        Passage("page, none", "other", "other"),
    ]
    job = SimpleNamespace(
        args=SimpleNamespace(query=["apple"]), embedder=OneWord(), passages=passages,
        dtypes=[torch.float32], device=torch.device("cpu"),
    )  # fmt: skip
    vectors = OneWord().embed([[p.text for p in passages]])
    (search,) = demo._search(job, vectors)
    assert [(hit.source, round(hit.score, 3)) for hit in search.hits] == [
        ("page, both", 1.0),
        ("page, text alone", 0.707),
        ("page, title alone", 0.707),
    ]
    assert search.hits[0].text == "apple"


def test_a_kernel_with_a_fault_fails_the_demo(tiny_demo, capsys):
    tiny_demo.rows.append(KernelRow("k[c]", "sm_90", faults=("it does not compile",)))
    assert tiny_demo() == 1
    assert "fault: k[c] for sm_90: it does not compile" in capsys.readouterr().out
    assert "k[c] for sm_90: it does not compile" in tiny_demo.page.read_text(encoding="utf-8")


def test_embeddings_that_disagree_fail_the_demo(tiny_demo, monkeypatch, capsys):
    right = hf_attention.attention

    def wrong(q, k, v, *, mask, bias, scale, dropout_p):
        return right(q, k, v, mask=mask, bias=bias, scale=scale * 1.02, dropout_p=dropout_p)

    monkeypatch.setattr(hf_attention, "attention", wrong)
    assert tiny_demo("--compile-seconds", "0") == 1
    out = capsys.readouterr().out
    assert "accuracy rule (16 texts): broken: embeddings: an element is off by" in out
    assert "fault: embeddings in float32: embeddings: an element is off by" in out


def test_a_model_with_its_own_attention_is_refused(tiny_demo, monkeypatch, capsys):
    from tileloom.integrations.hf_embedder import Embedder

    monkeypatch.setattr(Embedder, "use", lambda self, implementation: self)
    assert tiny_demo() == 2
    assert "never called the attention that it was told to use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "no/such/folder"], "the model folder no/such/folder does not exist"),
        (["--texts", "7"], "--texts is 7; it must be at least 8"),
        (["--out", f"{__file__}/x"], "test_demo.py/x cannot be made: Not a directory. Try: --out "),
    ],
)
def test_wrong_arguments_are_explained(arguments, text, capsys):
    assert main(["demo", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_missing_transformers_is_explained(monkeypatch, capsys, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--texts", "8", "--out", str(tmp_path)]) == 1
    assert "transformers 5 or later is needed" in capsys.readouterr().err
