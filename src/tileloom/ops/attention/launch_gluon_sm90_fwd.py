"""The launch of the Hopper forward: descriptors, grid, and what the kernel is told of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tileloom.launch.launcher import prepared
from tileloom.ops._counters import zero_counter
from tileloom.ops.attention.config import GluonSm90Config, padded_head_dim
from tileloom.ops.attention.kernel_gluon_sm90_fwd import (
    _descriptor,
    attention_fwd_kernel,
    constants,
    is_dynamic,
)
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.strides import batch_strides
from tileloom.target import target_of


def bind_attention_fwd(
    problem: AttentionProblem,
    config: GluonSm90Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    bias: None,
    key_lengths: torch.Tensor | None,
    state: None,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: Offsets | None = None,
) -> Callable[..., None]:
    """Prepare the launch for a problem that is not empty.

    Args:
        problem: What `config.reasons_against` has accepted.
        config: Tile sizes and roles.
        q: Queries; like all tensors here an example, which is not kept.
        k: Keys.
        v: Values.
        mask: Not taken.
        bias: Not taken.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Not taken.
        out: Output, last dimension contiguous.
        lse: Log-sum-exp, float32, contiguous.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(q, k, v, mask, bias, key_lengths, state, out, lse)`, which writes `out`
        `[B, Hq, Lq, D]` and `lse` `[B, Hq, Lq]`, for tensors of the same shapes, strides, types and
        alignments.
    """
    del mask, bias, state
    width = padded_head_dim(problem.head_dim)
    heads = problem.heads_q * (1 if problem.packed else problem.batch)
    tiles = problem.heads_q * problem.blocks_q(config.block_m) // heads
    group = problem.heads_q // problem.heads_kv
    kv_bytes = 4 * problem.len_k * problem.head_dim
    section = min(heads, group * max(1, 2**25 // kv_bytes))  # K and V of a section: 32 MiB of L2
    stride_b, stride_h, stride_l, _ = batch_strides(out, problem)
    is_packed = problem.packed is not None
    is_tma, draws = config.store == "tma", is_dynamic(problem)
    bound = prepared(attention_fwd_kernel, num_warps=4).bind(
        (min(tiles * heads, target_of(q).sms),),
        _descriptor(q, 64, width, is_packed),
        _descriptor(k, config.block_n, width, is_packed),
        _descriptor(v, config.block_n, width, is_packed),
        _descriptor(out, 64, width, is_packed) if is_tma else None,
        out,
        lse,
        None if key_lengths is None else key_lengths.contiguous(),  # taken without a stride
        zero_counter(q) if draws else None,
        # A hidden score of -inf times 0 would be NaN; this small, every product is 0 to exp2.
        max(problem.scale, 2.0**-120) * math.log2(math.e),
        problem.heads_q,
        group,
        problem.len_q,
        problem.len_k,
        problem.head_dim // 8,
        tiles,
        heads,
        section,
        *problem.band.clamped(problem.len_q, problem.len_k),
        stride_b // 8,
        stride_h // 8,
        stride_l // 8,
        *(offsets or (None, None)),
        problem.batch,
        *(problem.packed.totals if problem.packed else (0, 0)),
        **constants(problem, config),
    )

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, bias: None,
        key_lengths: torch.Tensor | None, state: None, out: torch.Tensor, lse: torch.Tensor,
        offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        given = (q, k, v, out, out, lse) if is_tma else (q, k, v, out, lse)
        if key_lengths is not None:
            given = (*given, key_lengths.contiguous())
        if draws:
            given = (*given, zero_counter(q))
        if offsets is not None:
            given = (*given, *offsets)
        bound.launch(*given)

    return launch
