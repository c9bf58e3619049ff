"""The matrix product on a GPU: every tile and transpose, chunks brought by copies, graphs."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from tests.ops.gemm.cases import MatmulCase, check

import tileloom
from tileloom import errors
from tileloom.ops import _counters, record_choices
from tileloom.ops.gemm import async_input_matmul, check_signals, matmul
from tileloom.ops.gemm.async_input import even_offsets
from tileloom.ops.gemm.config import (
    SWAP_TILES,
    TILES,
    GluonSm90Config,
    MatvecConfig,
    TritonConfig,
)
from tileloom.testing import poisoned_memory

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def _exact_products():
    matmul_flags = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = {name: getattr(matmul_flags, name) for name in names}
    for name in names:
        setattr(matmul_flags, name, False)
    yield
    for name, value in before.items():
        setattr(matmul_flags, name, value)


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


def _judged(case, config=None):
    a, b, options = case.inputs("cuda")
    with record_choices() as made, poisoned_memory():
        out = matmul(a, b, config=config, **options)
    check(out, a, b, options)
    return made[0].backend


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=2)), ids=str)
def test_every_tile_and_transpose(tile, flips):
    case = MatmulCase(304, 264, 328, a_flips=flips[0], b_flips=flips[1])
    if tile in ((64, 48), (64, 80)) and not flips[1]:
        with pytest.raises(errors.ConfigError, match="b lies by rows, and a box of the last 8"):
            _judged(case, GluonSm90Config(*tile))
    else:
        assert _judged(case, GluonSm90Config(*tile)) == "gluon_sm90"


@pytest.mark.parametrize(
    "config",
    [
        None,
        GluonSm90Config(64, 64, splits=4),
        GluonSm90Config(128, 128, scheduler="dynamic"),
        GluonSm90Config(64, 64, swap_ab=True),
        MatvecConfig(2, 512, 1),
    ],
    ids=str,
)
def test_products_that_follow_each_other_wait_for_each_other(config):
    """A block begins while the kernel ahead still ends: of ours and of PyTorch."""
    rows = 1 if isinstance(config, MatvecConfig) else 512
    a, b, _ = MatmulCase(rows, 512, 512).inputs("cuda")
    b.div_(22.0)
    right = [a]
    for step in range(60):
        x = matmul(right[-1], b, config=config, residual=a)
        torch.cuda.synchronize()
        right.append(x if step % 3 else x + a)
        torch.cuda.synchronize()
    for _ in range(20):
        x = a
        for step in range(60):
            x = matmul(x, b, config=config, residual=a)
            x = x if step % 3 else x + a
            x = torch.empty_like(x).copy_(x) if step % 7 == 0 else x
        assert torch.equal(x, right[-1])


@pytest.mark.parametrize("tile", TILES[:5], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues(tile, activation):
    case = MatmulCase(304, 264, 328, has_bias=True, has_residual=True, activation=activation)
    assert _judged(case, GluonSm90Config(*tile)) == "gluon_sm90"


@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(1, 8, 8),
        MatmulCase(1, 6144, 11008),
        MatmulCase(17, 4096, 4096, dtype=FP16),
        MatmulCase(129, 4096, 72, l=3),
        MatmulCase(2048, 2048, 2048),
        MatmulCase(1000, 520, 4096, out_dtype=FP32, has_bias=True),
        MatmulCase(512, 1024, 1024, has_bias=True, activation="gelu", has_residual=True),
        MatmulCase(500, 4104, 1024, has_bias=True, activation="gelu", has_residual=True),
        MatmulCase(4096, 8200, 520, has_bias=True, activation="silu"),
        MatmulCase(8200, 4096, 520, has_residual=True),
    ],
    ids=str,
)
def test_the_rules_choice(case):
    assert _judged(case) == "gluon_sm90"


@pytest.mark.parametrize("sizes", [(6144, 4096), (5120, 5120), (1037, 523)])
def test_the_rules_choice_for_one_row(sizes):
    assert _judged(MatmulCase(1, *sizes, has_residual=True)) == "matvec"


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("sizes", [(33, 35, 37), (1, 1, 1), (257, 129, 1000)])
def test_the_portable_kernel(dtype, sizes):
    case = MatmulCase(*sizes, dtype=dtype, has_bias=True, activation="silu", b_flips=False)
    assert _judged(case, TritonConfig()) == "triton"


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_k_is_right_and_repeatable(splits):
    case = MatmulCase(136, 264, 1000, has_residual=True)
    config = GluonSm90Config(64, 128, splits=splits)
    assert _judged(case, config) == "gluon_sm90"
    a, b, options = case.inputs("cuda")
    first = matmul(a, b, config=config, **options)
    for _ in range(100):
        assert torch.equal(matmul(a, b, config=config, **options), first)


def test_split_k_on_two_streams():
    a, b, _ = MatmulCase(64, 512, 4096).inputs("cuda")
    config = GluonSm90Config(64, 64, splits=8)
    right = matmul(a, b, config=config)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    torch.cuda.synchronize()
    for stream in streams * 20:
        with torch.cuda.stream(stream):
            outs.append(matmul(a, b, config=config))
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out in outs)


def test_what_split_k_keeps_comes_from_no_pool_of_the_callers():
    a, b, _ = MatmulCase(64, 512, 4096).inputs("cuda")
    config = GluonSm90Config(64, 64, splits=8)
    right = matmul(a, b)
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
        out = matmul(a, b, config=config)
        torch.cuda.synchronize()
    kept = [*_counters._zeros.values(), *_counters._rooms.values()]
    for segment in pool.snapshot():
        begin, end = segment["address"], segment["address"] + segment["total_size"]
        assert not any(begin <= tensor.data_ptr() < end for tensor in kept)
    assert (out - right).norm() < 0.01 * right.norm()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of torch's own first capture
def test_graphs_of_torch_compile_and_calls_between_them():
    """Its warm-up runs allocate from a pool that is set back to an earlier state."""
    config = GluonSm90Config(64, 64, splits=4)
    pairs = [MatmulCase(64, 256 * i, 1024).inputs("cuda", i)[:2] for i in (1, 2, 4)]
    right = [matmul(a, b, config=config) for a, b in pairs]

    @torch.compile(mode="reduce-overhead", dynamic=False)
    def compiled(a, b):
        return matmul(a, b, config=config) + 0.0

    for _ in range(5):
        for (a, b), wanted in zip(pairs, right):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(a, b).clone(), wanted)
            assert torch.equal(matmul(a, b, config=config), wanted)


def test_split_k_allocates_its_workspace_once():
    a, b, _ = MatmulCase(64, 512, 4096).inputs("cuda")
    out, config = torch.empty(64, 512, device="cuda", dtype=BF16), GluonSm90Config(64, 64, splits=8)
    right = matmul(a, b, config=config)
    for _ in range(3):  # a process's first repeated launch tests the ways to launch, and allocates
        matmul(a, b, out=out, config=config)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        matmul(a, b, out=out, config=config)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(out, right)


@pytest.mark.parametrize("tile", SWAP_TILES, ids=str)
@pytest.mark.parametrize("m", [1, 13, 16, 64])
@pytest.mark.parametrize("flips", [(False, True), (False, False)], ids=str)
def test_few_rows_with_the_operands_exchanged(tile, m, flips):
    case = MatmulCase(m, 520, 1000, a_flips=flips[0], b_flips=flips[1], has_bias=True,
                      has_residual=True, activation="gelu")  # fmt: skip
    for splits in (1, 3):
        config = GluonSm90Config(*tile, splits=splits, swap_ab=True)
        assert _judged(case, config) == "gluon_sm90"
    plain = MatmulCase(m, 520, 1000, out_dtype=FP32)
    assert _judged(plain, GluonSm90Config(*tile, swap_ab=True)) == "gluon_sm90"


@pytest.mark.parametrize("m", [1000, 4000])
@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=2)), ids=str)
def test_a_counter_deals_the_tiles(m, flips):
    """Without activation and residual a tile is stored while the next one begins."""
    case = MatmulCase(m, 8200, 264, a_flips=flips[0], b_flips=flips[1], has_bias=m == 4000)
    for swap_ab in (False, True):
        config = GluonSm90Config(scheduler="dynamic", swap_ab=swap_ab)
        assert _judged(case, config) == "gluon_sm90"


@pytest.mark.parametrize("n", [4096, 1037])
@pytest.mark.parametrize("k", [4096, 5120, 1000, 523])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_one_row_without_tensor_cores(n, k, dtype):
    case = MatmulCase(1, n, k, dtype=dtype, has_bias=True, has_residual=True, activation="gelu")
    for config in (MatvecConfig(), MatvecConfig(4, 1024, 2), MatvecConfig(2, 1024, 2)):
        assert _judged(case, config) == "matvec"
    assert _judged(MatmulCase(1, n, k, l=3, dtype=dtype), MatvecConfig(1, 2048, 8)) == "matvec"
    assert _judged(MatmulCase(1, n, k, dtype=dtype, out_dtype=FP32), MatvecConfig()) == "matvec"


@pytest.mark.parametrize("config", [None, GluonSm90Config(64, 128, splits=4)], ids=str)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_graph_replays(config, calls):
    """Also with a call outside it between two replays: they share no workspace."""
    a, b, _ = MatmulCase(256, 256, 256).inputs("cuda")
    b.div_(16.0)
    matmul(a, b, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = a
        for _ in range(calls):
            out = matmul(out, b, config=config)
    for seed in range(100):
        a.copy_(MatmulCase(256, 256, 256).inputs("cuda", seed % 5)[0])
        graph.replay()
        right = a
        for _ in range(calls):
            right = matmul(right, b, config=config)
        assert torch.equal(out, right)


def test_products_behind_another_stream_wait_for_it():
    """Captured and not: what is ahead is then an event of another stream, not a kernel."""
    a, b, _ = MatmulCase(512, 2048, 2048).inputs("cuda")
    weight, fresh = torch.zeros_like(b), b.clone()
    right, side = matmul(a, b), torch.cuda.Stream()

    def work():
        main = torch.cuda.current_stream()
        matmul(a, fresh)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(20):
                weight.copy_(fresh * 0.0)
            weight.copy_(fresh)
        main.wait_stream(side)
        return matmul(a, weight)

    for _ in range(10):
        assert torch.equal(work(), right)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for _ in range(10):
        weight.zero_()
        graph.replay()
        assert torch.equal(out, right)


def test_gradients():
    a, b, options = MatmulCase(256, 512, 384, has_bias=True, activation="gelu").inputs("cuda")
    grads = []
    for dtype in (BF16, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (a, b, options["bias"])]
        out = matmul(leaves[0], leaves[1], bias=leaves[2], activation="gelu")
        grads.append(torch.autograd.grad(out.sum(), leaves))
    for mine, right in zip(*grads):
        assert (mine.double() - right).norm() < 0.01 * right.norm()


def test_more_elements_than_32_bits_count():
    a = torch.randn(70_000, 64, device="cuda", dtype=BF16)
    b = torch.randn(32_768, 64, device="cuda", dtype=BF16).mT
    out = matmul(a, b)
    assert out.numel() > 2**31
    assert torch.equal(out[-300:], matmul(a[-300:], b))
    assert torch.equal(out[:300], matmul(a[:300], b))


def test_nothing_past_the_output_is_written():
    a, b, _ = MatmulCase(130, 136, 72).inputs("cuda")
    whole = torch.full((134, 160), 7.0, device="cuda", dtype=BF16)
    out = whole[2:132, 8:144]
    matmul(a, b, out=out)
    assert torch.equal(out, matmul(a, b))
    whole[2:132, 8:144] = 7.0
    assert bool((whole == 7.0).all())


@pytest.mark.parametrize("seed", range(6))
def test_chunks_brought_by_a_copy_stream_equal_the_plain_product(seed):
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
            chunk_pivot=dice.randrange(chunks),
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


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_rows_that_are_there_are_done_while_others_are_missing(chunks):
    """The pivot's rows of the output are read while the kernel still waits for all the others."""
    a, b, _ = MatmulCase(256 * chunks, 1032, 520).inputs("cuda")
    right, side, pivot = matmul(a, b), _used_stream(), chunks - 1
    flags = torch.zeros(chunks, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    flags[pivot] = 1
    early = torch.zeros(256, 1032, dtype=BF16).pin_memory()
    rows_right = right[256 * pivot :].cpu()  # later it would wait for the kernel that spins
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    out = async_input_matmul(a, b, flags.view(torch.uint32), chunk_pivot=pivot, timeout_s=5.0)
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
