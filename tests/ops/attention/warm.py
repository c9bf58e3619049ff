"""Compile what the GPU tests need, several processes at once: Triton's cache on disk keeps it.

PYTHONPATH=src python -m tests.ops.attention.warm 0 8      # the first of eight shares
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def main(share: int, shares: int) -> None:
    """Call every case of this share once, without a look at the result."""
    from tests.ops.attention import cases
    from tests.ops.attention.test_gpu import COMPILED

    import tileloom
    from tileloom.ops.attention.config import gluon_rule, triton_rule
    from tileloom.target import target_of

    for case in COMPILED[share::shares]:
        inputs = case.inputs("cuda")
        problem, target = cases.problem_of(inputs), target_of(inputs.q)
        for config in (triton_rule(problem, target), gluon_rule(problem)):
            if not config.reasons_against(problem, target):
                tileloom.attention(inputs.q, inputs.k, inputs.v, **inputs.options, config=config)


def in_processes(shares: int) -> None:
    """Run all shares; what fails here fails again, with its reason, in the tests."""
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-m", "tests.ops.attention.warm"]
    running = [
        subprocess.Popen(
            [*command, str(share), str(shares)], cwd=_ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for share in range(shares)
    ]  # fmt: skip
    for process in running:
        process.wait(timeout=280)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
