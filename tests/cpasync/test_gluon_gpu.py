"""The Gluon vocabulary on a GPU: the kernels that the emulator plays, and waits that take long."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.cpasync import gluon_cases
from tests.house import ROOT
from tileloom.target import target_of_device

IS_HOPPER = torch.cuda.is_available() and target_of_device(torch.device("cuda")).capability == (
    9,
    0,
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]


@pytest.fixture(autouse=True)
def on_the_gpu():
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(before)


@pytest.mark.parametrize("case", gluon_cases.CASES)
def test_values(case):
    for _ in range(20):
        result, right = gluon_cases.CASES[case]()
        assert torch.equal(result, right)


@pytest.mark.parametrize(("kind", "dtype"), gluon_cases.combined(), ids=str)
def test_every_reduction(kind, dtype):
    # Up to 256 every whole number is a bfloat16.
    programs = 4 if dtype == torch.bfloat16 else 32
    result, right = gluon_cases.reduce(kind, dtype, programs)
    assert torch.equal(result, right)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize("corner", gluon_cases.CORNERS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes(rank, corner, dtype, swizzle):
    if rank == 1 and swizzle:
        pytest.skip("a layout of one dimension has no swizzle")
    corner = (*corner[:4], corner[4] * 4 // dtype.itemsize)
    result, right = gluon_cases.boxes(rank, corner, dtype, swizzle)
    assert torch.equal(result, right)


@pytest.mark.parametrize("piece", [1, 2, 4])
@pytest.mark.parametrize("n", [*range(20), 511, 512, 513, 700, 1008, 1023, 1024])
def test_every_tail_is_filled_with_zeros(n, piece):
    result, right = gluon_cases.tails(n, piece)
    assert torch.equal(result, right)
    if piece > 1 and n % 16 == 0:  # else pieces of 2 bytes, which the compiler refuses
        result, right = gluon_cases.tails(n, 2 * piece, torch.bfloat16)
        assert torch.equal(result, right)


def test_a_wait_of_more_than_10_ms_does_not_fall_through():
    result, right = gluon_cases.slow_arrival(nanoseconds=30_000_000)
    assert torch.equal(result, right)


def test_the_pages_example(capsys):
    runpy.run_path(str(ROOT / "examples" / "07_asynchronous_copies.py"))["main"]()
    assert capsys.readouterr().out == "0 elements differ\n"
