"""The example kernels played from their PTX: right results, with copies as late as they may be."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.cpasync import examples
from tests.cpasync.ptx_machine import Deadlock, Globals, Machine, TensorMap, Unfenced
from tileloom.testing import AccuracyError, assert_accurate

full = pytest.mark.full
both = pytest.mark.parametrize("late", ["loads", "reads"])


def unchanged(ptx):
    return ptx


def play_axpby(n, blocks, late, edit=unchanged):
    rng, memory = np.random.default_rng(n), Globals()
    ptx = edit(examples.ptx_of("axpby"))
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    z = np.full(n, np.nan, np.float32)
    arguments = [*map(memory.add, (x, y, z)), n, 2.0, -0.5]
    for block in range(blocks):
        Machine(ptx, arguments, memory, (block, blocks), late).run()
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    assert_accurate(torch.from_numpy(z), 2 * x.double() - 0.5 * y.double(), 2 * x - 0.5 * y)


def play_copy(rows, columns, blocks, late, edit=unchanged):
    ptx = edit(examples.ptx_of("tma_copy"))
    # Rows lie further apart than they are long, as TMA asks for.
    stride = -(-columns // 8) * 8
    values = np.random.default_rng(rows).standard_normal((rows, stride)).astype(np.float16)
    source, target = values[:, :columns], np.full_like(values, np.nan)
    across, down = -(-columns // 256), -(-rows // 8)
    maps = [TensorMap(matrix, (8, 256)) for matrix in (source, target[:, :columns])]
    for block in range(blocks):
        arguments = [*maps, across, across * down]
        Machine(ptx, arguments, Globals(), (block, blocks), late).run()
    np.testing.assert_array_equal(target[:, :columns], source)
    assert np.isnan(target[:, columns:]).all()


def play_gemm(m, n, k, blocks, late, splits=None, edit=unchanged):
    """With `splits` the sums are added to a float32 C that is not zero."""
    out = torch.float32 if splits else torch.float16
    ptx = edit(examples.ptx_of("gemm", torch.float16, out))
    draw = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=draw).half()
    b = torch.randn(n, k, generator=draw).half()
    before = torch.randn(m, n, generator=draw) if splits else torch.full((m, n), torch.nan)
    c = before.to(out, copy=True)
    maps = [
        TensorMap(a.numpy(), (128, 64), swizzled=True),
        TensorMap(b.numpy(), (256, 64), swizzled=True),
        TensorMap(c.numpy(), (64, 32 if splits else 64), swizzled=True),
    ]
    tiles = -(-m // 128), -(-n // 256), -(-k // 64)
    for block in range(blocks):
        Machine(ptx, [*maps, *tiles, splits or 1], Globals(), (block, blocks), late).run()
    reference, baseline = a.double() @ b.double().T, a.float() @ b.float().T
    if splits:
        reference, baseline = reference + before.double(), baseline + before
    assert_accurate(c, reference, baseline.to(out))


@both
@pytest.mark.parametrize(
    ("n", "blocks"), [(1, 1), (1023, 1), (1026, 2), pytest.param(9001, 2, marks=full)]
)
def test_axpby(kernels, n, blocks, late):
    play_axpby(n, blocks, late)


@both
@pytest.mark.parametrize(
    ("rows", "columns", "blocks"), [(1, 8, 1), (33, 260, 1), (50, 1000, 2), (100, 520, 1)]
)
def test_tma_copy(kernels, rows, columns, blocks, late):
    play_copy(rows, columns, blocks, late)


@both
@pytest.mark.parametrize(
    ("m", "n", "k", "blocks"),
    [
        (100, 72, 40, 1),
        # More tiles than blocks and more slices than stages: the ring goes round and on.
        (136, 24, 328, 1),
        pytest.param(200, 264, 384, 3, marks=full),
        pytest.param(1200, 264, 128, 5, marks=full),
    ],
)
def test_gemm(kernels, m, n, k, blocks, late):
    play_gemm(m, n, k, blocks, late)


@both
@pytest.mark.parametrize(
    ("m", "n", "k", "blocks", "splits"),
    [(72, 40, 392, 1, 2), pytest.param(136, 264, 640, 3, 4, marks=full)],
)
def test_split_k_gemm(kernels, m, n, k, blocks, splits, late):
    play_gemm(m, n, k, blocks, late, splits)


def replaced(pattern, by, count):
    """An edit of the PTX that must hit exactly `count` places."""

    def edit(ptx):
        text, hits = re.subn(pattern, by, ptx)
        assert hits == count, f"{hits} places"
        return text

    return edit


def without_wait(index):
    """The PTX without its loop around the `index`-th try_wait: it falls through."""

    def edit(ptx):
        waits = list(re.finditer(r"\tnot\.pred \t(%p\d+), (%p\d+);\n\t@\1 bra[^\n]*\n", ptx))
        start, stop = waits[index].span()
        ptx = ptx[:start] + ptx[stop:]
        [*_, wait] = re.finditer(r"\tmbarrier\.try_wait[^\n]*\n", ptx[:start])
        return ptx[: wait.start()] + ptx[wait.end() :]

    return edit


AXPBY, COPY = (play_axpby, (4097, 1)), (play_copy, (100, 520, 1))
SHORT, LONG = (play_gemm, (100, 72, 40, 1)), (play_gemm, (72, 24, 520, 1))
# A missing wait for data shows when loads are late, one for a free buffer when reads are late.
MUTANTS = {
    "axpby-wait-for-one-less": (
        AXPBY, "loads", replaced(r"cp\.async\.wait_group \t3", "cp.async.wait_group 4", 1),
    ),
    "axpby-tail-reads-on": (
        (play_axpby, (1026, 1)), "reads",
        replaced(r"(cp\.async\.cg[^\n]*), 16, %r\d+;", r"\1, 16, 16;", 8),
    ),
    "copy-load-not-awaited": (COPY, "loads", without_wait(0)),
    "copy-stage-not-yet-read": (
        COPY, "reads", replaced(r"wait_group\.read \t1", "wait_group.read 3", 1),
    ),
    "gemm-no-fence": (SHORT, "reads", replaced(r"\tfence\.proxy\.async[^\n]*\n", "", 4)),
    "gemm-one-arrival-too-many-awaited": (
        LONG, "reads",
        replaced(r"mov\.b32 \t(%r\d+), 8;\n\tmbarrier", r"mov.b32 \1, 9;\n\tmbarrier", 1),
    ),
    "gemm-stage-not-free": (LONG, "reads", without_wait(0)),
    "gemm-slice-not-there": (SHORT, "loads", without_wait(1)),
    "gemm-slice-released-early": (
        LONG, "reads",
        replaced(r"wgmma\.wait_group\.sync\.aligned \t1", "wgmma.wait_group 2", 1),
    ),
    "gemm-buffer-not-yet-read": (
        (play_gemm, (72, 200, 40, 1)), "reads",
        replaced(r"bulk\.wait_group\.read \t1", "bulk.wait_group.read 2", 4),
    ),
}  # fmt: skip
# How a fault shows where it is not as a wrong result.
SHOWN = {
    "gemm-no-fence": Unfenced,
    "gemm-one-arrival-too-many-awaited": Deadlock,
    "copy-load-not-awaited": AssertionError,
    "copy-stage-not-yet-read": AssertionError,
    "axpby-tail-reads-on": AssertionError,
    "gemm-stage-not-free": AssertionError,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_is_found(kernels, name):
    (play, arguments), late, edit = MUTANTS[name]
    with pytest.raises(SHOWN.get(name, AccuracyError)):
        play(*arguments, late=late, edit=edit)
