"""The portable kernel on the CPU: Triton's interpreter runs its source, tile by tile.

bfloat16 is left out: the interpreter itself gets it wrong (Triton 3.7.1).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ops.attention import cases

_ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("group", cases.GROUPS)
def test_the_kernel_is_right_on_the_interpreter(group):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}",
    }
    # finfo.min times log2(e) is meant to be -inf.
    warn = ["-W", "error", "-W", "ignore:overflow encountered:RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, *warn, "-m", "tests.ops.attention.interpreted", group],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["id"] for r in results] == [case.id for case in cases.GROUPS[group]]
    wrong = [f"{r['id']}:\n{r['error']}" for r in results if r["error"]]
    assert not wrong, "\n".join(wrong)
