import json
from pathlib import Path

import pytest
import torch

from tileloom.bench import AttentionCase, load_cases, select
from tileloom.errors import OptionError

ROOT = Path(__file__).parents[2]
CASES = load_cases(ROOT / "benchmarks" / "attention_cases.json")


def test_the_cells():
    names = [
        f"d{d}-l{length}{causal}"
        for d in (64, 128, 256)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in ("", "-causal")
    ]
    assert [case.name for case in CASES] == names
    for case in CASES:
        assert case.batch * case.len_q == 16384
        assert case.heads_q * case.head_dim == 2048
        assert (case.heads_kv, case.len_k) == (case.heads_q, case.len_q)
        assert case.dtype == torch.bfloat16
        parts = case.name.split("-")
        assert (parts[0], parts[1]) == (f"d{case.head_dim}", f"l{case.len_q}")
        assert case.is_causal == case.name.endswith("causal")


def test_flops_and_bytes():
    full, causal = (select(CASES, f"d128-l16384{mask}")[0] for mask in ("", "-causal"))
    assert full.flops == 4 * 16 * 16384**2 * 128
    assert causal.flops == full.flops / 2
    assert full.bytes_moved == 4 * 16384 * 2048 * 2
    grouped = AttentionCase("g", 2, 8, 2, 16, 32, 64, False)
    assert grouped.input_bytes == 2 * (8 * 16 + 2 * 2 * 32) * 64 * 2


def test_inputs_are_normal_numbers_and_differ_between_sets():
    case = AttentionCase("c", 2, 4, 2, 128, 64, 32, False, "float32")
    one, two = (case.inputs(torch.device("cpu"), seed) for seed in (0, 1))
    assert one.q.shape == (2, 4, 128, 32)
    assert one.k.shape == one.v.shape == (2, 2, 64, 32)
    for tensor in (one.q, one.k, one.v):
        assert tensor.dtype == torch.float32
        assert abs(float(tensor.mean())) < 0.05
        assert abs(float(tensor.std()) - 1) < 0.05
    assert not torch.equal(one.q, two.q)
    assert not torch.equal(one.k, one.v)
    again = case.inputs(torch.device("cpu"), 0)
    assert torch.equal(one.v, again.v)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("all", [case.name for case in CASES]),
        ("d64-l1024", ["d64-l1024"]),
        ("d256-l16384*", ["d256-l16384", "d256-l16384-causal"]),
        ("d128-l4096, d64-l1024", ["d64-l1024", "d128-l4096"]),
    ],
)
def test_select(wanted, found):
    assert [case.name for case in select(CASES, wanted)] == found


def test_select_names_what_it_cannot_find():
    with pytest.raises(OptionError, match=r"--cases names 'd96-.'.*d64-l1024, .*Try: --cases all"):
        select(CASES, "d64-l1024,d96-*")
    with pytest.raises(OptionError, match="--cases is empty"):
        select(CASES, " , ")


GOOD = {
    "name": "a", "batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 8, "len_k": 8, "head_dim": 8,
    "is_causal": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch=0; it must be an integer >= 1"),
        ({"batch": True}, "batch=True; it must be an integer >= 1"),
        ({"is_causal": 1}, "is_causal=1; it must be a bool"),
        ({"dtype_name": "int8"}, "must be one of bfloat16, float16, float32"),
        ({"colour": 1}, r"unknown fields \['colour'\]"),
    ],
)
def test_a_bad_case_is_named(tmp_path, change, text):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [{**GOOD, **change}]}))
    with pytest.raises(OptionError, match=text):
        load_cases(path)


@pytest.mark.parametrize("content", ["", "[]", '{"cases": 3}', "{}"])
def test_a_file_that_is_no_cases_file(tmp_path, content):
    path = tmp_path / "cases.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"cannot be read.*Try: benchmarks/attention_cases.json"):
        load_cases(path)


def test_missing_fields_and_double_names(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [{"name": "a"}]}))
    with pytest.raises(OptionError, match=r"lacks \['batch', 'head_dim'"):
        load_cases(path)
    path.write_text(json.dumps({"cases": [GOOD, GOOD]}))
    with pytest.raises(OptionError, match="two cases of the name 'a'"):
        load_cases(path)
