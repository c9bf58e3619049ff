"""scripts/torch_sdpa_suite.py, on a file with tests of our own in the form of PyTorch's."""

import importlib.util
import sys
from pathlib import Path

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
setattr(TestSDPACudaOnlyCUDA, "test_other_cuda", made("other", True))
setattr(TestSDPACudaOnlyCUDA, "test_mem_eff_7_cpu", made("on the CPU", True))
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
def theirs(script, tmp_path):
    """The outcomes of a run as PyTorch is, of each second test."""
    import argparse

    file = tmp_path / "test_transformers.py"
    file.write_text(FILE.replace('"""', "'"))
    arguments = argparse.Namespace(file=file, k="not mem_eff_4", every=1, n=0, seconds=60)
    return script.outcomes(script.run(arguments, tmp_path, with_tileloom=False))


def test_the_tests_that_are_meant_run_as_pytorch_is(theirs):
    assert sorted(theirs) == [f"test_mem_eff_{i}_cuda" for i in (0, 1, 2, 3, 5, 6)]
    assert theirs["test_mem_eff_0_cuda"] == ("skipped", "not here")
    outcome, detail = theirs["test_mem_eff_1_cuda"]
    assert outcome == "failed"
    assert "it is test_mem_eff_1_cuda" in detail
    assert theirs["test_mem_eff_2_cuda"] == ("passed", "")


def test_what_fails_only_with_tileloom_is_a_failure_unless_it_pins_a_fault(script):
    pinned = "test_fused_backwards_throws_determinism_warning_warn_only_True_cuda"
    ok, bad = ("passed", ""), ("failed", "wrong")
    before = {"test_mem_eff_a": ok, "test_mem_eff_b": bad, "test_mem_eff_c": ok, pinned: ok}
    after = {"test_mem_eff_a": bad, "test_mem_eff_b": bad, "test_mem_eff_c": ok, pinned: bad}
    rows = script.compare(before, after)
    assert {row.test: row.verdict for row in rows} == {
        "test_mem_eff_a": "failed",
        "test_mem_eff_b": "failed before as well",
        "test_mem_eff_c": "passed",
        pinned: "pinned",
    }
    text = script.summary(rows)
    assert "test_mem_eff_: 1 failed, 1 failed before as well, 1 passed" in text
    assert "failed: test_mem_eff_a\n    wrong" in text
    assert "tileloom's is, wherever deterministic algorithms are asked for" in text


def test_a_test_that_ran_only_without_tileloom_counts_as_failed(script):
    (row,) = script.compare({"test_mem_eff_a": ("passed", "")}, {})
    assert (row.verdict, row.detail) == ("failed", "did not run")


def test_counts_of_several_processes_are_added_up(script, tmp_path):
    text = '{"forward": 2, "backward": 1, "refused": {"a": 3}}'
    for name in ("1.json", "2.json"):
        (tmp_path / name).write_text(text)
    assert script.counted(tmp_path) == {"forward": 4, "backward": 2, "refused": {"a": 6}}


def test_a_file_that_is_not_there_is_named(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["nowhere/test_transformers.py"])
    assert "it has to be PyTorch's test_transformers.py" in capsys.readouterr().err
