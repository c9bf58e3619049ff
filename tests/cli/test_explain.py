"""`tileloom explain gemm` as a user runs it."""

import xml.etree.ElementTree as ElementTree

import pytest

from tileloom.cli.main import main
from tileloom.report.schedule import picture
from tileloom.scheduling import TileSchedulerParams, simulate


def test_a_whole_product(capsys):
    assert main(["explain", "gemm", "4096", "4096", "4096", "--tile", "128x256"]) == 0
    text = capsys.readouterr().out
    assert "tiles      32 x 16 = 512, raster along_n, groups of 8" in text
    assert "132 blocks, 3.88 waves, the last one 88 % full" in text
    assert "chunk" not in text.replace("waiting for chunks", "")


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("16 4096 4096", "64,16,0,8,static,1,128,True"),
        ("512 4096 4096", "128,128,0,1,static,1,64,True"),
        ("4096 28672 4096", "128,256,0,12,dynamic,1,64,False"),
        ("8192 8192 8192", "128,256,0,12,dynamic,1,64,False"),
        ("8192 8192 8192 --chunks 4", "128,256,0,8,dynamic,1,64,False"),
        ("512 1024 64 --sms 8 --pivot 0 --arrivals 3", "128,256,0,8,static,1,64,False"),
    ],
)
def test_the_config_is_the_one_that_the_function_takes(command, config, capsys):
    assert main(["explain", "gemm", *command.split()]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"config     gluon_sm90:{config}, by the rule\n")
    assert ("operands exchanged" in text) is config.endswith("True")


def test_one_row_has_no_schedule(capsys):
    assert main(["explain", "gemm", "1", "4096", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "config     matvec:4,2048,4, by the rule: programs of its own, without a schedule"
    )
    assert lines[1].endswith("the Hopper kernel by config= gluon_sm90:64,16,0,8,static,1,128,True")


def test_chunks_and_a_picture(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    command = "explain gemm 512 1024 64 --chunks 4 --pivot 1 --sms 8 --arrivals 30,0,60,10"
    command = [*command.split(), "--tile-us", "5", "--tile", "64x256", "--svg", str(path)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "chunks     4, visited 1, 2, 3, 0" in text
    assert "chunk 2   rows 256..383 (128), 8 tiles, there after 60.0 us" in text
    root = ElementTree.parse(path).getroot()
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert sum(e[0].text.startswith("tile") for e in boxes) == 32
    assert any(e[0].text == "waits" for e in boxes)


def test_a_chunk_that_never_comes_is_said_and_exits_with_1(capsys):
    command = ["explain", "gemm", "512", "256", "64", "--chunk-offsets", "0,256,512", "--sms", "4",
               "--arrivals", "0,inf", "--tile", "128x256"]  # fmt: skip
    assert main(command) == 1
    assert "STUCK      2 blocks wait for ever, for chunk 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tile", "3x4"], "--tile is '3x4'; it must be one of 128x256"),
        (["--arrivals", "x"], "--arrivals is 'x'; it must be numbers of 0 or more"),
        (["--chunks", "2", "--pivot", "2"], "chunk_pivot is 2; it must be in 0 .. 1"),
        (["--chunk-offsets", "0,5"], "must begin with 0 and end with M = 64"),
        (["--chunks", "2", "--chunk-offsets", "0,64"], "both say where chunks begin; give one."),
        (["--svg", "/nowhere/plan.svg"], "--svg /nowhere/plan.svg cannot be written: No such file"),
        (["--tile-us", "-1"], "--tile-us is -1.0; it must be finite and above 0"),
        (["--tile-us", "inf"], "--tile-us is inf; it must be finite and above 0"),
        (["--svg", "plan.png"], "--svg is plan.png; the picture is an SVG. Try: plan.svg."),
        (["--chunk-offsets", "0,1.5,64"], "--chunk-offsets is '0,1.5,64'; it must be whole numbe"),
        (["--chunk-offsets", "0,inf,64"], "--chunk-offsets is '0,inf,64'; it must be whole numbe"),
        (["--chunk-offsets", ""], "--chunk-offsets is ''; it must be whole numbers with commas"),
        (["--arrivals", ""], "--arrivals is ''; it must be numbers of 0 or more, with commas"),
        (["--chunks", "2", "--arrivals", "1"], "arrivals has 1 entries; it must have one for each"),
    ],
)
def test_wrong_options_are_one_sentence(capsys, options, text):
    assert main(["explain", "gemm", "64", "64", "64", *options]) == 2
    assert text in capsys.readouterr().err


def test_no_tile_draws_an_empty_picture():
    params = TileSchedulerParams.to_underlying_arguments(0, 8, 8, block=(8, 8, 8))
    assert "<rect" not in picture(params, simulate(params, 1))
