"""The rule that chooses the Hopper config: what was measured, and never what cannot run."""

from __future__ import annotations

import itertools

import pytest
import torch

from tileloom.launch.layout import Layout
from tileloom.ops.gemm.config import GluonSm90Config, MatvecConfig, decode
from tileloom.ops.gemm.config_matvec import matvec_rule
from tileloom.ops.gemm.launch_gluon_sm90 import params_of
from tileloom.ops.gemm.problem import MatmulProblem
from tileloom.ops.gemm.rule import choose, gluon_rule
from tileloom.target import Target

BF16, FP32 = torch.bfloat16, torch.float32
H100 = Target("cuda", (9, 0), 132, 232448, "NVIDIA H100")


def _problem(m, n, k, *, a_flips=False, b_flips=True, out_dtype=BF16, **more):
    def lies(rows, columns, flips):
        return Layout((rows * columns, 1, rows) if flips else (rows * columns, columns, 1), True)

    return MatmulProblem(
        *(m, n, k, 1), dtype=BF16, out_dtype=out_dtype, a=lies(m, k, a_flips),
        b=lies(k, n, b_flips), out=lies(m, n, False), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((1, 4096, 4096), "64,16,0,8,static,1,128,True"),
        ((16, 8448, 4096), "64,16,0,8,static,1,128,True"),
        ((16, 8512, 4096), "64,16,0,8,dynamic,1,128,True"),
        ((16, 57344, 8192), "64,16,0,8,dynamic,1,128,True"),
        ((16, 57344, 2048), "64,16,0,8,static,1,128,True"),
        ((17, 4096, 4096), "64,32,0,8,static,1,128,True"),
        ((32, 28672, 4096), "64,32,0,8,dynamic,1,128,True"),
        ((64, 8192, 64), "64,64,0,8,static,1,64,True"),
        ((64, 4096, 4096), "64,64,0,8,static,1,128,True"),
        ((64, 6144, 4096), "64,48,0,8,static,1,128,False"),
        ((64, 10240, 8192), "64,80,0,8,static,1,128,False"),
        ((64, 14336, 4096), "64,64,0,8,dynamic,1,128,True"),
        ((64, 28672, 4096), "128,64,0,8,dynamic,1,128,True"),
        ((72, 4096, 4096), "64,64,0,8,static,1,64,False"),
        ((72, 6144, 4096), "64,128,0,8,static,1,128,True"),
        ((72, 6144, 520), "64,128,0,8,static,1,64,False"),
        ((128, 8192, 8192), "64,128,0,8,static,1,128,True"),
        ((96, 10240, 8192), "128,128,0,1,static,1,64,True"),
        ((96, 28672, 4096), "128,128,0,1,dynamic,1,64,True"),
        ((200, 4096, 14336), "64,128,0,8,static,1,128,True"),
        ((200, 6144, 4096), "128,128,0,1,static,1,64,True"),
        ((128, 57344, 8192), "128,128,0,1,dynamic,1,64,True"),
        ((512, 10240, 8192), "128,320,0,8,static,1,64,False"),
        ((512, 6144, 4096), "192,128,0,1,static,1,64,True"),
        ((512, 4096, 4096), "128,128,0,1,static,1,64,True"),
        ((512, 57344, 8192), "128,256,0,12,dynamic,1,64,False"),
        ((512, 28672, 4096), "128,128,0,1,static,1,64,True"),
        ((1024, 28672, 4096), "128,256,0,12,dynamic,1,64,False"),
        ((1024, 1024, 1024), "64,128,0,8,static,1,64,False"),
        ((2048, 2048, 2048), "128,256,0,8,static,1,64,False"),
        ((3072, 3072, 3072), "192,128,0,8,static,1,64,False"),
        ((8192, 8192, 8192), "128,256,0,12,dynamic,1,64,False"),
        ((4096, 28672, 4096), "128,256,0,12,dynamic,1,64,False"),
        ((4096, 8192, 8192), "128,256,0,12,dynamic,1,64,False"),
        ((4096, 57344, 8192), "128,256,0,12,dynamic,1,64,False"),
    ],
    ids=str,
)
def test_the_rule_is_what_was_measured(sizes, config):
    assert gluon_rule(_problem(*sizes), 132) == decode(f"gluon_sm90:{config}")


def test_a_tile_is_stored_under_the_next_one_where_that_was_measured():
    def is_early(k=4096, config=None, **more):
        dealt = config or GluonSm90Config(scheduler="dynamic")
        return dealt.stores_early(_problem(4096, 4096, k, **more))

    assert is_early()
    assert is_early(8192)
    assert not is_early(14336)
    assert not is_early(config=GluonSm90Config())
    assert not is_early(config=GluonSm90Config(128, 320, scheduler="dynamic"))
    assert not is_early(bias_dtype=BF16)
    assert not is_early(activation="relu")
    assert not is_early(residual=Layout((0, 4096, 1), True), residual_dtype=BF16)
    assert not is_early(out_dtype=FP32)


def test_rows_that_are_loaded_of_the_last_tile():
    """All of it where they are a whole one or nearly, and where there are many tiles."""

    def rows(m, *tile, swap_ab=True, **more):
        config = GluonSm90Config(*tile, swap_ab=swap_ab)
        return config.edge_rows(_problem(m, 4096, 4096, **more))

    assert [rows(m, 128, 128) for m in (1, 16, 17, 112, 113, 128, 129, 500)] == [
        *(16, 16, 32, 112, 0, 0, 16, 0)
    ]
    assert [rows(m, 128, 256) for m in (33, 129, 224, 225, 300)] == [64, 160, 224, 0, 64]
    assert [rows(m, 192, 128, swap_ab=False) for m in (33, 160, 161, 512)] == [64, 160, 0, 128]
    assert [rows(m, 64, 64, swap_ab=False) for m in (40, 72, 520)] == [48, 16, 0]
    assert rows(40, 64, 16) == 0
    assert rows(72, 128, 128, a_flips=True) == 0
    assert rows(72, 128, 128, chunks=2) == 0
    boxes = {m: GluonSm90Config(64, 128, swap_ab=True).edge_box(_problem(m, 64, 64))
             for m in (8, 40, 64, 90, 112)}  # fmt: skip
    assert boxes == {8: 16, 40: 16, 64: 64, 90: 32, 112: 16}


def test_tiles_that_a_counter_deals_go_in_groups_of_rows():
    problem = _problem(4096, 28672, 4096)
    dealt = GluonSm90Config(scheduler="dynamic")
    assert params_of(problem, dealt).raster_order == "along_n"
    assert (
        params_of(problem, GluonSm90Config()).raster_order == "along_m"
    )  # by turns, where C is wide


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_product_that_waits_gets_tiles_of_c(chunks):
    """A counter deals them where many waves are stored early, and nothing follows the product."""

    def chosen(m, n, k=4096, **more):
        config = gluon_rule(_problem(m, n, k, chunks=chunks, **more), 132)
        assert not config.swap_ab
        return config.scheduler

    assert {chosen(16, 4096), chosen(512, 6144), chosen(2048, 2048)} == {"static"}
    assert {chosen(4096, 28672), chosen(8192, 8192, 8192)} == {"dynamic"}
    assert chosen(8192, 8192, 14336) == "static"
    assert chosen(8192, 8192, activation="relu") == "static"
    assert chosen(8192, 8192, out_dtype=FP32) == "static"


def test_no_tile_of_equal_chunks_waits_for_two():
    for chunks in (2, 4, 8):
        config = gluon_rule(_problem(256 * chunks, 1032, 520, chunks=chunks), 132)
        assert 256 % config.block_m == 0


SIZES = (1, 8, 16, 24, 64, 72, 136, 512, 1032, 4096, 16384)


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=2)), ids=str)
def test_what_the_rule_gives_can_run(out_dtype, residual, flips):
    for m, n, k, chunks in itertools.product(SIZES, SIZES, (8, 64, 4096), (0, 1, 3)):
        if flips[0] and m % 8:
            continue
        more = {"bias_dtype": BF16, "chunks": chunks}
        if residual:
            more |= {"residual": Layout((m * n, n, 1), True), "residual_dtype": out_dtype}
        if n * out_dtype.itemsize % 16:
            continue
        problem = _problem(m, n, k, a_flips=flips[0], b_flips=flips[1], out_dtype=out_dtype, **more)
        config = gluon_rule(problem, H100.sms)
        reasons = config.reasons_against(problem, H100)
        reasons = [text for text in reasons if "stride" not in text]
        assert reasons == [], (m, n, k, chunks, config)
        assert config.stages_of(problem) >= 2


def test_the_end_of_a_configs_text_may_be_missing():
    assert decode("gluon_sm90:64,128") == GluonSm90Config(64, 128)
    assert decode("gluon_sm90:64,16,0,8,static,1,64,True") == GluonSm90Config(64, 16, swap_ab=True)


def test_tiles_of_two_accumulators_say_what_they_cannot():
    by_rows = _problem(64, 1024, 1024, b_flips=False)
    assert GluonSm90Config(64, 80).reasons_against(by_rows, H100) == (
        "b lies by rows, and a box of the last 8 columns would have fewer than 16",
    )
    assert GluonSm90Config(128, 320).reasons_against(by_rows, H100) == ()
    text = "the tile is 128x320, whose columns are no power of two, which goes with neither splits "
    for problem, splits in ((_problem(512, 1024, 1024, chunks=2), 1), (by_rows, 2)):
        reasons = GluonSm90Config(128, 320, splits=splits).reasons_against(problem, H100)
        assert reasons == (text + "nor chunks",)


def test_the_kernel_for_one_row_says_what_it_cannot():
    def reasons(m=1, n=1024, k=1024, config=None, **more):
        return (config or MatvecConfig()).reasons_against(_problem(m, n, k, **more), H100)

    assert reasons() == reasons(k=1023, n=7) == reasons(b_flips=False, k=1) == ()
    assert reasons(2) == ("M is 2, not 1",)
    assert reasons(k=0) == ("K is 0",)
    assert reasons(chunks=1) == ("it waits for no chunk",)
    assert reasons(b_flips=False) == ("b has a stride of 1024 elements along K, not 1",)
    assert reasons(config=MatvecConfig(16)) == ("a thread has 256 sums, more than 96",)
    assert reasons(out_dtype=torch.float64) == (
        "out_dtype torch.float64 is not float16, bfloat16 or float32",
    )
    assert reasons(config=MatvecConfig(3, 32, 64)) == (
        "block_n is 3, not a power of two in 1..64",
        "block_k is 32, not a power of two in 64..8192",
        "num_warps is 64, not a power of two in 1..16",
    )
    assert reasons(n=2**31 - 1)[0] == f"N is {2**31 - 1}, more than {2**31 - 8193}"


def test_one_row_goes_without_tensor_cores_where_that_was_measured():
    def chosen(m=1, n=4096, k=4096, target=H100, **more):
        return choose(_problem(m, n, k, **more), target).config.encode().partition(",static")[0]

    assert chosen() == chosen(k=28672) == "matvec:4,2048,4"
    assert chosen(k=5120) == "matvec:4,1024,2"
    assert chosen(k=4099) == chosen(n=4099, k=11) == "matvec:2,1024,2"
    for rest in (chosen(2), chosen(k=11008), chosen(b_flips=False)):
        assert rest == "gluon_sm90:64,16,0,8"
    assert chosen(target=Target("cuda", (8, 0), 108, 163 * 1024, "A100")).startswith("triton")
    for n, k in itertools.product((1, 8, 4099, 57344), (0, 1, 8, 523, 5120, 28672)):
        problem = _problem(1, n, k, bias_dtype=BF16)
        config = matvec_rule(problem, H100)
        assert config is None or config.reasons_against(problem, H100) == ()
