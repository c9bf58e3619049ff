"""Every example runs on the CPU and prints what it promises."""

import runpy

import pytest

from tests.house import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRINTED = {
    "01_attention": ["output (2, 8, 100, 64)", "largest error: ours", "ShapeError: attention: k"],
    "02_masks": [
        "    #.....\n    ##....\n    ###...\n\n    ####..\n    #####.\n    ######",
        "    ####..   ##....\n    #####.   ###...\n    ######   ####..",
        "without keys: output 0, log-sum-exp -inf",
    ],
    "03_transformers": [
        "padded on the right: off by",
        "tileloom got key lengths, 4 query and 2 key heads",
        "padded on the left: off by",
        "tileloom got a bool mask",
    ],
    "04_training": ["step  0: loss 2.95", "step 40: loss 0.0", "right: 100%"],
    "06_tuning": [
        "16384 x 768: XBLOCK: 2, R0_BLOCK: 1024, num_warps: 8, num_stages: 1",
        "as accurate as PyTorch",
        "ArgumentError: tuning: cols is missing in a launch of 'rms_norm_kernel'",
    ],
    "05_launch": [
        "launched: off by 0\n",
        "bound: off by 0\n",
        "OptionError: launch: the grid of 'add_kernel' is (0,)",
    ],
    "07_asynchronous_copies": [
        "0 elements differ\n",
        "[race] shared buffer tile is read by a local load while a TMA load write of it is not",
        "vs   07_asynchronous_copies.py:30  | cp.tma_load(x_desc, corner, full.index(0), tile)",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    runpy.run_path(str(path))["main"]()
    printed = capsys.readouterr().out
    for text in PRINTED[path.stem]:
        assert text in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_does_nothing_when_imported(path, capsys):
    runpy.run_path(str(path))
    assert capsys.readouterr().out == ""
