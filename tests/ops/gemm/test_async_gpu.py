"""Products whose rows are still arriving, on a GPU: by copies, by kernels, in graphs, too late."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import torch
import triton
import triton.language as tl
from tests.ops.gemm.cases import MatmulCase

import tileloom
from tileloom import errors
from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
from tileloom.ops.gemm.async_input import even_offsets
from tileloom.ops.gemm.config import GluonSm90Config

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
DEALT = GluonSm90Config(scheduler="dynamic")


def _used_stream():
    """A stream for copies: of high priority, or it may share its queue with the spinning kernel's;
    and used before, since its first use may wait for that kernel.
    """
    stream = torch.cuda.Stream(priority=-1)
    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    with torch.cuda.stream(stream):
        torch.zeros(1, dtype=torch.int32, device="cuda").copy_(word, non_blocking=True)
    torch.cuda.synchronize()
    return stream


@pytest.mark.parametrize("config", [None, DEALT], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_chunks_brought_by_a_copy_stream_equal_the_plain_product(seed, config):
    dice = random.Random(seed)
    m, chunks = dice.choice([600, 1111, 4096]), dice.choice([1, 2, 5, 8])
    offsets = even_offsets(m, chunks)
    if seed % 2:
        offsets = (0, *sorted(dice.randrange(m + 1) for _ in range(chunks - 1)), m)
    a, b, _ = MatmulCase(m, 1032, 520).inputs("cuda")
    plain = matmul(a, b)
    source, one = a.cpu().pin_memory(), torch.ones(1, dtype=torch.int32).pin_memory()
    here, flags = torch.empty_like(a), torch.zeros(chunks, dtype=torch.int32, device="cuda")
    order = dice.sample(range(chunks), chunks)
    side = _used_stream()
    for trial in range(3):
        here.fill_(float("nan"))
        epoch = trial + 1
        one.fill_(epoch)
        torch.cuda.synchronize()
        out = async_input_matmul(
            here, b, flags.view(torch.uint32), chunk_offsets=offsets, epoch=epoch, timeout_s=5.0,
            chunk_pivot=dice.randrange(chunks), config=config,
        )  # fmt: skip
        with torch.cuda.stream(side):
            for chunk in order:
                rows = slice(offsets[chunk], offsets[chunk + 1])
                time.sleep(dice.choice([0, 0.001]))
                here[rows].copy_(source[rows], non_blocking=True)
                flags[chunk : chunk + 1].copy_(one, non_blocking=True)
        torch.cuda.synchronize()
        check_signals()
        assert torch.equal(out, plain)


def test_calls_that_go_straight_to_their_plan():
    a, b, _ = MatmulCase(600, 520, 520).inputs("cuda")
    flags, plain = torch.zeros(3, dtype=torch.int32, device="cuda"), matmul(a, b)
    for epoch in range(1, 6):
        flags.fill_(epoch)
        out = async_input_matmul(a, b, flags.view(torch.uint32), epoch=epoch, timeout_s=5.0)
        assert torch.equal(out, plain)
    with pytest.raises(errors.DtypeError):
        async_input_matmul(a, b, flags, epoch=5, timeout_s=5.0)
    with pytest.raises(errors.OptionError):
        async_input_matmul(a, b, flags.view(torch.uint32), epoch=-5, timeout_s=5.0)
    check_signals()


def test_a_missing_chunk_ends_in_time_and_the_context_lives():
    a, b, _ = MatmulCase(600, 520, 520).inputs("cuda")
    flags = torch.tensor([5, 4, 5], dtype=torch.int32, device="cuda").view(torch.uint32)
    async_input_matmul(a, b, flags, epoch=4)
    torch.cuda.synchronize()
    start = time.perf_counter()
    async_input_matmul(a, b, flags, epoch=5, timeout_s=0.05)
    torch.cuda.synchronize()
    assert 0.04 < time.perf_counter() - start < 1.0
    with pytest.raises(errors.SignalTimeoutError, match="chunk 1 did not arrive in time: its flag"):
        tileloom.rms_norm(a)
    assert torch.equal(async_input_matmul(a, b, flags, epoch=4, timeout_s=1.0), matmul(a, b))
    torch.cuda.synchronize()
    check_signals()


SHARDS = (1, 8, 64, 100, 127, 128, 129, 520, 576, 640, 768, 1152, 1280)


@pytest.mark.parametrize("rows", SHARDS)
def test_the_seeds_operator_where_the_original_hangs_or_refuses(rows):
    """B1: two chunks of 384 rows have padding tiles there; 100 rows are refused."""
    a, b, _ = MatmulCase(2 * rows, 1032, 1032).inputs("cuda")
    flags = torch.tensor([3, 1], dtype=torch.int32, device="cuda").view(torch.uint32)
    assert torch.equal(torch.ops.tileloom.async_input_mm(a, b, flags, 1), matmul(a, b))


@pytest.mark.parametrize(("n", "config"), [(1032, None), (33_792, None), (33_792, DEALT)], ids=str)
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_rows_that_are_there_are_done_while_others_are_missing(chunks, n, config):
    """The pivot's rows of the output are read while the kernel still waits for all the others.

    With many columns each block has tiles of the pivot, and waits for rows of its next one.
    """
    a, b, _ = MatmulCase(256 * chunks, n, 520).inputs("cuda")
    right, side, pivot = matmul(a, b), _used_stream(), chunks - 1
    flags = torch.zeros(chunks, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    flags[pivot] = 1
    early = torch.zeros(256, n, dtype=BF16).pin_memory()
    rows_right = right[256 * pivot :].cpu()  # later it would wait for the kernel that spins
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    signals = flags.view(torch.uint32)
    out = async_input_matmul(a, b, signals, chunk_pivot=pivot, timeout_s=5.0, config=config)
    done.record()
    time.sleep(0.025)
    with torch.cuda.stream(side):
        early.copy_(out[256 * pivot :], non_blocking=True)
    side.synchronize()
    assert not done.query()
    assert torch.equal(early, rows_right)
    with torch.cuda.stream(side):
        for chunk in range(chunks):
            flags[chunk : chunk + 1].copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    check_signals()
    assert torch.equal(out, right)


_FRESH = """
import torch
from tileloom.ops.gemm import async_input_matmul, check_signals
a = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
b = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
flags, one = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32)
side, one = torch.cuda.Stream(priority=-1), one.pin_memory()
with torch.cuda.stream(side):
    flags.clone().copy_(one, non_blocking=True)
for _ in range(4):
    flags.zero_()
    torch.cuda.synchronize()
    async_input_matmul(a, b, flags.view(torch.uint32), timeout_s=5.0)
    with torch.cuda.stream(side):
        flags.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    check_signals()
"""


def test_the_first_calls_of_a_process_launch_nothing_behind_themselves():
    """How a kernel may be launched is tested by launches of another: before one spins."""
    done = subprocess.run([sys.executable, "-c", _FRESH], timeout=120, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


_BLOCKED = """
import torch, pytest
from tileloom import errors
from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
a = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
b = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
flags = torch.ones(2, dtype=torch.int32, device="cuda").view(torch.uint32)
with pytest.raises(errors.UnsupportedError, match="is 1, so that"):
    async_input_matmul(a, b, flags)
assert torch.equal(async_input_matmul(a, b, flags, timeout_s=5.0), matmul(a, b))
async_input_matmul(a, b, flags, epoch=2, timeout_s=0.05)
torch.cuda.synchronize()
with pytest.raises(errors.SignalTimeoutError):
    check_signals()
"""


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_an_environment_in_which_later_copies_cannot_start(name):
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED], env={**os.environ, name: "1"}, timeout=120, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_flags_written_by_the_stream_and_by_the_host():
    a, b, _ = MatmulCase(256, 520, 520).inputs("cuda")
    flags = torch.zeros(2, dtype=torch.int32).pin_memory()
    seen = torch.zeros(2, dtype=torch.int32, device="cuda")
    side = _used_stream()
    out = async_input_matmul(a, b, seen.view(torch.uint32), timeout_s=5.0)
    with torch.cuda.stream(side):
        flags.fill_(1)
        seen.copy_(flags, non_blocking=True)
    torch.cuda.synchronize()
    check_signals()
    assert torch.equal(out, matmul(a, b))


@pytest.mark.parametrize("config", [None, DEALT], ids=str)
@pytest.mark.parametrize("late", range(4))
def test_a_chunk_that_is_late_but_in_time(late, config):
    """The other chunks and the product of six calls are right; nobody gives up before his time."""
    a, b, _ = MatmulCase(1111, 1032, 520).inputs("cuda")
    plain, side, offsets = matmul(a, b), _used_stream(), even_offsets(1111, 4)
    source, one = a.cpu().pin_memory(), torch.ones(1, dtype=torch.int32).pin_memory()
    here, flags = torch.empty_like(a), torch.zeros(4, dtype=torch.int32, device="cuda")
    for epoch in range(1, 7):
        here.fill_(float("nan"))
        one.fill_(epoch)
        torch.cuda.synchronize()
        signals = flags.view(torch.uint32)
        out = async_input_matmul(here, b, signals, epoch=epoch, timeout_s=10.0, config=config)
        with torch.cuda.stream(side):
            for chunk in range(4):
                time.sleep(0.025 if chunk == late else 0.0)
                rows = slice(offsets[chunk], offsets[chunk + 1])
                here[rows].copy_(source[rows], non_blocking=True)
                flags[chunk : chunk + 1].copy_(one, non_blocking=True)
        torch.cuda.synchronize()
        check_signals()
        assert torch.equal(out, plain)


def test_the_time_counts_from_when_the_kernel_begins():
    """Not while a kernel ahead on the stream still runs, nor while kernels are compiled."""
    a, b, _ = MatmulCase(512, 520, 520).inputs("cuda")
    plain, side = matmul(a, b), _used_stream()
    flags = torch.zeros(2, dtype=torch.int32, device="cuda")
    one = torch.ones(2, dtype=torch.int32).pin_memory()
    async_input_matmul(a, b, (flags + 1).view(torch.uint32), timeout_s=5.0)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start = torch.cuda.Event()
    torch.cuda._sleep(600_000_000)  # some 0.3 s
    start.record()
    out = async_input_matmul(a, b, flags.view(torch.uint32), timeout_s=0.2)
    start.synchronize()
    time.sleep(0.05)
    with torch.cuda.stream(side):
        flags.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    check_signals()
    assert torch.equal(out, plain)


@triton.jit
def _bring(source, here, flags, rows, columns, wait_ns, epoch, BLOCK: tl.constexpr):
    """Each program waits longer than the one before it, copies its rows and raises their flag."""
    chunk = tl.program_id(0)
    begin = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - begin < wait_ns * (chunk + 1):
        pass
    at = tl.arange(0, BLOCK)
    for row in range(chunk * rows, (chunk + 1) * rows):
        x = tl.load(source + row * columns + at, at < columns)
        tl.store(here + row * columns + at, x, at < columns)
    tl.debug_barrier()
    tl.atomic_xchg(flags + chunk, epoch, sem="release", scope="sys")


def test_a_kernel_that_was_launched_before_brings_the_rows():
    a, b, _ = MatmulCase(1024, 1032, 520).inputs("cuda")
    plain, side = matmul(a, b), torch.cuda.Stream()
    here, flags = torch.empty_like(a), torch.zeros(4, dtype=torch.int32, device="cuda")
    _bring[(4,)](a, here, flags, 256, 520, 0, 1, BLOCK=1024)
    async_input_matmul(here, b, flags.view(torch.uint32), timeout_s=5.0)
    for epoch in range(2, 6):
        torch.cuda.synchronize()
        here.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            _bring[(4,)](a, here, flags, 256, 520, 2_000_000, epoch, BLOCK=1024)
        out = async_input_matmul(here, b, flags.view(torch.uint32), epoch=epoch, timeout_s=5.0)
        torch.cuda.synchronize()
        check_signals()
        assert torch.equal(out, plain)


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_graph_that_sets_its_flags_back_replays(calls, is_forked):
    """Rows and flags come from host memory, ahead of the products or beside them."""
    a, b, _ = MatmulCase(600, 520, 520).inputs("cuda")
    source, one = a.cpu().pin_memory(), torch.ones(3, dtype=torch.int32).pin_memory()
    here, flags = torch.empty_like(a), torch.zeros(3, dtype=torch.int32, device="cuda")
    side = _used_stream()

    def bring():
        here.copy_(source, non_blocking=True)
        flags.copy_(one, non_blocking=True)

    def multiply():
        signals = flags.view(torch.uint32)
        return [async_input_matmul(here, b, signals, timeout_s=5.0) for _ in range(calls)]

    bring()
    multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flags.zero_()
        if is_forked:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                bring()
            outs = multiply()
            main.wait_stream(side)
        else:
            bring()
            outs = multiply()
    for seed in range(20):
        fresh = MatmulCase(600, 520, 520).inputs("cuda", seed)[0]
        right = matmul(fresh, b)
        source.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        check_signals()
        assert all(torch.equal(out, right) for out in outs)
