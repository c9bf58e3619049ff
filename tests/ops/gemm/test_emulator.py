"""The GEMM kernels on the emulator: right values, no report, whatever the schedule."""

import itertools

import pytest
import torch
from tests.ops.gemm import emulated
from tests.ops.gemm.cases import MatmulCase
from tests.ops.gemm.emulated import SCHEDULES, SMS, small

from tileloom import emulator, errors
from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
from tileloom.ops.gemm.config import MatvecConfig, TritonConfig

LEVELS = ("ttgir", "machine")
PORTABLE = TritonConfig(32, 32, 32, 4)


def _reports(run):
    return [report.text() for report in run.reports if report.severity != "info"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", emulated.CALLS)
def test_the_hopper_kernel(name, level):
    """A late and a random schedule at one level, an eager and a random one at the other."""
    ways = SCHEDULES[::2] if level == "ttgir" else SCHEDULES[1::2]
    _play(emulated.CALLS[name], level, ways)


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", emulated.CASES)
def test_the_hopper_kernel_under_all_schedules(name, level):
    _play(emulated.CASES[name], level, SCHEDULES)


def _play(call, level, ways):
    for schedule, seed in ways:
        with emulator.run(schedule=schedule, seed=seed, level=level, sms=SMS) as run:
            call()
        assert run.launches
        assert _reports(run) == []


@pytest.mark.parametrize("name", ["nn", "tn", "tt", "batches", "fused", "fp16-relu", "fp32-out"])
def test_the_portable_kernel(name):
    with emulator.run(level="machine", sms=SMS) as run:
        emulated.run_portable(emulated.FORMS[name], PORTABLE)
    assert run.launches
    assert _reports(run) == []


ONE_ROW = {
    "plain": (MatmulCase(1, 264, 520), MatvecConfig(4, 256, 2)),
    "whole pieces": (MatmulCase(1, 37, 512, has_bias=True), MatvecConfig(4, 128, 1)),
    "fused": (
        MatmulCase(1, 37, 520, has_bias=True, has_residual=True, activation="gelu"),
        MatvecConfig(2, 256, 2),
    ),
    "odd": (MatmulCase(1, 37, 523, out_dtype=torch.float32), MatvecConfig(2, 128, 1)),
    "float32": (MatmulCase(1, 40, 136, dtype=torch.float32), MatvecConfig(1)),
    "batches": (MatmulCase(1, 37, 136, l=3, activation="silu"), MatvecConfig(4, 64, 2)),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_without_tensor_cores(name):
    case, config = ONE_ROW[name]
    with emulator.run(level="machine", sms=SMS) as run:
        emulated.run_portable(case, config)
    assert run.launches
    assert _reports(run) == []


def test_one_row_of_any_strides():
    """One b for all batches, gaps between its columns, inputs and an output with gaps too."""
    a, b = torch.randn(3, 1, 80)[:, :, ::2], torch.randn(50, 72)[:41, :40].mT
    residual, out = torch.randn(41, 1, 3).permute(2, 1, 0), torch.empty(41, 1, 3).permute(2, 1, 0)
    with emulator.run(level="machine", sms=SMS) as run:
        expanded = b.expand(3, -1, -1)
        matmul(a, expanded, residual=residual, out=out, config=MatvecConfig(2, 64, 1))
    emulated.check(out, a, b, {"residual": residual})
    assert _reports(run) == []


@pytest.mark.parametrize("a_flips", [False, True])
@pytest.mark.parametrize("b_flips", [False, True])
def test_the_portable_kernel_where_sizes_are_multiples_of_16(a_flips, b_flips):
    """Sizes and strides then come to the kernel divided, of a residual that lies otherwise too."""
    case = MatmulCase(48, 80, 112, a_flips=a_flips, b_flips=b_flips, has_bias=True)
    a, b, options = case.inputs()
    options["residual"] = torch.randn(80, 48).bfloat16().mT
    out = torch.empty(80, 48, dtype=torch.bfloat16).mT if a_flips else None
    with emulator.run(level="machine", sms=SMS) as run:
        result = matmul(a, b, out=out, config=PORTABLE, **options)
    emulated.check(result, a, b, options)
    assert _reports(run) == []


@pytest.mark.parametrize("strides", ["odd", "gaps", "flipped"])
def test_the_portable_kernel_takes_any_strides(strides):
    case = MatmulCase(33, 35, 37, dtype=torch.float32, b_flips=False, has_residual=True)
    a, b, options = case.inputs()
    if strides == "gaps":
        a, b = a.repeat(1, 2)[:, ::2].contiguous()[:, :37], torch.randn(74, 70)[::2, ::2]
        a = torch.randn(66, 74)[::2, ::2]
    elif strides == "flipped":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    out = torch.randn(35, 33).mT if strides == "flipped" else torch.empty(33, 35)
    with emulator.run(level="machine") as run:
        matmul(a, b, out=out, config=PORTABLE, **options)
    emulated.check(out, a, b, options)
    assert _reports(run) == []


CHUNKS = {
    "whole tiles": (0, 128, 256, 384, 512),
    "even": (0, 64, 128, 192, 256),
    "uneven": (0, 70, 71, 200, 300),
    "empty": (0, 0, 130, 130, 200),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_arrive_while_the_kernel_runs(name, scheduler, level):
    config = small(128, 128, scheduler=scheduler)
    orders = list(itertools.permutations(range(4)))[::7]
    for (schedule, seed), order in zip(itertools.cycle(SCHEDULES), orders):
        with emulator.run(schedule=schedule, seed=seed, level=level, sms=SMS, collect=True) as run:
            emulated.run_async(run, CHUNKS[name], 2, order, config=config)
        assert [r.text() for r in run.errors] == []


def test_chunks_with_an_epilogue():
    options = {"has_bias": True, "has_residual": True, "activation": "relu"}
    with emulator.run(sms=SMS, collect=True) as run:
        emulated.run_async(run, CHUNKS["uneven"], 1, (3, 2, 1, 0), options, small(64, 128))
    assert _reports(run) == []


def test_several_bs_of_one_a_that_is_arriving():
    with emulator.run(sms=SMS, collect=True) as run:
        emulated.run_several_bs(run, small(128, 128))
    assert _reports(run) == []


def test_async_equals_the_plain_product_bit_for_bit():
    a, b, _ = MatmulCase(300, 136, 200).inputs()
    flags = torch.ones(4, dtype=torch.int32).view(torch.uint32)
    with emulator.run(sms=SMS):
        plain = matmul(a, b)
        for offsets in (None, CHUNKS["uneven"]):
            assert torch.equal(async_input_matmul(a, b, flags, chunk_offsets=offsets), plain)
        assert torch.equal(torch.ops.tileloom.async_input_mm(a, b, flags, 3), plain)


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_a_chunk_that_never_comes_ends_the_kernel_and_is_said_once(scheduler):
    a, b, _ = MatmulCase(300, 136, 200).inputs()
    flags = torch.tensor([9, 9, 8, 9], dtype=torch.int32).view(torch.uint32)
    config = small(128, 128, scheduler=scheduler)
    with emulator.run(sms=SMS):
        out = async_input_matmul(a, b, flags, chunk_offsets=CHUNKS["uneven"], epoch=9,
                                 timeout_s=1e-5, config=config)  # fmt: skip
        with pytest.raises(errors.SignalTimeoutError) as caught:
            check_signals()
        check_signals()
        flags.view(torch.int32)[2] = 9
        again = async_input_matmul(a, b, flags, chunk_offsets=CHUNKS["uneven"], epoch=9)
        assert torch.equal(again, matmul(a, b))
    assert str(caught.value).startswith(
        "async_input_matmul: on cpu chunk 2 did not arrive in time: its flag is 8, and 9 was"
    )
    assert torch.equal(out[:71], again[:71])


def test_the_next_call_of_an_operator_says_it_too():
    a, b, _ = MatmulCase(64, 136, 64).inputs()
    flags = torch.zeros(1, dtype=torch.int32).view(torch.uint32)
    with emulator.run(sms=SMS):
        async_input_matmul(a, b, flags, timeout_s=1e-5)
        with pytest.raises(errors.SignalTimeoutError):
            matmul(a, b)
        matmul(a, b)


@pytest.mark.parametrize("epoch", [2**31 - 1, 2**31, 2**32 - 1, 0])
def test_epochs_of_all_signs(epoch):
    a, b, _ = MatmulCase(64, 136, 64).inputs()
    there = torch.tensor([(epoch + 2**31) % 2**32 - 2**31], dtype=torch.int32)
    with emulator.run(sms=SMS):
        out = async_input_matmul(a, b, there.view(torch.uint32), epoch=epoch, timeout_s=1e-5)
        check_signals()
        assert torch.equal(out, matmul(a, b))
        async_input_matmul(a, b, (there - 1).view(torch.uint32), epoch=epoch, timeout_s=1e-5)
        with pytest.raises(errors.SignalTimeoutError):
            check_signals()
