"""The emulator stays fast enough for CI: processor time of one compiled launch with all checks.

CI's machines differ and are shared, so that a limit is no number of seconds: it counts in units of
a fixed piece of work of the emulator's own kind (`yardstick`), measured in turn with the launch.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import tileloom
from tests.emulator import support
from tileloom import emulator


def yardstick():
    """Interpreted Python around numpy calls on a row of a tile and on a whole one: 0.04 s on one
    core of the machine where the limits below were set."""
    row, tile, table = np.arange(128), np.ones((128, 64), np.float32), {}
    for step in range(20000):
        table[step % 64] = table.get((step + 1) % 64, 0) + step
        row + row.astype(np.int64)
        if not step % 32:
            np.exp(tile - tile.max(axis=1, keepdims=True))


def processor_seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def units(call, repeats):
    """Processor time of the best of `repeats` runs over the yardstick's best, after one run that
    compiles."""
    call()
    found = [(processor_seconds(call), processor_seconds(yardstick)) for _ in range(repeats)]
    calls, yardsticks = zip(*found, strict=True)
    return min(calls) / min(yardsticks)


@pytest.mark.parametrize(("size", "limit"), [(256, 0.5), (1024, 15)])
def test_a_specialised_gemm(size, limit):
    case = support.load_case("specialised_gemm")
    a, b = torch.randn(2, size, size, dtype=torch.float16).unbind()
    c = torch.zeros(size, size, dtype=torch.float16)
    tiles = size // 128
    operands = (case.describe(a, 128, 64), case.describe(b, 64, 128), case.describe(c, 128, 128))

    def go():
        case.specialised_gemm[(tiles * tiles,)](
            *operands, tiles * tiles, tiles, size // 64, 3, num_warps=4
        )

    with emulator.run():
        assert units(go, repeats=5) < limit


def test_the_hopper_attention_kernel():
    q = torch.randn(1, 4, 1024, 64, dtype=torch.bfloat16)
    with emulator.run():
        # A third of it is inline PTX: P is packed into words, and votes and slots' barriers.
        assert units(lambda: tileloom.attention(q, q, q), repeats=3) < 23
