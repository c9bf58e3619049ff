"""What `tileloom check` runs of the row-wise kernels, for the mutants of what they wait for.

tileloom check tests/ops/rowwise/emulated.py [--mutate --kernels KERNEL_FILE]
"""

from __future__ import annotations

import torch
from tests.ops.rowwise.split_kernels import sum_kernel

from tileloom.launch.launcher import prepare

ROWS, PARTS, BLOCK = 5, 3, 32


def meeting_of_programs() -> None:
    """Programs that share a row meet; each then sees what all have stored."""
    x = torch.arange(ROWS * PARTS * BLOCK, dtype=torch.float32)
    out = torch.full((ROWS, PARTS), float("nan"))
    counters = torch.zeros(ROWS + 1, dtype=torch.int32)
    partials = torch.full((ROWS * PARTS,), float("nan"))
    prepare(sum_kernel, num_warps=1)[(ROWS * PARTS,)](
        x, out, counters, partials, PARTS, "right", BLOCK
    )
    expected = x.view(ROWS, -1).sum(1)
    assert out.tolist() == expected[:, None].expand(-1, PARTS).tolist()


CASES = {"meeting-of-programs": meeting_of_programs}
