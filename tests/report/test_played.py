"""The Hopper kernel on the emulator, whole and damaged, as the demo shows it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from tileloom.report import played
from tileloom.report.findings import Span


def inputs(width, length=80, texts=2, heads=3):
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(3, texts, length, heads, width, generator=generator).transpose(2, 3)
    return (*qkv, torch.tensor([length, 33]))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "made"
    kernel = importlib.import_module(played.KERNEL).attention_fwd_kernel
    # A module that raises its own error for names that it lacks is loaded too.
    assert importlib.import_module("tileloom.cpasync.tilelang")
    return played.play(*inputs(32), folder), folder, kernel


def test_the_kernel_is_right_and_the_damaged_one_is_reported(result):
    found, _, _ = result
    assert found.faults == []
    shipped, lucky, unlucky = found.rows
    assert (shipped.reports, shipped.rule) == (0, "")
    assert 0 < shipped.max_error < found.plain_error
    # With every copy done at once the numbers are those of the whole kernel: only a report tells.
    assert (lucky.max_error, lucky.rule) == (shipped.max_error, "")
    assert lucky.reports > 0
    assert unlucky.rule
    assert unlucky.reports > 0
    assert found.report.startswith("[race] shared buffer ring[0]")
    assert "| s = issue_scores(q, rings, slot" in found.report
    assert found.problem.startswith("2 texts, 3 heads of 32, 80 tokens of which 33 to 80 are text")


def test_the_packages_own_kernel_stays_as_it_is(result):
    found, _, before = result
    module = sys.modules[played.KERNEL]
    assert module.attention_fwd_kernel is before
    launched = importlib.import_module("tileloom.ops.attention.launch_gluon_sm90_fwd")
    assert launched.attention_fwd_kernel is before
    name, _, rest = found.removed.partition(":")
    line, _, statement = rest.partition("  ")
    assert Path(module.__file__).name == name
    assert Path(module.__file__).read_text().splitlines()[int(line) - 1].strip() == statement
    assert not Path(module.__file__).is_relative_to("/tmp")


def test_the_timeline_and_its_beginning(result):
    found, folder, _ = result
    trace = json.loads((folder / found.timeline).read_text())
    assert found.tracks == played.tracks_of(trace, played.SHOWN_STEPS)
    tracks = {track.name: track.spans for track in found.tracks}
    assert list(tracks) == [
        "consumer", "consumer#1", "producer", "copies in flight", "wgmma in flight",
    ]  # fmt: skip
    assert {span.kind for span in tracks["producer"]} == {"run", "wait"}
    assert {span.kind for span in tracks["copies in flight"]} == {"load", "store"}
    assert {span.kind for span in tracks["wgmma in flight"]} == {"wgmma"}
    for spans in tracks.values():
        assert all(0 <= span.start < span.end <= played.SHOWN_STEPS for span in spans)


def test_a_trace_is_cut_at_a_step():
    line = {"line": "/somewhere/kernel.py:7"}
    flight = {"pid": 1, "tid": 100, "id": 4, "name": "TMA load of _producer"}
    trace = {
        "traceEvents": [
            {"pid": 1, "tid": 2, "ph": "M", "name": "thread_name", "args": {"name": "_producer"}},
            {"pid": 1, "tid": 2, "ph": "X", "name": "run", "ts": 1, "dur": 30, "args": line},
            {"pid": 1, "tid": 2, "ph": "X", "name": "run", "ts": 31, "dur": 5, "args": line},
            {"pid": 2, "tid": 2, "ph": "X", "name": "run", "ts": 1, "dur": 3, "args": line},
            {**flight, "ph": "b", "ts": 3, "args": line},
            {**flight, "ph": "e", "ts": 9},
        ]
    }
    producer, copies, products = played.tracks_of(trace, 20)
    assert producer.spans == (Span(1, 20, "run", "run, steps 1 to 20, kernel.py:7"),)
    assert copies.spans == (Span(3, 9, "load", "TMA load of _producer, steps 3 to 9, kernel.py:7"),)
    assert products.spans == ()


def test_a_model_that_the_kernel_does_not_take(tmp_path):
    found = played.play(*inputs(12), tmp_path)
    assert found.why_not.startswith("The Hopper kernel does not take it: ")
    assert "12" in found.why_not
    assert found.rows == ()
    assert list(tmp_path.iterdir()) == []


def test_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(played, "has_triton", lambda: False)
    assert "Triton is not installed" in played.play(*inputs(32), tmp_path).why_not
