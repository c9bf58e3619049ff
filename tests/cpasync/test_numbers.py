"""The numbers on the pages are those of the records, and the records meet the issue's bars."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tests.house import ROOT

sys.path.append(str(ROOT / "scripts"))
tables = importlib.import_module("cpasync_tables")
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = sorted(RESULTS.glob("cpasync_h?00.json"))
by_record = pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)


@pytest.mark.parametrize("name", tables.PAGES)
def test_pages_show_the_records(name):
    text = (ROOT / name).read_text()
    assert tables.BLOCK.search(text)
    assert tables.page_of(text) == text, "python scripts/cpasync_tables.py writes the tables anew"


def test_every_record_is_shown():
    shown = {
        m[2] for name in tables.PAGES for m in tables.BLOCK.finditer((ROOT / name).read_text())
    }
    assert RECORDS
    assert shown == {f"benchmarks/results/{path.name}" for path in RESULTS.glob("cpasync_*.json")}


@by_record
def test_the_tma_copy_is_nearly_the_best_device_copy(path):
    for rows in json.loads(path.read_text())["tables"]["copy"].values():
        best = max(rows[name]["GB/s"] for name in tables.PEERS)
        ours = max(row["GB/s"] for name, row in rows.items() if name not in tables.PEERS)
        assert ours >= 0.97 * best


@by_record
@pytest.mark.parametrize("size", ["4096^3", "8192^3"])
def test_the_gemm_example_is_nearly_cublas(path, size):
    rows = json.loads(path.read_text())["tables"]["gemm"][size]
    assert rows["cpasync"]["TFLOP/s"] >= 0.9 * rows["cuBLAS"]["TFLOP/s"]


@by_record
def test_nothing_was_wrong_or_failed(path):
    record = json.loads(path.read_text())
    assert record["commit"]
    assert record["machine"]["card"]
    for cells in record["tables"].values():
        for rows in cells.values():
            assert all("ms" in row for row in rows.values())
