"""Compile what the GPU tests need, several processes at once: Triton's cache on disk keeps it.

PYTHONPATH=src python -m tests.ops.attention.warm 0 8 tests.ops.attention.test_gpu   # 1st of 8
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def main(share: int, shares: int, module: str) -> None:
    """Call every case of this share of a test module's `COMPILED` once, and look at nothing."""
    tests = importlib.import_module(module)
    for case in tests.COMPILED[share::shares]:
        tests.warm_one(case)


def in_processes(shares: int, module: str) -> None:
    """Run all shares; what fails here fails again, with its reason, in the tests."""
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-m", "tests.ops.attention.warm"]
    running = [
        subprocess.Popen(
            [*command, str(share), str(shares), module], cwd=_ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for share in range(shares)
    ]  # fmt: skip
    for process in running:
        process.wait(timeout=280)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
