"""Which backend takes packed sequences, and why others refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.attention.cases import BF16
from tests.ops.attention.varlen.cases import VarlenCase, added, visible

from tileloom.ops.attention.config import choose
from tileloom.ops.attention.config_backward import choose_backward
from tileloom.ops.attention.masks import Band
from tileloom.ops.attention.problem import AttentionProblem, Packed
from tileloom.ops.attention.varlen.autograd import as_batch
from tileloom.target import H100


def _problem(case: VarlenCase) -> AttentionProblem:
    inputs = case.inputs()
    q, k, v = (as_batch(t) for t in inputs.tensors)
    mask, bias = inputs.options.get("mask"), inputs.options.get("bias")
    padded = (len(case.lens_q), *inputs.bounds)
    dropout_p = case.options.get("dropout_p", 0.0)
    return AttentionProblem.of(q, k, v, mask, bias, None, Band(), 0.1, dropout_p, padded)


_PLAIN = VarlenCase("plain", (70, 33), (45, 90), (4, 2, 64, 64), BF16)


def test_sizes_are_those_of_the_padded_batch():
    problem = _problem(_PLAIN)
    assert (problem.batch, problem.len_q, problem.len_k) == (2, 70, 90)
    assert problem.packed == Packed(103, 135)
    assert problem.blocks_q(64) == 103 // 64 + 2
    assert problem.blocks_k(128) == 135 // 128 + 2


def test_an_h100_takes_them_by_its_own_kernels():
    problem = _problem(_PLAIN)
    assert choose(problem, H100).backend == "gluon_sm90"
    assert choose_backward(problem, H100).backend == "gluon_sm90"


def test_why_the_hopper_forward_refuses():
    choice = choose(_problem(replace(_PLAIN, sizes=(4, 2, 16, 16))), H100)
    assert choice.backend == "triton"
    assert choice.refused["gluon_sm90"] == ("head dim 16 of packed sequences is not above 16",)


@pytest.mark.parametrize(
    "scores", [{"mask": visible("S", "K")}, {"bias": added("H", "Q", "K")}], ids=["mask", "bias"]
)
def test_scores_are_taken_by_its_own_kernels_too(scores):
    problem = _problem(replace(_PLAIN, **scores))
    assert choose(problem, H100).backend == "gluon_sm90"
    assert choose_backward(problem, H100).backend == "gluon_sm90"


def test_more_rows_than_32_bits_hold_are_refused():
    huge = replace(_problem(_PLAIN), packed=Packed(2**30, 2**30))
    choice = choose(huge, H100)
    assert "Tq + Tk + S exceeds 2^30" in choice.refused["gluon_sm90"]
    assert any(
        reason.startswith("Tq + Tk + S is 2147483650") for reason in choice.refused["triton"]
    )


def test_offsets_of_a_block_are_as_many_as_the_host_counts():
    """The bound of `pieces_packed.py`: `T // BLOCK + S` numbers are enough, for any lengths."""
    generator = torch.Generator().manual_seed(3)
    for block in (16, 64, 192):
        lens = torch.randint(0, 3 * block, (200,), generator=generator)
        ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        numbers = ends // block + torch.arange(201)
        assert bool((numbers.diff() >= -(-lens // block)).all())
        assert int(numbers[-1]) == int(ends[-1]) // block + 200
