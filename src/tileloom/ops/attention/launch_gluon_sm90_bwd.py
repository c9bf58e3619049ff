"""The launches of the Hopper backward: workspace, descriptors, grids."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.launch.bound import BoundLaunch
from tileloom.launch.launcher import prepared
from tileloom.launch.layout import tma_faults
from tileloom.ops._counters import zero_counter
from tileloom.ops.attention.config_backward_sm90 import (
    GluonSm90BackwardConfig,
    buffer_width,
    dropout_mode,
    is_192_kernel,
    is_narrow_kernel,
    is_wide_kernel,
    keys_of_block,
    tile_width,
)
from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor
from tileloom.ops.attention.kernel_gluon_sm90_bwd import attention_bwd_kernel
from tileloom.ops.attention.kernel_gluon_sm90_bwd_192 import attention_bwd_192_kernel
from tileloom.ops.attention.kernel_gluon_sm90_bwd_narrow import attention_bwd_narrow_kernel
from tileloom.ops.attention.kernel_gluon_sm90_bwd_wide import attention_bwd_wide_kernel
from tileloom.ops.attention.kernel_triton_bwd_ends import (
    attention_bwd_after_kernel,
    attention_bwd_before_kernel,
)
from tileloom.ops.attention.launch_gluon_sm90_dbias import bind_dbias
from tileloom.ops.attention.launch_gluon_sm90_scores import Scores, bind_weights
from tileloom.ops.attention.philox import PhiloxState, dropout_arguments, dropout_values
from tileloom.ops.attention.problem import AttentionProblem, Layout, Offsets
from tileloom.ops.attention.strides import batch_strides
from tileloom.target import target_of


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
    offsets: Offsets | None = None,
) -> Callable[..., None]:
    """Prepare the launches for a problem that is not empty.

    Args:
        problem: What `config.reasons_against` has passed.
        config: Tile sizes.
        dout: Gradient of O, `[B, Hq, Lq, Dv]`; like all tensors here an example, which is not kept.
        dlse: Gradient of LSE, `[B, Hq, Lq]`, or None.
        q: Queries, `[B, Hq, Lq, D]`.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.
        out: The forward's output, unit stride in the last dimension.
        lse: The forward's log-sum-exp, `[B, Hq, Lq]`, float32, contiguous.
        mask: Bool, broadcastable to `[B, Hq, Lq, Lk]`, or None.
        bias: Floating, broadcastable to the same, or None.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Seed and offset of dropout, or None.
        dq: `[B, Hq, Lq, D]`, dense, unit stride in the last dimension, or None.
        dk: `[B, Hkv, Lk, D]`, likewise; computed even where it is None.
        dv: `[B, Hkv, Lk, Dv]`, likewise.
        dbias: Of bias's shape, contiguous, or None.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state, dq, dk, dv, dbias)`,
        which writes dq, dk, dv and dbias, for tensors of the same shapes, strides, types and
        alignments.

    Memory: `B * Hq * Lp * (W + 2)` float32, with Lp = Lq rounded up to the query block and W the
        head dim rounded up to 64, 128, 256, or 192 for that kernel, and `B * Lp` of packed
        sequences `Tq` rounded down and S blocks more; if `config.ordered` 4 bytes for each block
        of keys of each key head, and 4; a copy of dout, and of out, where TMA cannot read it (a
        last dimension that is not contiguous, strides or a base that are no multiples of 16 bytes).
        With a bias `B * Hq * Lq` and `B * Hq * ceil(Lq / 64)` more; for its gradient `B * Hq * Lk`
        where it is the same for every query, and where it broadcasts otherwise what the portable
        backward needs for it.
    """
    copied = _is_copied(dout), _is_copied(out)
    dout, out = _readable(dout, copied[0]), _readable(out, copied[1])
    rows = 64 if is_wide_kernel(problem.head_dim, problem.head_dim_v) else config.block_m
    lines = problem.heads_q * problem.blocks_q(rows) * rows
    width, keys = buffer_width(problem, config), keys_of_block(problem, config)
    boxes = 2 if is_192_kernel(problem, config) else 1
    programs = problem.heads_kv * problem.blocks_k(keys)
    example = q.new_empty(4, dtype=torch.float32)  # all that is asked of a workspace is its type
    scores = Scores.of(problem, config, mask, bias, dbias)
    unit = problem.scale if keys == 64 or scores.bias or scores.mask else math.log(2.0)
    before = _before(problem, rows, width, unit, out, dout, lse, dlse, example, offsets)
    is_lost = dk is None or dv is None
    if dk is None or dv is None:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    given = (q, k, v, dout, dk, dv)
    weigh = bind_weights(problem, q, k, lse, mask, bias, key_lengths, offsets)
    everything = (dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state)
    sum_up = bind_dbias(problem, scores, rows, given[:4], bias, dbias, key_lengths)
    finish = None if sum_up else scores.bind_sum(problem, everything, dbias, offsets)
    own = scores.arguments(problem, rows, mask, bias, dbias, example)
    dropout = dropout_arguments(problem, state)
    own[0].extend((*dropout.addresses, *dropout.bound()))
    main = _main(problem, config, rows, given, example, key_lengths, offsets, scores, own)
    after = None if dq is None else _after(problem, rows, width, dq, example, offsets)

    def launch(
        dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None, state: PhiloxState | None,
        dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
        dbias: torch.Tensor | None, offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        statistic = q.new_empty(lines, dtype=torch.float32)
        delta = q.new_empty(lines, dtype=torch.float32)
        buffer = q.new_empty(lines * width, dtype=torch.float32)
        dout, out = _readable(dout, copied[0]), _readable(out, copied[1])
        around = () if offsets is None else (offsets[0],)
        changes = () if dlse is None else (dlse.contiguous(),)
        before.launch(out, dout, lse, *changes, statistic, delta, buffer, *around)
        if is_lost:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
        lengths = () if key_lengths is None else (key_lengths.contiguous(),)
        weights = weigh(q, k, lse, mask, bias, key_lengths, offsets)
        own = scores.tensors(problem, q, mask, bias, dbias)
        addresses, random = dropout_values(state)
        packed = () if offsets is None else (*offsets, dk, dv)
        turns = _counters(config, programs, q)
        qs, ks, dks, buffers = ((t,) * boxes for t in (q, k, dk, buffer))
        first = (*qs, *ks, v, dout, statistic, delta, *dks, dv, *buffers)
        main.launch(*first, *lengths, *weights, *own, *addresses, *random, *packed, *turns)
        if sum_up is not None:
            sum_up(q, k, v, dout, bias, dbias, *weights[1:], delta, *lengths)
        if finish is not None:
            given = (dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state)
            finish(own, given, dbias, offsets)
        if after is not None:
            after.launch(buffer, dq, *around)

    return launch


def _is_copied(x: torch.Tensor) -> bool:
    """Whether the kernels cannot read O or its gradient where it is: by TMA, or 16 bytes a time."""
    return bool(tma_faults("x", Layout.of(x), x.shape))


def _readable(x: torch.Tensor, is_copied: bool) -> torch.Tensor:
    """Copy a tensor if that is needed; a contiguous one may still lie at an odd address."""
    return x.clone(memory_format=torch.contiguous_format) if is_copied else x


def _padded(problem: AttentionProblem, rows: int) -> int:
    """Lines of one head of one batch, or of all packed sequences."""
    return problem.blocks_q(rows) // (1 if problem.packed else problem.batch) * rows


def _counters(
    config: GluonSm90BackwardConfig, programs: int, like: torch.Tensor
) -> tuple[Any, ...]:
    """Zeros: the progress of a fixed order, whose first word counts turns; else that alone."""
    if not config.ordered:
        return (zero_counter(like),) if config.persistent else ()
    progress = like.new_zeros(1 + programs, dtype=torch.int32)
    return (progress, progress) if config.persistent else (progress,)


def _heads_a_round(
    problem: AttentionProblem, config: GluonSm90BackwardConfig, key_blocks: int, sms: int,
    is_shared: bool,
) -> int:  # fmt: skip
    """How many key heads programs go round: where batches share a bias or mask, all of a head's.

    Not where the Q and dO of so many do not fit in 32 MiB of L2.

    Under a causal mask it makes up for blocks of different lengths: 2 to 3 % at 4k, nothing at 16k
    (H200, 2026-11-28). With few blocks a head the L2 cache holds too many heads at once then: at 1k
    it cost 3 to 40 %, but 16 heads at once gained 4 % with 192 columns of q and k (2026-11-29).
    Where all blocks are of one length, one head after the other is best.
    """
    is_uneven = problem.band.has_right and not problem.band.has_left
    heads = max(1, 2 * sms // key_blocks) if config.ordered or is_uneven else 1
    if key_blocks < 32 and not config.ordered:
        heads = min(heads, 16) if is_192_kernel(problem, config) else 1
    q_bytes = 2 * problem.len_q * (problem.head_dim + problem.head_dim_v)
    if is_shared and problem.batch * q_bytes <= 2**25:
        return max(1, heads // problem.batch) * problem.batch
    return heads


def _row_arguments(problem: AttentionProblem, offsets: Offsets | None) -> tuple[Any, ...]:
    """What the kernels before and after are told of packed sequences."""
    if problem.packed is None or offsets is None:
        return None, 0, 0
    return offsets[0], problem.batch, problem.packed.total_q


def _before(
    problem: AttentionProblem, rows: int, width: int, unit: float, out: torch.Tensor,
    dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, example: torch.Tensor,
    offsets: Offsets | None,
) -> BoundLaunch:  # fmt: skip
    padded = _padded(problem, rows)
    lines = problem.heads_q * problem.blocks_q(rows) * rows
    return prepared(attention_bwd_before_kernel, num_warps=4, launch_pdl=True).bind(
        (lines // 16,),
        *(out, dout, lse, None if dlse is None else dlse.contiguous()),
        *(example, example, example),
        unit,
        problem.heads_q,
        problem.len_q,
        padded // 16,
        problem.head_dim_v // 8,
        *_row_arguments(problem, offsets),
        *(s // 8 for t in (out, dout) for s in batch_strides(t, problem)[:3]),
        HAS_DLSE=dlse is not None,
        D=width,
        D_V=tile_width(problem.head_dim_v),
        ROWS=16,
        BLOCK=rows,
    )


def _tiles(
    problem: AttentionProblem, config: GluonSm90BackwardConfig, rows: int,
    given: tuple[torch.Tensor, ...], example: torch.Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Descriptors of what the main kernel loads and writes, in its order."""
    q, k, v, dout, dk, dv = given
    is_packed = problem.packed is not None
    width, width_v = buffer_width(problem, config), tile_width(problem.head_dim_v)
    lines = problem.heads_q * problem.blocks_q(rows) * rows
    line = TensorDescriptor(example, [lines], [1], [rows], flat_layout(1))

    def boxes(x: torch.Tensor, n: int, *widths: int) -> list[TensorDescriptor]:
        return [descriptor(x, n, columns, is_packed) for columns in widths]

    def pieces(*sizes: int) -> list[TensorDescriptor]:
        shape = [lines * width // 128, 128]
        return [TensorDescriptor(example, shape, [128, 1], [n, 128], flat_layout(2)) for n in sizes]

    is_192 = is_192_kernel(problem, config)
    keys, widths = (128, (128, 64)) if is_192 else (64, (width,))
    buffer: list[Any] = pieces(64, 32) if is_192 else pieces(rows * width // 256)
    if keys_of_block(problem, config) == 64:
        buffer = [example]
    return (
        *boxes(q, rows, *widths), *boxes(k, keys, *widths), *boxes(v, keys, width_v),
        *boxes(dout, rows, width_v), line, line, *boxes(dk, keys, *widths),
        *boxes(dv, keys, width_v), *buffer,
    )  # fmt: skip


def _main(
    problem: AttentionProblem, config: GluonSm90BackwardConfig, rows: int,
    given: tuple[torch.Tensor, ...], example: torch.Tensor, key_lengths: torch.Tensor | None,
    offsets: Offsets | None, scores: Scores, own: tuple[list[Any], list[int]],
) -> BoundLaunch:  # fmt: skip
    q, _k, _v, _dout, dk, dv = given
    is_wide = is_wide_kernel(problem.head_dim, problem.head_dim_v)
    is_narrow = is_narrow_kernel(problem, config.block_m)
    is_192 = is_192_kernel(problem, config)
    is_packed = problem.packed is not None
    padded = _padded(problem, rows)
    programs = problem.heads_kv * problem.blocks_k(keys_of_block(problem, config))
    key_blocks = programs // (problem.heads_kv * (1 if is_packed else problem.batch))
    kernel = attention_bwd_wide_kernel if is_wide else attention_bwd_kernel
    hidden, strides, constants = own[0], own[1], scores.constants()
    counters = [example.view(torch.int32) if config.ordered else None]
    if is_narrow:  # it knows nothing of scores and dropout, nor does the next
        kernel, hidden, strides, constants = attention_bwd_narrow_kernel, [], [], {}
        counters.append(example.view(torch.int32) if config.persistent else None)
    elif is_192:
        kernel, hidden, strides, constants = attention_bwd_192_kernel, [], [], {}
        counters = []
    else:
        rows_lost = (example.view(torch.int32), example, example) if scores.bias else (None,) * 3
        hidden = [*rows_lost, *hidden]
        constants["DROPOUT"] = dropout_mode(problem)
    return prepared(kernel, num_warps=8 if is_192 else 4, launch_pdl=True).bind(
        (min(programs, target_of(q).sms) if config.persistent else programs,),
        *_tiles(problem, config, rows, given, example),
        None if key_lengths is None else key_lengths.contiguous(),
        *hidden,
        problem.scale,
        problem.heads_q,
        problem.heads_kv,
        problem.heads_q // problem.heads_kv,
        problem.len_q,
        problem.len_k,
        padded,
        key_blocks,
        *problem.band.clamped(problem.len_q, problem.len_k),
        *(offsets or (None, None)),
        *((dk, dv) if is_packed else (None, None)),
        *counters,
        _heads_a_round(problem, config, key_blocks, target_of(q).sms, scores.is_shared),
        problem.head_dim // 8,
        problem.head_dim_v // 8,
        problem.batch,
        *(problem.packed.totals if problem.packed else (0, 0)),
        *(s // 8 for t in (dk, dv) for s in t.stride()[1:3]),
        *strides,
        STAGES=config.stages,
        HAS_LENGTHS=problem.has_key_lengths,
        HAS_LEFT=problem.band.has_left,
        HAS_RIGHT=problem.band.has_right,
        **constants,
    )


def _after(
    problem: AttentionProblem, rows: int, width: int, dq: torch.Tensor, example: torch.Tensor,
    offsets: Offsets | None,
) -> BoundLaunch:  # fmt: skip
    padded = _padded(problem, rows)
    lines = problem.heads_q * problem.blocks_q(rows) * rows
    return prepared(attention_bwd_after_kernel, num_warps=4, launch_pdl=True).bind(
        (lines * width // 4096,),
        *(example, dq, problem.scale, problem.heads_q, problem.len_q, padded // 64),
        problem.head_dim // 8,
        *_row_arguments(problem, offsets),
        *(s // 8 for s in batch_strides(dq, problem)[:3]),
        D=width,
        BLOCK=rows,
    )
