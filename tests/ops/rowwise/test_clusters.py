"""Which rows a cluster takes, and why not others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.rowwise.norms import cases
from tests.ops.rowwise.norms.cases import NormCase

from tileloom import emulator
from tileloom.errors import ConfigError
from tileloom.ops.rowwise.config import Tile, TritonConfig, cluster_of, cluster_reasons
from tileloom.ops.rowwise.norm.config import rule, walk_reasons
from tileloom.ops.rowwise.norm.kernels import problem, walked
from tileloom.ops.rowwise.rows import rows_of
from tileloom.ops.rowwise.softmax.config import softmax_rule
from tileloom.ops.rowwise.softmax.problem import forward_problem
from tileloom.target import H100

BF16 = torch.bfloat16


def rows(width, itemsize=2):
    return rows_of((4, width), [(width, 1)] * 2, itemsize)


@pytest.mark.parametrize(("width", "ctas"), [(32768, 4), (65536, 8), (131072, 8)])
def test_softmax_gives_long_rows_to_clusters(width, ctas):
    x = torch.empty(4, width, dtype=BF16, device="meta")
    mask = torch.empty(width, dtype=torch.bool, device="meta")
    assert softmax_rule(forward_problem(x, None), H100).forward.ctas == ctas
    assert softmax_rule(forward_problem(x, mask), H100).forward.ctas == 1


def test_norms_give_rows_of_a_layer_norm_alone():
    for width in (65536, 131072):  # vectors are float32
        tile = rule(problem(width, BF16, is_centred=True), H100).forward
        assert (tile.ctas, tile.ring) == (8, False)
    assert rule(problem(131072, BF16, is_centred=False), H100).forward.ctas == 1
    with_residual = problem(131072, BF16, is_centred=True, has_residual=True)
    assert rule(with_residual, H100).forward.ctas == 1


def walk_of(asked, target=H100):
    """CTAs of the clusters that walk over the rows; 0 if none do."""
    tiles = rule(asked, target)
    tile = tiles.backward if asked.is_backward else tiles.forward
    return tile.ctas if tile.ring and tile.ctas > 1 else 0


@pytest.mark.parametrize(
    ("width", "weight_bytes", "ctas"),
    [
        # rms and layer norm forward, then backward
        *((16384, 2, (0, 0, 0, 2)), (16384, 4, (0, 2, 2, 2)), (32768, 2, (0, 2, 0, 0))),
        *((65536, 2, (2, 0, 0, 0)), (131072, 2, (4, 8, 8, 8)), (131072, 4, (0, 0, 0, 0))),
    ],
)
def test_clusters_walk_where_they_are_faster(width, weight_bytes, ctas):
    found = [
        walk_of(walked(width, weight_bytes, is_centred=is_centred, is_backward=is_backward))
        for is_backward in (False, True)
        for is_centred in (False, True)
    ]
    assert tuple(found) == ctas


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("change", "target"),
    [
        ({"has_residual": True}, H100),
        ({"is_aligned": False}, H100),
        ({"dtype": torch.float32}, H100),
        ({"rows": rows_of((256, 131072), [(131072, 1)] * 4, 2)}, H100),
        ({"rows": rows_of((4096, 131072), [(131073, 1)] * 4, 2)}, H100),
        ({"rows": rows_of((2, 2048, 131072), [(2**31, 131072, 1)] * 4, 2)}, H100),
        ({}, replace(H100, capability=(8, 0))),
        ({}, replace(H100, smem=163 * 1024)),
    ],
)
def test_they_do_not_walk_over_others(change, target, is_backward):
    asked = walked(131072, 2, is_centred=False, is_backward=is_backward)
    assert walk_of(asked) != 0
    assert walk_of(replace(asked, **change), target) == 0


def test_why_clusters_cannot_walk_is_said():
    asked = walked(8192, 2, is_centred=True)
    odd = replace(asked, dtype=torch.float32, is_aligned=False, has_residual=True)
    assert walk_reasons("forward", odd, Tile(1024, 2, 4, 1, 2, ring=True, ctas=8), H100) == [
        "forward.ctas takes float16 and bfloat16 with a ring, and rows are torch.float32",
        "forward.ctas with a ring takes rows that begin at multiples of 16 bytes",
        "forward.ctas with a ring takes no residual",
        "forward.ctas with a ring takes 1 row and 3 stages or more, and they are 2 and 2",
    ]
    edge = Tile(4096, 1, 16, 1, 3, ring=True, ctas=2)
    assert walk_reasons("backward", asked, edge, H100) == [
        "backward.stages is 3, so that rows take 49152 bytes of shared memory; with a ring they "
        "must take 48096 or less, or more than 49152"
    ]
    wide = Tile(4096, 1, 16, 2, 8, ring=True, ctas=2)
    assert walk_reasons("backward", asked, wide, H100) == [
        "backward.stages is 8, which needs 264256 bytes of shared memory, and NVIDIA H100 80GB "
        "HBM3 has 232448"
    ]


def test_a_backward_of_clusters_without_a_ring_is_refused():
    case = NormCase(
        "layer", (3, 8192), BF16, config=TritonConfig(backward=Tile(1024, 1, 4, ctas=8))
    )
    with emulator.run(), pytest.raises(ConfigError) as caught:
        cases.run(case.inputs())
    assert "- triton: backward.ctas is 8, and only clusters with a ring take it" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("asked", "dtype", "target"),
    [
        (rows(131072), BF16, replace(H100, capability=(8, 0))),
        (rows(131072), BF16, replace(H100, capability=(10, 0))),
        (rows(131072, 4), torch.float32, H100),
        (rows(131064), BF16, H100),
        (rows(2**18), BF16, H100),
    ],
)
def test_other_rows_go_another_way(asked, dtype, target):
    assert cluster_of(asked, dtype, target) is None


def test_what_cannot_be_is_said():
    why = cluster_reasons(
        "forward", rows(8200), Tile(512, 1, 2, ctas=8), replace(H100, capability=(8, 0))
    )
    assert [line.partition(",")[0] for line in why] == [
        "forward.ctas is made for Hopper",
        "forward.ctas times its block are 8 x 512 columns",
        "forward.ctas takes 32 warps or more with 16 bytes for each thread",
    ]
    several = rows_of((2, 3, 8192), [(99999 * 8, 8192, 1)], 2)
    (only,) = cluster_reasons("forward", several, Tile(1024, 1, 4, ctas=8), H100)
    assert only.startswith("forward.ctas takes rows of one common stride, of whole 16 bytes")
