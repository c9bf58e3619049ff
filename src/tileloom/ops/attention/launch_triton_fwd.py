"""The launch of the portable forward: units, grid, and what the kernel is told of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tileloom.launch.launcher import prepared
from tileloom.ops.attention.config import TritonConfig, padded_head_dim
from tileloom.ops.attention.kernel_triton import attention_fwd_kernel
from tileloom.ops.attention.philox import PhiloxState, dropout_arguments, dropout_values
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.strides import batch_strides, scores_arguments, vector_of

_LOG2_E = math.log2(math.e)
_LEAST_SCALE = 2.0**-120
# Most bytes of K and V that the heads of one section may have together, so that their tiles run
# longest first and still find K and V in L2: well below the 40 MiB of an A100, the smallest here.
_SECTION_BYTES = 16 * 2**20


def constants(problem: AttentionProblem, config: TritonConfig) -> dict[str, object]:
    """Return the kernel's constants that follow from a problem and a config alone."""
    block_d = padded_head_dim(problem.head_dim)
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CHUNK_D": min(block_d, config.chunk_d or block_d),
        "HAS_LENGTHS": problem.has_key_lengths,
        "HAS_LEFT": problem.band.has_left,
        "HAS_RIGHT": problem.band.has_right,
        "NEGATE": problem.scale < 0,
        "DROPOUT": problem.dropout_p > 0,
    }


def _section(problem: AttentionProblem) -> int:
    """How many heads run side by side, longest tiles first; 1 where all tiles are as long."""
    heads_all = problem.batch * problem.heads_q
    if problem.packed or not problem.band.has_right:
        return 1
    head_bytes = problem.len_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    group = problem.heads_q // problem.heads_kv
    return min(heads_all, group * max(1, _SECTION_BYTES // max(1, head_bytes)))


def bind_attention_fwd(
    problem: AttentionProblem,
    config: TritonConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    state: PhiloxState | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: Offsets | None = None,
) -> Callable[..., None]:
    """Prepare the launch for a problem that is not empty; nothing is allocated or copied.

    Args:
        problem: What `config.reasons_against` has passed.
        config: Tile sizes.
        q: Queries, `[B, Hq, Lq, D]`, any strides; k and v likewise. All tensors here are examples
            and are not kept.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.
        mask: Bool, broadcastable to `[B, Hq, Lq, Lk]`, or None.
        bias: Floating, broadcastable to the same, or None.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Seed and offset of dropout, or None.
        out: `[B, Hq, Lq, Dv]`, unit stride in the last dimension.
        lse: `[B, Hq, Lq]`, float32, contiguous.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(q, k, v, mask, bias, key_lengths, state, out, lse)`, which writes O and LSE, for
        tensors of the same shapes, strides, types and alignments.
    """
    full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    vector = vector_of(16 // q.element_size(), q, k, v, out)
    unit = vector or 1
    mask_mode, mask_vector, mask_strides = scores_arguments(mask, full)
    bias_mode, bias_vector, bias_strides = scores_arguments(bias, full)
    heads_all = problem.heads_q * (1 if problem.packed else problem.batch)
    tiles = problem.heads_q * problem.blocks_q(config.block_m) // heads_all
    # A hidden score of -inf times 0 would be NaN; this small, every product is 0 to exp2.
    scale = max(abs(problem.scale), _LEAST_SCALE) * (1.0 if bias is not None else _LOG2_E)
    dropout = dropout_arguments(problem, state)
    launcher = prepared(
        attention_fwd_kernel, num_warps=config.num_warps, num_stages=config.num_stages
    )
    bound = launcher.bind(
        (tiles * heads_all,),
        q, k, v, None if mask is None else mask.view(torch.uint8), bias, key_lengths,
        *dropout.addresses, out, lse, scale,
        *(s // unit for t in (q, k, v) for s in batch_strides(t, problem)),
        *mask_strides, *bias_strides,
        *(s // unit for s in batch_strides(out, problem)[:3]),
        0 if key_lengths is None else key_lengths.stride(0),
        problem.heads_q, heads_all, problem.heads_q // problem.heads_kv,
        _section(problem), tiles, problem.len_q, problem.len_k,
        *(offsets or (None, None)), problem.batch,
        *(problem.packed.totals if problem.packed else (0, 0)),
        *problem.band.clamped(problem.len_q, problem.len_k), *dropout.bound(),
        **constants(problem, config), VECTOR=vector, MASK_VECTOR=mask_vector,
        BIAS_VECTOR=bias_vector, MASK_MODE=mask_mode, BIAS_MODE=bias_mode,
    )  # fmt: skip

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None, state: PhiloxState | None,
        out: torch.Tensor, lse: torch.Tensor, offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        is_plain = mask is None and bias is None and key_lengths is None
        if is_plain and state is None and offsets is None:
            bound.launch(q, k, v, out, lse)
            return
        bits = None if mask is None else mask.view(torch.uint8)
        addresses, numbers = dropout_values(state)
        given = (
            *(q, k, v, bits, bias, key_lengths, *addresses, out, lse),
            *(offsets or ()), *numbers,
        )  # fmt: skip
        bound.launch(*[value for value in given if value is not None])

    return launch
