"""A kernel as a user writes it: the page's file, and integers that Triton specialises."""

import re
import runpy

import pytest
import torch
from tests.house import ROOT
from tests.scheduling.cases import device_arguments, expected, rows_of, works_of
from tests.scheduling.kernels import dump_async_kernel
from triton.experimental import gluon

from tileloom import emulator
from tileloom.scheduling import TileSchedulerParams

ones_are_constexprs_kernel = gluon.jit(dump_async_kernel.fn)  # without do_not_specialize
ALL_ONES = ((1, 1, 8), (0, 1), 0)


@pytest.fixture(scope="module")
def add(tmp_path_factory):
    """The function of the page's file, which has run as it stands there."""
    text = (ROOT / "docs" / "scheduling.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    file = tmp_path_factory.mktemp("page") / "add.py"
    file.write_text(block)
    return runpy.run_path(str(file))["add"]


@pytest.mark.parametrize(
    ("shape", "offsets", "pivot"),
    [
        ((100, 70), (0, 32, 64, 96, 100), 1),
        ((40, 32), (0, 16, 40), 1),  # one column of tiles
        ((1, 1), None, 0),
        ((2, 1), (0, 1, 2), 1),
    ],
)
def test_the_pages_kernel_adds_every_shape(add, shape, offsets, pivot):
    x, y = torch.randn(shape), torch.randn(shape)
    with emulator.run():
        assert torch.equal(add(x, y, 2, offsets, pivot), x + y)


@pytest.mark.parametrize(
    ("sizes", "offsets", "pivot"),
    [ALL_ONES, ((48, 1, 8), (0, 16, 48), 1), ((2, 64, 8), (0, 1, 2), 1)],
    ids=["all are 1", "one column of tiles, pivot 1", "one row of tiles"],
)
def test_an_integer_of_1_is_a_tensor_again(sizes, offsets, pivot):
    params = TileSchedulerParams.to_underlying_arguments(
        *sizes, block=(16, 32, 8), chunk_offsets=offsets, chunk_pivot=pivot
    )
    table, rest = device_arguments(params, "cpu")
    steps = params.blocks_per_problem
    dump = torch.full((1, steps, 8), -1, dtype=torch.int32)
    late, flags = torch.zeros(params.chunks, dtype=torch.int32), torch.ones(params.chunks).int()
    with emulator.run():
        ones_are_constexprs_kernel[(1,)](
            dump, late, steps, table, flags, 1, 10**6, *rest, num_warps=4
        )
    works = works_of(params, 1, 0)
    lines = [expected(work, params, is_last=work is works[-1]) for work in works]
    assert rows_of(dump, 0) == lines
    assert not late.any()


def test_those_integers_are_all_1():
    """What the first case above is for: no integer of it is anything else."""
    sizes, offsets, pivot = ALL_ONES
    params = TileSchedulerParams.to_underlying_arguments(
        *sizes, block=(16, 32, 8), chunk_offsets=offsets, chunk_pivot=pivot
    )
    integers = device_arguments(params, "cpu")[1][:6]
    assert integers == (1, 1, 1, 1, 1, 0)
