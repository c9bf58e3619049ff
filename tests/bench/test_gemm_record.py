"""`scripts/gemm_record.py`: parts of a record put together, and the tables made of it."""

import copy
import importlib.util

import pytest
from scripts import gemm_record
from tests.house import ROOT


def _entry(name, us, **ratios):
    spread = {other: {"value": r, "low": r, "high": r} for other, r in ratios.items()}
    return {
        "name": name, "status": "ok", "time_ms": {"median": us / 1000}, "call_us": {"median": us},
        "ratios": spread, "call_ratios": spread, "about": {"config": "gluon_sm90:128,256"},
    }  # fmt: skip


def _part(name, ratio, commit="0123", **case):
    plain = {"bias": False, "activation": "", "residual": False, "chunks": 0, "judged": "device"}
    cell = {
        "case": {"name": name, "m": 4, "n": 8, "k": 16, **plain, **case},
        "flops": 1024.0,
        "entries": [_entry("torch", 100.0), _entry("tileloom", 100.0 / ratio, torch=ratio)],
    }
    bar = {"case": name, "asked": "at least 1 x torch", "found": "", "met": ratio >= 1}
    return {
        "kind": "tileloom-bench-gemm", "code": {"commit": commit}, "finished": True,
        "machine": {"card": "a card", "torch": "2", "packages": {"triton": "3"}},
        "date": "2026-11-28T00", "command": f"--cases {name}",
        "copy_gbps": 2.0, "cells": [cell],
        "bars": [bar, {"case": "geometric mean", "asked": "", "found": "", "met": False}],
    }  # fmt: skip


PARTS = [_part("b", 1.25), _part("a", 0.8), _part("c", 2.0, chunks=3)]


def test_parts_become_one_record_with_its_own_mean():
    whole = gemm_record.merge(PARTS, ["a", "b", "c"])
    assert [cell["case"]["name"] for cell in whole["cells"]] == ["a", "b", "c"]
    assert [(bar["case"], bar["met"]) for bar in whole["bars"]] == [
        ("a", False), ("b", True), ("c", True), ("geometric mean", False),
    ]  # fmt: skip
    assert whole["bars"][-1]["found"] == "1.000 (2 cases)"
    assert whole["finished"]
    assert not gemm_record.merge(PARTS[:2], ["a", "b", "c"])["finished"]


def test_the_later_of_two_counts_and_another_commit_is_refused():
    later = copy.deepcopy(PARTS[1])
    later["cells"][0]["flops"] = 7.0
    assert gemm_record.merge([*PARTS, later], ["a", "b", "c"])["cells"][0]["flops"] == 7.0
    with pytest.raises(ValueError, match=r"code.commit is 0123 in one part and 4567 in another"):
        gemm_record.merge([PARTS[0], _part("a", 1.0, "4567")], ["a", "b"])


def test_tables():
    place = importlib.util.spec_from_file_location(
        "record_tables", ROOT / "scripts" / "record_tables.py"
    )
    tables = importlib.util.module_from_spec(place)
    place.loader.exec_module(tables)
    text = tables.gemm(gemm_record.merge(PARTS, ["a", "b", "c"]))
    assert (
        "| a | 4 x 8 x 16 | 125.0 | 0 | 100.0 | 0.800 [0.800, 0.800] | no | 128,256 |\n| b |"
        in text
    )
    assert "| c | 4 x 8 x 16 | 50.0 | 0 | 100.0 |" in text
    assert text.endswith("Geometric mean of the products: 1.000 (2 cases). Bars met: 2 of 4.")
