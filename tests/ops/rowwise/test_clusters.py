"""Which rows a cluster takes, and why not others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tileloom.ops.rowwise.config import Tile, cluster_of, cluster_reasons
from tileloom.ops.rowwise.norm.config import rule
from tileloom.ops.rowwise.norm.kernels import problem
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
    assert rule(problem(131072, BF16, is_centred=True), H100).forward.ctas == 8
    assert rule(problem(131072, BF16, is_centred=False), H100).forward.ctas == 1
    with_residual = problem(131072, BF16, is_centred=True, has_residual=True)
    assert rule(with_residual, H100).forward.ctas == 1


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
