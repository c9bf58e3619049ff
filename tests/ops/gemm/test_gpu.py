"""The matrix product on a GPU: every tile and transpose, chunks brought by copies, graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.ops.gemm.cases import MatmulCase, check

from tileloom import errors
from tileloom.ops import _counters, record_choices
from tileloom.ops.gemm import matmul
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
    many = MatmulCase(m, 33000, 264, a_flips=flips[0], b_flips=flips[1])
    dealt = GluonSm90Config(*tile, scheduler="dynamic", swap_ab=True)
    assert _judged(many, dealt) == "gluon_sm90"


@pytest.mark.parametrize("m", [37, 104, 150, 300])
@pytest.mark.parametrize(
    "config",
    [
        *(GluonSm90Config(*tile) for tile in ((64, 64), (64, 128), (128, 128), (192, 128))),
        GluonSm90Config(64, 48, block_k=128),
        GluonSm90Config(128, 256),
        *(GluonSm90Config(64, n, block_k=128, swap_ab=True) for n in (64, 128)),
        *(GluonSm90Config(128, n, swap_ab=True) for n in (128, 256)),
    ],
    ids=str,
)
def test_rows_that_end_inside_a_tile(config, m):
    """Rows that are not there are not loaded; what their place held reaches nothing."""
    torch.full((2**26,), float("nan"), device="cuda")
    assert _judged(MatmulCase(m, 264, 1000), config) == "gluon_sm90"
    fused = MatmulCase(m, 264, 1000, has_bias=True, has_residual=True, activation="gelu")
    assert _judged(fused, config) == "gluon_sm90"
    many = MatmulCase(m, 33000, 264, l=2 if m == 37 else 0)
    assert _judged(many, replace(config, scheduler="dynamic")) == "gluon_sm90"


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
