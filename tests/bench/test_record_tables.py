"""The tables of docs/ are what their records say."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "record_tables", ROOT / "scripts" / "record_tables.py"
)
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)


def _record(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_a_page_shows_its_record(name):
    page = (ROOT / tables.TABLES[name][0]).read_text()
    assert tables.page_with(name, page) == page, "run scripts/record_tables.py"
    begin = f"<!-- from {name} -->\n"
    assert tables.page_with(name, page.replace(begin, begin + "older ")) == page


def test_a_page_without_its_table_is_refused():
    with pytest.raises(SystemExit, match=r"has 0 tables from launch_h100.json, not one"):
        tables.page_with("launch_h100.json", "# Launching\n")


def test_what_misses_a_bar_is_named():
    record = _record("rowwise_h100.json")
    cell = record["cells"][0]
    ours = next(e for e in cell["entries"] if e["name"] == "tileloom")
    ours["of_copy"] = 0.42
    ours["ratios"]["compile"] |= {"value": 0.77, "high": 0.78}
    text = tables.rowwise(record)
    assert "rms_norm 4096 forward (42.0%)" in text.partition("Below 90 %")[2]
    assert "rms_norm 4096 forward of torch.compile (0.770; a call" in text


def test_calls_and_the_first_launch_from_a_bundle_are_shown():
    record = _record("launch_h100.json")
    took = {step: [1.5, 2.0] for step in ("import", "open", "first", "second", "host")}
    pair = {"torch": {"median_us": 10.0}, "tileloom": {"median_us": 9.0}}
    bundle = {"ms, median and worst": {"add": took}, "runs": 8}
    text = tables.launches(
        record | {"calls": {"rms_norm": pair}, "first_launch_from_a_bundle": bundle}
    )
    assert "| rms_norm | 10.0 | 9.0 | 0.90 |" in text
    assert "| add | 1.50 | 1.50 | 1.50 | 1.50 |" in text


def test_the_cells_of_attention_that_are_not_ahead_are_named():
    record = _record("attention_fwd_h100.json")
    for ratio in [e for e in record["cells"][3]["entries"] if e["name"] == "tileloom"]:
        ratio["ratios"]["cudnn"] |= {"value": 0.93, "low": 0.9, "high": 1.01}
    text = tables.attention(record)
    assert f"{record['cells'][3]['case']['name']} (0.93)" in text.partition("not in: ")[2]


def test_features_show_their_bounds_and_what_is_below():
    record = _record("attention_fwd_h100.json")
    names = [cell["case"]["name"] for cell in record["cells"]]
    note = "{}: bound 500 TFLOP/s by plain speed, tileloom reaches {} of it, 3.9 times the seed's"
    record["notes"] = [note.format(names[0], "0.79"), note.format(names[1], "0.80")]
    text = tables.features(record)
    assert "| 500 by plain speed | 0.79 | 3.5 |" in text
    assert text.endswith(f"Below 0.8 of the bound: {names[0]} (0.79).")
