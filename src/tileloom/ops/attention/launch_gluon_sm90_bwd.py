"""The launches of the Hopper backward: workspace, descriptors, grids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.launch.bound import BoundLaunch
from tileloom.launch.launcher import prepared
from tileloom.launch.layout import tma_faults
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig, tile_width
from tileloom.ops.attention.kernel_gluon_sm90_bwd import attention_bwd_kernel
from tileloom.ops.attention.kernel_gluon_sm90_bwd_wide import attention_bwd_wide_kernel
from tileloom.ops.attention.kernel_gluon_sm90_fwd import _descriptor
from tileloom.ops.attention.kernel_triton_bwd_ends import (
    attention_bwd_after_kernel,
    attention_bwd_before_kernel,
)
from tileloom.ops.attention.philox import PhiloxState
from tileloom.ops.attention.problem import AttentionProblem, Layout


@functools.cache
def flat_layout(rank: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of float32 numbers as they lie in global memory, made once."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def bind_attention_bwd(
    problem: AttentionProblem,
    config: GluonSm90BackwardConfig,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    state: PhiloxState | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Callable[..., None]:
    """Prepare the launches for a problem that is not empty.

    Args:
        problem: What `config.reasons_against` has passed.
        config: Tile sizes.
        dout: Gradient of O, `[B, Hq, Lq, D]`; like all tensors here an example, which is not kept.
        dlse: Gradient of LSE, `[B, Hq, Lq]`, or None.
        q: Queries, `[B, Hq, Lq, D]`.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, D]`.
        out: The forward's output, unit stride in the last dimension.
        lse: The forward's log-sum-exp, `[B, Hq, Lq]`, float32, contiguous.
        mask: Not taken.
        bias: Not taken.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Not taken.
        dq: `[B, Hq, Lq, D]`, dense, unit stride in the last dimension, or None.
        dk: `[B, Hkv, Lk, D]`, likewise; computed even where it is None.
        dv: `[B, Hkv, Lk, D]`, likewise.
        dbias: Not taken.

    Returns:
        `launch(dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state, dq, dk, dv, dbias)`,
        which writes dq, dk and dv, for tensors of the same shapes, strides, types and alignments.

    Memory: `B * Hq * Lp * (W + 2)` float32, with Lp = Lq rounded up to the query block and W the
        head dim rounded up to 64, 128 or 256; a copy of dout where TMA cannot read it (a last
        dimension that is not contiguous, strides that are no multiples of 16 bytes).
    """
    del mask, bias, state, dbias
    is_copied = bool(tma_faults("dout", Layout.of(dout), dout.shape))
    dout = dout.contiguous() if is_copied else dout
    rows = 64 if tile_width(problem.head_dim) == 256 else config.block_m
    lines = problem.batch * problem.heads_q * (-(-problem.len_q // rows) * rows)
    numbers = lines * tile_width(problem.head_dim)
    example = q.new_empty(4, dtype=torch.float32)  # all that is asked of a workspace is its type
    before = _before(problem, rows, out, dout, lse, dlse, example)
    is_lost = dk is None or dv is None
    if dk is None or dv is None:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    given = (q, k, v, dout, dk, dv)
    main = _main(problem, config, rows, given, example, key_lengths)
    after = None if dq is None else _after(problem, rows, dq, example)

    def launch(
        dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None, state: PhiloxState | None,
        dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
        dbias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        statistic = q.new_empty(lines, dtype=torch.float32)
        delta = q.new_empty(lines, dtype=torch.float32)
        buffer = q.new_empty(numbers, dtype=torch.float32)
        if is_copied:
            dout = dout.contiguous()
        if dlse is None:
            before.launch(out, dout, lse, statistic, delta, buffer)
        else:
            before.launch(out, dout, lse, dlse.contiguous(), statistic, delta, buffer)
        if is_lost:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
        tensors = (q, k, v, dout, statistic, delta, dk, dv, buffer)
        if key_lengths is None:
            main.launch(*tensors)
        else:
            main.launch(*tensors, key_lengths.contiguous())
        if after is not None:
            after.launch(buffer, dq)

    return launch


def _before(
    problem: AttentionProblem, rows: int, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor,
    dlse: torch.Tensor | None, example: torch.Tensor,
) -> BoundLaunch:  # fmt: skip
    padded = -(-problem.len_q // rows) * rows
    lines = problem.batch * problem.heads_q * padded
    return prepared(attention_bwd_before_kernel, num_warps=4).bind(
        (lines // 16,),
        *(out, dout, lse, None if dlse is None else dlse.contiguous()),
        *(example, example, example),
        problem.scale,
        problem.heads_q,
        problem.len_q,
        padded // 16,
        problem.head_dim // 8,
        *(s // 8 for s in (*out.stride()[:3], *dout.stride()[:3])),
        HAS_DLSE=dlse is not None,
        D=tile_width(problem.head_dim),
        ROWS=16,
    )


def _main(
    problem: AttentionProblem, config: GluonSm90BackwardConfig, rows: int,
    given: tuple[torch.Tensor, ...], example: torch.Tensor, key_lengths: torch.Tensor | None,
) -> BoundLaunch:  # fmt: skip
    q, k, v, dout, dk, dv = given
    width = tile_width(problem.head_dim)
    is_wide = width == 256
    padded = -(-problem.len_q // rows) * rows
    lines = problem.batch * problem.heads_q * padded
    key_blocks = -(-problem.len_k // (64 if is_wide else 128))
    line = TensorDescriptor(example, [lines], [1], [rows], flat_layout(1))
    buffer: Any = example
    if not is_wide:
        shape, box = [lines * width // 128, 128], [rows * width // 256, 128]
        buffer = TensorDescriptor(example, shape, [128, 1], box, flat_layout(2))
    kernel = attention_bwd_wide_kernel if is_wide else attention_bwd_kernel
    return prepared(kernel, num_warps=4).bind(
        (problem.batch * problem.heads_kv * key_blocks,),
        *(_descriptor(x, n, width) for x, n in ((q, rows), (k, 64), (v, 64), (dout, rows))),
        *(line, line),
        *(_descriptor(x, 64, width) for x in (dk, dv)),
        buffer,
        None if key_lengths is None else key_lengths.contiguous(),
        problem.scale,
        problem.heads_q,
        problem.heads_kv,
        problem.heads_q // problem.heads_kv,
        problem.len_q,
        problem.len_k,
        padded,
        key_blocks,
        *problem.band.clamped(problem.len_q, problem.len_k),
        STAGES=config.stages,
        HAS_LENGTHS=problem.has_key_lengths,
        HAS_LEFT=problem.band.has_left,
        HAS_RIGHT=problem.band.has_right,
    )


def _after(
    problem: AttentionProblem, rows: int, dq: torch.Tensor, example: torch.Tensor
) -> BoundLaunch:
    width = tile_width(problem.head_dim)
    padded = -(-problem.len_q // rows) * rows
    lines = problem.batch * problem.heads_q * padded
    return prepared(attention_bwd_after_kernel, num_warps=4).bind(
        (lines * width // 4096,),
        *(example, dq, problem.scale, problem.heads_q, problem.len_q, padded // 64),
        problem.head_dim // 8,
        *(s // 8 for s in dq.stride()[:3]),
        D=width,
    )
