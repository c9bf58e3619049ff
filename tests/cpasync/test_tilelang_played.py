"""TileLang's kernels on our copies, played from their PTX: right results, copies as late as can be.

The PTX was compiled where TileLang and the CuTe DSL are (`generated_ptx.json.gz`);
test_tilelang_client.py sees to it that it still is what they make.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.cpasync import tilelang_client
from tests.cpasync.ptx_machine import Deadlock, Unfenced
from tests.cpasync.ptx_ops import Globals
from tests.cpasync.tilelang_machine import Box, TileLangMachine
from tileloom.testing import AccuracyError, assert_accurate

SAVED, PTX = tilelang_client.saved(), tilelang_client.saved_ptx()
SPANS = (0, 32, 64, 128)
# Shapes of A, B and C; the tile of C that a block makes; a block in the middle or at the end.
PROGRAMS = {
    "gemm": ((512, 512), (512, 512), (512, 512), (128, 128), (1, 2, 0)),
    "pipelined_gemm": ((512, 512), (512, 512), (512, 512), (128, 128), (1, 2, 0)),
    "copy": ((512, 512), None, (512, 512), (64, 64), (3, 5, 0)),
    "evict_first": ((512, 512), None, (512, 512), (64, 64), (7, 7, 0)),
    "vector": ((4096,), None, (4096,), (128,), (31, 0, 0)),
    "row_sums": ((256, 512), None, (256,), (32,), (1, 0, 0)),
    "split_k": ((128, 512), (512, 128), (128, 128), (64, 64), (1, 0, 0)),
    "tails": ((500, 500), (500, 500), (500, 500), (64, 64), (7, 7, 0)),
}


def tile_of(name):
    """The part of C that the block makes."""
    *_, shape, tile, block = PROGRAMS[name]
    corner = [b * n for b, n in zip(block[: len(tile)][::-1], tile)]
    return tuple(slice(at, min(at + n, end)) for at, n, end in zip(corner, tile, shape))


def play(name, ptx, late):
    """Play the block (of split_k all splits); A, B and C."""
    a_shape, b_shape, c_shape, _, block = PROGRAMS[name]
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float32 if name == "row_sums" else torch.float16
    out = torch.float32 if name in ("row_sums", "split_k") else torch.float16
    a = torch.randn(a_shape, generator=draw).to(dtype)
    b = None if b_shape is None else torch.randn(b_shape, generator=draw).to(dtype)
    c = torch.full(c_shape, 0.0 if name == "split_k" else torch.nan, dtype=out)
    arrays = {"A": a.numpy(), "B": None if b is None else b.numpy(), "C": c.numpy()}
    memory, made = Globals(), SAVED[name]
    addresses = {k: memory.add(v) for k, v in arrays.items() if v is not None}
    arguments = []
    for parameter in made.kernel.parameters:
        facts = made.maps.get(parameter)
        arguments.append(
            addresses[parameter] if facts is None
            else Box(arrays[facts.tensor], facts.box[::-1], SPANS[facts.modes[1]])
        )  # fmt: skip
    for z in range(made.kernel.grid[2]):
        TileLangMachine(ptx, arguments, memory, (*block[:2], z), late).run()
    return a, b, c


def check(name, a, b, c):
    """The block's tile is right, and nothing else was written."""
    tile = tile_of(name)
    if b is not None:
        reference, baseline = a.double() @ b.double(), (a.float() @ b.float()).to(c.dtype)
        assert_accurate(c[tile], reference[tile], baseline[tile])
    elif name == "row_sums":
        assert_accurate(c[tile], a.double().sum(1)[tile], a.sum(1)[tile])
    else:
        assert torch.equal(c[tile], a[tile])
    c[tile] = 0 if name == "split_k" else torch.nan
    assert (c == 0).all() if name == "split_k" else c.isnan().all()


@pytest.mark.parametrize("late", ["loads", pytest.param("reads", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name, late):
    check(name, *play(name, PTX[name]["ours"], late))


def test_with_its_own_copies_tilelangs_tails_are_wrong():
    """Its predicated copies leave old numbers where ours write zeros: the last step adds them."""
    with pytest.raises(AccuracyError):
        check("tails", *play("tails", PTX["tails"]["theirs"], "loads"))


def test_only_the_tails_differ():
    assert [name for name, texts in PTX.items() if "theirs" in texts] == ["tails"]


BUGS = [
    ("copy", r"fence\.proxy\.async\.shared::cta;", "", Unfenced),
    ("copy", r"bar\.sync \t0;", "", (Unfenced, AssertionError)),
    ("tails", r"cp\.async\.wait_group \t0;", "", AccuracyError),
    ("tails", r", 8, %r\d+;", ", 8, 8;", AssertionError),
    ("split_k", r"mbarrier\.arrive\.shared\.b64[^;]*;", "", Deadlock),
    ("split_k", r"(mbarrier\.arrive\.expect_tx\.shared\.b64[^;]*), %r\d+;", r"\1, 0;",
     AssertionError),
    ("split_k", r"cp\.reduce(\.async\.bulk\.tensor\.2d\.global\.shared::cta)\.add", r"cp\1",
     AccuracyError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "error"), BUGS)
def test_planted_bug_is_seen(name, old, new, error):
    text, count = re.subn(old, new, PTX[name]["ours"])
    assert count
    with pytest.raises(error):
        check(name, *play(name, text, "loads"))
