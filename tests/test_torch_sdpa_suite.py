"""scripts/torch_sdpa_suite.py, on a file with tests of our own in the form of PyTorch's."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "torch_sdpa_suite.py"

FILE = """
import unittest

from test_cpp_extensions_open_device_registration import generate_faked_module

generate_faked_module()


def made(name, fails):
    def test(self):
        if fails is None:
            self.skipTest("not here")
        self.assertFalse(fails, "it is " + name)

    return test


class TestSDPACudaOnlyCUDA(unittest.TestCase):
    pass


for i in range(7):
    name = f"test_mem_eff_{i}_cuda"
    setattr(TestSDPACudaOnlyCUDA, name, made(name, {0: None, 1: True}.get(i, False)))
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("torch_sdpa_suite", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def arguments(tmp_path):
    file = tmp_path / "test_transformers.py"
    file.write_text(FILE)
    return argparse.Namespace(file=file, k="not mem_eff_4", every=1, n=0, seconds=60)


def test_named_tests_run_as_pytorch_is(script, arguments, tmp_path):
    names = [f"test_mem_eff_{i}_cuda" for i in range(6)]
    found = script.outcomes(script.run(arguments, tmp_path, names, with_tileloom=False))
    assert sorted(found) == [name for name in names if "_4_" not in name]
    assert found["test_mem_eff_0_cuda"] == ("skipped", "not here")
    outcome, detail = found["test_mem_eff_1_cuda"]
    assert outcome == "failed"
    assert "it is test_mem_eff_1_cuda" in detail
    assert found["test_mem_eff_2_cuda"] == ("passed", "")


def test_the_tests_that_are_meant_are_chosen_each_nth(script):
    names = [f"test_mem_eff_{i}_cuda" for i in range(5)]
    names += ["test_other_cuda", "test_mem_eff_7_cpu", "test_fused_sdp_choice_cuda"]
    items = [SimpleNamespace(name=name) for name in names]
    options = {"--every": 2, "--names": ""}
    config = SimpleNamespace(getoption=options.get)
    script.pytest_collection_modifyitems(config, items)
    chosen = [item.name for item in items]
    assert chosen == ["test_fused_sdp_choice_cuda", *(f"test_mem_eff_{i}_cuda" for i in (0, 2, 4))]


def test_tests_of_the_same_kernels_come_together(script):
    form = "test_mem_efficient_attention_vs_math_ref_grads_batch_size_{}_seq_len_q_8_head_dim_{}_"
    form += "is_causal_{}_dropout_p_0_22_float16_scale_l1_cuda_float16"
    places = [(b, d, c) for b in (1, 8) for d in (16, 128) for c in (False, True)]
    items = [SimpleNamespace(name=form.format(*place)) for place in places]
    options = {"--every": 1, "--names": ""}
    script.pytest_collection_modifyitems(SimpleNamespace(getoption=options.get), items)
    together = [form.format(b, d, c) for c in (False, True) for d in (128, 16) for b in (1, 8)]
    assert [item.name for item in items] == together


def test_what_fails_only_with_tileloom_is_a_failure_unless_it_pins_a_fault(script):
    pinned = "test_fused_backwards_throws_determinism_warning_warn_only_True_cuda"
    rows = [
        script.Row("test_mem_eff_a", "failed", "wrong", "passed"),
        script.Row("test_mem_eff_b", "failed", "wrong", "failed"),
        script.Row("test_mem_eff_c", "passed"),
        script.Row("test_mem_eff_d", "failed", "wrong"),
        script.Row(pinned, "failed", "no warning", "passed"),
    ]
    verdicts = ["failed", "fails without tileloom", "passed", "failed", "pinned"]
    assert [row.verdict for row in rows] == verdicts
    text = script.summary(rows)
    assert "test_mem_eff_: 2 failed, 1 fails without tileloom, 1 passed" in text
    assert "failed: test_mem_eff_a\n    wrong" in text
    assert "tileloom's is, wherever deterministic algorithms are asked for" in text


def test_counts_of_several_processes_are_added_up(script, tmp_path):
    text = '{"forward": 2, "backward": 1, "refused": {"a": 3}}'
    for name in ("1.json", "2.json"):
        (tmp_path / name).write_text(text)
    assert script.counted(tmp_path) == {"forward": 4, "backward": 2, "refused": {"a": 6}}


def test_a_file_that_is_not_there_is_named(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["nowhere/test_transformers.py"])
    assert "it has to be PyTorch's test_transformers.py" in capsys.readouterr().err
