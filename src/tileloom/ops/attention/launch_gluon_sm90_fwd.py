"""The launch of the Hopper forward: descriptors, grid, and what the kernel is told of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tileloom.launch.launcher import prepared
from tileloom.ops._counters import zero_counter
from tileloom.ops.attention.config import GluonSm90Config, head_tiles, is_bare, is_diagonal
from tileloom.ops.attention.descriptors_gluon_sm90 import descriptor
from tileloom.ops.attention.kernel_gluon_sm90_fwd import attention_fwd_kernel
from tileloom.ops.attention.philox import PhiloxState, dropout_arguments, dropout_values
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.strides import batch_strides, is_shared, scores_arguments, strides_of
from tileloom.target import target_of


def bind_attention_fwd(
    problem: AttentionProblem,
    config: GluonSm90Config,
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
    """Prepare the launch for a problem that is not empty.

    Args:
        problem: What `config.reasons_against` has accepted.
        config: Tile sizes and roles.
        q: Queries; like all tensors here an example, which is not kept.
        k: Keys.
        v: Values.
        mask: Bool, broadcastable to `[B, Hq, Lq, Lk]`, or None.
        bias: float16, bfloat16 or float32, broadcastable to the same, or None.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Seed and offset of dropout, or None.
        out: Output, last dimension contiguous.
        lse: Log-sum-exp, float32, contiguous.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(q, k, v, mask, bias, key_lengths, state, out, lse)`, which writes `out`
        `[B, Hq, Lq, Dv]` and `lse` `[B, Hq, Lq]`, for tensors of the same shapes, strides, types
        and alignments.
    """
    width, _, width_v = head_tiles(problem.head_dim, problem.head_dim_v)
    heads = problem.heads_q * (1 if problem.packed else problem.batch)
    tiles = problem.heads_q * problem.blocks_q(config.block_m) // heads
    group = problem.heads_q // problem.heads_kv
    fixed = constants(problem, config, is_shared=is_shared(problem, bias, mask))
    section = section_of(problem, fixed["ORDER"], heads)
    is_packed = problem.packed is not None
    dropout = dropout_arguments(problem, state)
    is_tma, draws = config.store == "tma", is_dynamic(problem, config)
    bits = None if mask is None else mask.view(torch.uint8)
    modes, strides, riding = _scores(bias, bits, problem, config)
    ride_desc, ride_b, ride_h = _ride(riding, problem, config.block_n)
    # A hidden score of -inf times 0 would be NaN; this small, every product is 0 to exp2.
    scale = max(problem.scale, 2.0**-120) * (1.0 if bias is not None else math.log2(math.e))
    bound = prepared(
        attention_fwd_kernel, num_warps=4
    ).bind(
        (min(tiles * heads, target_of(q).sms),),
        descriptor(q, 64, width, is_packed),
        descriptor(k, config.block_n, width, is_packed),
        descriptor(v, config.block_n, width_v, is_packed),
        descriptor(out, 64, width_v, is_packed) if is_tma else None,
        ride_desc,
        out,
        lse,
        None if key_lengths is None else key_lengths.contiguous(),  # taken without a stride
        zero_counter(q) if draws else None,
        bias,
        bits,
        *dropout.addresses,
        *(offsets or (None, None)),
        scale,
        *(problem.heads_q, group, problem.len_q, problem.len_k, problem.head_dim_v // 8),
        *(tiles, heads, section),
        *problem.band.clamped(problem.len_q, problem.len_k),
        *(stride // 8 for stride in batch_strides(out, problem)[:3]),
        *(ride_b, ride_h),
        problem.batch,
        *(problem.packed.totals if problem.packed else (0, 0)),
        *strides,
        *dropout.bound(),
        **fixed,
        **modes,
    )
    is_plain = all(x is None for x in (mask, bias, key_lengths, state, offsets))
    bias_rides, mask_rides = modes["BIAS_MODE"] == 3, modes["MASK_MODE"] == 3

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None, state: PhiloxState | None,
        out: torch.Tensor, lse: torch.Tensor, offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        if is_plain:
            given = (q, k, v, out, out, lse) if is_tma else (q, k, v, out, lse)
            return bound.launch(*(given if not draws else (*given, zero_counter(q))))
        bits = None if mask is None else mask.view(torch.uint8)
        addresses, numbers = dropout_values(state)
        given = (
            q, k, v, out if is_tma else None, bias if bias_rides else None,
            bits if mask_rides else None, out, lse,
            None if key_lengths is None else key_lengths.contiguous(),
            zero_counter(q) if draws else None, bias, bits, *addresses, *(offsets or ()), *numbers,
        )  # fmt: skip
        return bound.launch(*[value for value in given if value is not None])

    return launch


def _scores(
    bias: torch.Tensor | None,
    bits: torch.Tensor | None,
    problem: AttentionProblem,
    config: GluonSm90Config,
) -> tuple[dict[str, int], tuple[int, ...], torch.Tensor | None]:
    """Modes and strides of bias and mask, as the kernel takes them, and which of the two rides."""
    full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    bias_mode, bias_vector, bias_strides = scores_arguments(bias, full)
    mask_mode, mask_vector, mask_strides = scores_arguments(bits, full)
    riding = None
    for tensor, mode, vector in ((bias, bias_mode, bias_vector), (bits, mask_mode, mask_vector)):
        if riding is None and config.ride_stages and tensor is not None:
            is_fit = can_ride(tensor, mode, vector) and begins_aligned(problem, tensor.itemsize)
            riding = tensor if is_fit else None
    bias_mode = 3 if riding is not None and riding is bias else bias_mode
    mask_mode = 3 if riding is not None and riding is bits else mask_mode
    modes = {
        "BIAS_MODE": bias_mode,
        "BIAS_VECTOR": bias_vector,
        "MASK_MODE": mask_mode,
        "MASK_VECTOR": mask_vector,
    }
    return modes, (*bias_strides, *mask_strides), riding


def can_ride(tensor: torch.Tensor, mode: int, vector: int) -> bool:
    """Whether the TMA unit can read a bias or mask, and a slot in shared memory can hold a block.

    Args:
        tensor: Bias, or mask as uint8.
        mode: Of `scores_arguments`.
        vector: Of the same.
    """
    if mode != 2 or vector * tensor.itemsize != 16 or tensor.itemsize > 2:
        return False
    is_far = any(stride * tensor.itemsize >= 2**40 for stride in tensor.stride())
    return tensor.data_ptr() % 16 == 0 and not is_far


def begins_aligned(problem: AttentionProblem, itemsize: int) -> bool:
    """Whether every block of keys begins at a multiple of 16 bytes in a row of scores.

    The TMA unit begins nowhere else (an illegal instruction on an H100), and blocks are laid from
    the right end of what a tile sees: `range_of`.
    """
    if problem.has_key_lengths or problem.packed:
        return False
    ends = [problem.len_k]
    if problem.band.has_right:
        _, right_top, _, right_bottom = problem.band.clamped(problem.len_q, problem.len_k)
        hi = min(right_top, right_bottom + problem.len_k - problem.len_q)
        ends += [hi, problem.len_q + hi]
    return all(end * itemsize % 16 == 0 for end in ends)


def _ride(
    tensor: torch.Tensor | None, problem: AttentionProblem, block_n: int
) -> tuple[Any, int, int]:
    """The descriptor of what rides, and 1 or 0: whether it has batches, and heads, of its own."""
    if tensor is None:
        return None, 0, 0
    whole = tensor.expand(problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    has_batches, has_heads = (int(stride > 0) for stride in strides_of(whole)[:2])
    part = whole[: problem.batch if has_batches else 1, : problem.heads_q if has_heads else 1]
    return descriptor(part, 64, block_n), has_batches, has_heads


def is_even(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether no tile's key range begins inside a block, known on the host."""
    if problem.packed or problem.has_key_lengths or problem.band.has_left:
        return False
    if not problem.band.has_right:
        return problem.len_k % config.block_n == 0
    return is_aligned(problem, config)


def is_aligned(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether each tile with a right bound sees keys, in blocks from multiples of `block_n` on."""
    if problem.packed or problem.has_key_lengths or not problem.band.has_right:
        return False
    lo, hi = _band_of(problem)
    if problem.band.has_left and problem.len_q + lo > problem.len_k:
        return False
    sizes = (problem.len_q, problem.len_k, config.block_m, hi)
    return hi >= 0 and all(n % config.block_n == 0 for n in sizes)


def is_late(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether tiles under a diagonal are drawn late, and blocks behind it skipped.

    Where that was faster on an H200 on 2026-11-29: not with heads of 64 and two consumers (2 to 5 %
    slower), nor at 128 with few keys (1 to 3 % at 512) or where `is_cut_once` cannot be (1 to 4 %).
    """
    width, tiles, width_v = head_tiles(problem.head_dim, problem.head_dim_v)
    if not is_diagonal(problem) or (tiles == 1 and width != width_v):
        return False
    if tiles > 1 or width == 128:
        return _is_cut_evenly(problem, config) and (tiles > 1 or config.held > 0)
    return width == 256 or config.consumers == 3


def is_cut_once(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether a warpgroup looks for the diagonal only in the first block that it sees."""
    return is_late(problem, config) and _is_cut_evenly(problem, config)


def _is_cut_evenly(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether it meets the diagonal in no other, if it skips those that it does not see."""
    _, hi = _band_of(problem)
    return all(n % 64 == 0 for n in (problem.len_q, problem.len_k, hi, config.block_n))


def is_apart(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether no block that a warpgroup looks at a right bound in is cut by the left one, too."""
    if problem.packed or problem.has_key_lengths:
        return False
    if not (problem.band.has_left and problem.band.has_right):
        return False
    lo, hi = _band_of(problem)
    # Where the last key is not on the diagonal, the first block of a tile may be cut on the left.
    return hi - lo >= config.block_n + 63 and problem.len_q + hi <= problem.len_k


def _band_of(problem: AttentionProblem) -> tuple[int, int]:
    """The band i + lo <= j <= i + hi of a problem without key lengths."""
    bounds = problem.band.clamped(problem.len_q, problem.len_k)
    left_top, right_top, left_bottom, right_bottom = bounds
    shift = problem.len_k - problem.len_q
    return max(-left_top, shift - left_bottom), min(right_top, right_bottom + shift)


def section_of(problem: AttentionProblem, order: int, heads: int) -> int:
    """How many heads, of all batches, go side by side: as many as have K and V in 32 MiB of L2.

    In order 2 the batches of one head, with a diagonal those of several, if so many fit.
    """
    kv_bytes = 2 * problem.len_k * (problem.head_dim + problem.head_dim_v)
    fits = max(1, 2**25 // kv_bytes)
    if order == 2 and fits >= problem.batch:
        whole = fits // problem.batch * problem.batch
        return min(heads, whole if problem.band.has_right else problem.batch)
    group = 1 if order == 2 else problem.heads_q // problem.heads_kv
    return min(heads, group * fits)


def is_spread(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether rows do not fill the tiles of three warpgroups, and are dealt out evenly instead."""
    if not is_bare(problem) or config.consumers < 3 or config.store != "tma":
        return False
    return -(-problem.len_q // 64) % config.consumers > 0


def is_dynamic(problem: AttentionProblem, config: GluonSm90Config) -> bool:
    """Whether tiles differ in length, so that they are drawn from a counter."""
    is_uneven = problem.band.has_right or problem.has_key_lengths or problem.packed is not None
    return is_uneven or is_spread(problem, config)


def constants(
    problem: AttentionProblem, config: GluonSm90Config, *, is_shared: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time parameters for a problem, but for the modes of bias and mask.

    Args:
        problem: The problem.
        config: Tile sizes and roles.
        is_shared: Whether batches share the bias or mask: `strides.is_shared`.
    """
    return {
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "HAS_LENGTHS": problem.has_key_lengths,
        "HAS_LEFT": problem.band.has_left,
        "HAS_RIGHT": problem.band.has_right,
        "EVEN": is_even(problem, config),
        "STORE_TMA": config.store == "tma",
        "PIN": config.pin,
        "TURNS": config.turns,
        "HELD": config.held,
        "LAZY": config.lazy,
        "APART": is_apart(problem, config),
        "ALIGNED": is_aligned(problem, config),
        "ONCE": is_cut_once(problem, config),
        "DROPOUT": problem.dropout_p > 0.0,
        "RIDE_STAGES": config.ride_stages if problem.has_mask or problem.has_bias else 0,
        "REGISTERS": config.registers,
        "QK_TILES": head_tiles(problem.head_dim, problem.head_dim_v)[1],
        "ORDER": 2 if is_shared else int(problem.band.has_right),
        "SPREAD": is_spread(problem, config),
        "LATE": is_late(problem, config),
    }
