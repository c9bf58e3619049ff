"""The launch of `kernel_gluon_sm90_dbias.py`: the gradient of a bias that is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileloom.launch.launcher import prepared
from tileloom.ops.attention.config_backward_sm90 import tile_width
from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor
from tileloom.ops.attention.kernel_gluon_sm90_dbias import attention_dbias_sm90_kernel
from tileloom.ops.attention.launch_gluon_sm90_scores import TILE, Scores, score_descriptor
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.ops.attention.strides import strides_of
from tileloom.target import target_of


def _takes(problem: AttentionProblem, scores: Scores, dbias: torch.Tensor) -> bool:
    return (
        scores.is_summed
        and scores.bias == TILE
        and not (problem.has_mask or problem.packed or problem.dropout_p > 0)
        and max(problem.head_dim, problem.head_dim_v) <= 128
        and dbias.dim() >= 2
        and tuple(dbias.shape[-2:]) == (problem.len_q, problem.len_k)
        and dbias.dtype == problem.dtype
        and problem.len_k % 8 == 0
        and dbias.data_ptr() % 16 == 0
    )


def slots_of(width: int) -> int:
    """Slots of the ring for tiles of 64 or 128 columns: as many as shared memory holds."""
    return 5 if width == 64 else 3


def bind_dbias(
    problem: AttentionProblem,
    scores: Scores,
    rows: int,
    given: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    dbias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
) -> Callable[..., None] | None:
    """Prepare the launch.

    Args:
        problem: The problem.
        scores: How the main kernel reads the bias.
        rows: Queries of its blocks, to which delta is padded.
        given: q, k, v and dout, as the main kernel gets them; like all tensors here examples.
        bias: The bias or None.
        dbias: Its gradient, contiguous, or None.
        key_lengths: `[B]` or None.

    Returns:
        `launch(q, k, v, dout, bias, dbias, lse, weight, delta, *lengths)`, which writes dbias: LSE
        and weight `[B, Hq, Lq]`, delta with its sign turned `[B, Hq, padded]`, float32; or None
        where the portable kernel, or the main one, has to.
    """
    if bias is None or dbias is None or not _takes(problem, scores, dbias):
        return None
    example = dbias.new_empty(4, dtype=torch.float32)
    padded = problem.blocks_q(rows) // problem.batch * rows
    q, k, v, dout = given
    width = tile_width(max(problem.head_dim, problem.head_dim_v))
    full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    own_b, own_h = (1, 1, *dbias.shape[:-2])[-2:]
    own = (own_b, own_h, problem.len_q, problem.len_k)
    steps = strides_of(bias.expand(full))
    blocks = (-(-problem.len_q // 128), -(-problem.len_k // 128))
    tiles = own[0] * own[1] * blocks[0] * blocks[1]
    shared = [n // m for n, m in zip(full[:2], own)]
    sums = dbias.view(own)
    bound = prepared(attention_dbias_sm90_kernel, num_warps=4).bind(
        (min(tiles, target_of(q).sms),),
        *(descriptor(t, 64, width) for t in (q, k, v, dout)),
        score_descriptor(bias, full, steps, 64),
        score_descriptor(dbias, own, strides_of(sums), 64),
        *(example, example, example),
        None if key_lengths is None else key_lengths.contiguous(),
        problem.scale,
        *(tiles, *blocks, own[1], shared[1], shared[0] * shared[1]),
        problem.heads_q // problem.heads_kv,
        *(int(s > 0) for s in steps[:2]),
        *(problem.heads_q, problem.len_q, problem.len_k, padded),
        *problem.band.clamped(problem.len_q, problem.len_k),
        SLOTS=slots_of(width),
        HAS_LENGTHS=problem.has_key_lengths,
        HAS_LEFT=problem.band.has_left,
        HAS_RIGHT=problem.band.has_right,
    )

    def launch(*tensors: Any) -> None:
        bound.launch(*tensors)

    return launch
