"""What the Hopper backward supports, and the sizes it runs with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tileloom.ops.attention.config import hopper_reasons, padded_head_dim, tma_reasons
from tileloom.ops.attention.problem import AttentionProblem
from tileloom.target import Target

_SMEM = 232448  # of a block on sm_90


def tile_width(head_dim: int) -> int:
    """Columns of a tile: 64, 128 or 256."""
    return max(64, padded_head_dim(head_dim))


def is_wide_kernel(head_dim: int, head_dim_v: int) -> bool:
    """Whether `kernel_gluon_sm90_bwd_wide.py` takes these head dims."""
    return max(head_dim, head_dim_v) > 128


def is_narrow_kernel(problem: AttentionProblem, block_m: int) -> bool:
    """Whether `kernel_gluon_sm90_bwd_narrow.py` takes the problem."""
    has_more = problem.has_mask or problem.has_bias or problem.dropout_p > 0
    return max(problem.head_dim, problem.head_dim_v) <= 64 and block_m == 64 and not has_more


def is_192_kernel(problem: AttentionProblem, config: GluonSm90BackwardConfig) -> bool:
    """Whether `kernel_gluon_sm90_bwd_192.py` takes the problem."""
    has_more = problem.has_mask or problem.has_bias or problem.dropout_p > 0
    is_size = 128 < problem.head_dim <= 192 and problem.head_dim_v <= 128
    return is_size and config.stages == 2 and not (has_more or config.ordered or config.wide)


def buffer_width(problem: AttentionProblem, config: GluonSm90BackwardConfig) -> int:
    """Columns of the buffer of dQ."""
    return 192 if is_192_kernel(problem, config) else tile_width(problem.head_dim)


def keys_of_block(problem: AttentionProblem, config: GluonSm90BackwardConfig) -> int:
    """Keys of a block: 128, of the wide kernel 64."""
    is_wide = is_wide_kernel(problem.head_dim, problem.head_dim_v)
    return 64 if is_wide and not is_192_kernel(problem, config) else 128


def dropout_mode(problem: AttentionProblem) -> int:
    """DROPOUT of the kernels: 0 without, 1 where consumers decide, 2 where a dropper does.

    The dropper is for calls of Philox that decide on four keys each. Of a length that is no
    multiple of 4 (and in packed sequences) it has twice as many to make, and takes longer than the
    consumers: 9.6 against 8.4 ms at 4098 (H200, 2026-11-28, 16k tokens, hidden 2048, head dim 64).
    With a bias or mask it is timed up to a head dim of 64 only.
    """
    if problem.dropout_p == 0:
        return 0
    is_even = problem.packed is None and problem.len_k % 4 == 0
    widest = widest_of_dropper(problem.has_bias or problem.has_mask)
    return 2 if is_even and max(problem.head_dim, problem.head_dim_v) <= widest else 1


def widest_of_dropper(has_scores: bool) -> int:
    """The widest head dim with a dropper; `has_scores`: with a bias or mask."""
    return 64 if has_scores else 128


@dataclass(frozen=True)
class GluonSm90BackwardConfig:
    """The Hopper backward; see `kernel_gluon_sm90_bwd.py`, above head dim 128 `.._bwd_wide.py`.

    `.._bwd_192.py` runs where q and k have 136 to 192 columns and v at most 128, with two stages,
    in no fixed order, and without bias, mask and dropout, unless `wide`.

    Attributes:
        block_m: Queries of a step: 64 or 128; only 64 above a head dim of 128. With 64, and without
            bias, mask and dropout, `.._bwd_narrow.py` runs up to a head dim of 64.
        stages: Query blocks in flight in shared memory, at least 2.
        ordered: Whether dQ is added up in a fixed order, the same bits in every run; else in the
            order in which blocks come. See `pieces_order_sm90.py`.
        wide: Whether `.._bwd_wide.py` runs in place of `.._bwd_192.py`: twice as many blocks, of
            half the keys.
        persistent: Whether as many programs run as there are multiprocessors, each drawing blocks
            of keys from a counter; only `.._bwd_narrow.py` does.
    """

    block_m: int = 64
    stages: int = 2
    ordered: bool = False
    wide: bool = False
    persistent: bool = False
    backend = "gluon_sm90"

    def encode(self) -> str:
        """Return the config as the text that the operator's schema carries."""
        numbers = (self.block_m, self.stages, self.ordered, self.wide, self.persistent)
        return "gluon_sm90:" + ",".join(str(int(number)) for number in numbers)

    @staticmethod
    def decode(text: str) -> GluonSm90BackwardConfig:
        """Read a config from what `encode` writes behind the colon; it may lack its end."""
        fields = text.split(",")
        fields += GluonSm90BackwardConfig().encode().partition(":")[2].split(",")[len(fields) :]
        block_m, stages, ordered, wide, persistent = map(int, fields)
        flags = map(bool, (ordered, wide, persistent))
        return GluonSm90BackwardConfig(block_m, stages, *flags)

    def smem_bytes(
        self, head_dim: int, head_dim_v: int, *, is_packed: bool = False, is_192: bool = False
    ) -> int:
        """Shared memory of a block, in bytes, with barriers, without tiles of scores or dropout.

        With packed sequences the search for a block's sequence takes some more. `is_192`: that of
        `kernel_gluon_sm90_bwd_192.py`, where it does not.
        """
        rows, width = self.block_m, 192 if is_192 else tile_width(head_dim)
        is_wide = is_wide_kernel(head_dim, head_dim_v) and not is_192
        keys = 64 if is_wide else 128
        places = 2 if self.persistent else 1
        loaded = 2 * (self.stages * rows + keys * places) * (width + tile_width(head_dim_v))
        loaded += 8 * self.stages * rows
        handed = 64 * 64 * 6 if is_wide else 4 * keys * rows + 4 * rows * width
        if is_192:
            return loaded + handed - 2 * keys * rows + 1024  # dS of one step
        around = 1536 if self.persistent else 1024
        return loaded + handed + around + (3584 if is_packed else 0)

    def dropout_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Shared memory, in bytes, through which the bits of dropout go, with a dropper twice."""
        return (16 if is_wide_kernel(head_dim, head_dim_v) else 32) * self.block_m

    def score_tiles(
        self, head_dim: int, head_dim_v: int, sizes: Sequence[int], *, drops: bool = False
    ) -> tuple[int, int]:
        """Return how many of the tiles of bias and mask shared memory holds, and in how many slots.

        Args:
            head_dim: Columns of q and k.
            head_dim_v: Columns of v.
            sizes: Bytes of a number of the bias, the mask, in the order in which they get room.
            drops: Whether there is dropout, whose bits go through shared memory.
        """
        scores = 64 * 64 if is_wide_kernel(head_dim, head_dim_v) else 128 * self.block_m
        free = _SMEM - self.smem_bytes(head_dim, head_dim_v)
        free -= self.dropout_bytes(head_dim, head_dim_v) if drops else 0
        taken = count = 0
        for size in sizes:
            if taken + size * scores > free:
                break
            taken += size * scores
            count += 1
        return count, 2 if 0 < 2 * taken <= free else 1

    def reasons_against(self, problem: AttentionProblem, target: Target) -> tuple[str, ...]:
        """Return why this config cannot run the problem on the target; empty if it can."""
        why = self._faults(max(problem.head_dim, problem.head_dim_v))
        why += hopper_reasons(problem, target)
        if self.persistent and not is_narrow_kernel(problem, self.block_m):
            why.append(
                "persistent is True, which only the kernel for head dims up to 64 can be, with "
                "block_m 64 and without bias, mask and dropout"
            )
        if torch.are_deterministic_algorithms_enabled() and not self.ordered:
            why.append(
                "ordered is False: it adds up dQ in no fixed order, and deterministic algorithms "
                "are asked for"
            )
        if not problem.scale >= 2.0**-100:
            why.append(f"scale {problem.scale} is not positive, or below 2^-100")
        if problem.len_q + problem.len_k > 2**30:
            why.append("Lq + Lk exceeds 2^30")
        lines = problem.heads_q * problem.blocks_q(self.block_m) * self.block_m
        if lines * buffer_width(problem, self) // 64 >= 2**31:
            why.append("the buffer of dQ has more than 2^31 pieces of 64 elements")
        if problem.heads_kv * problem.blocks_k(64) >= 2**31:
            why.append("there are more than 2^31 blocks of keys")
        why += tma_reasons(problem)
        smem = self.smem_bytes(
            problem.head_dim, problem.head_dim_v, is_packed=problem.packed is not None,
            is_192=is_192_kernel(problem, self),
        )  # fmt: skip
        if target.kind != "cpu" and smem > target.smem:
            why.append(
                f"it needs {smem} bytes of shared memory, and {target.name} has {target.smem}"
            )
        return tuple(why)

    def _faults(self, head_dim: int) -> list[str]:
        """What is wrong with the config itself."""
        why: list[str] = []
        if self.block_m not in (64, 128):
            why.append(f"block_m is {self.block_m}, not 64 or 128")
        elif self.block_m == 128 and head_dim > 128:
            why.append(f"block_m is 128, and head dim {head_dim} above 128 takes only 64")
        if self.stages < 2:
            why.append(f"stages is {self.stages}, not at least 2")
        return why


def gluon_backward_rule(problem: AttentionProblem, sms: int = 0) -> GluonSm90BackwardConfig:
    """Give the Hopper config for a problem, as measured on an H100 on 2026-11-28.

    Persistent programs (H200, 2026-11-29) are up to 13 % faster where a program has few steps for
    a block of keys, and 5 to 23 % in a fixed order; with less than one and a half blocks for each
    multiprocessor, and where 8192 rows or more see a block, they are within 2 % either way.

    Where blocks of half the keys all find a multiprocessor of `sms`, they are faster than those
    of `kernel_gluon_sm90_bwd_192.py`: 0.048, 0.075 ms (H200, 2026-11-29, 4 heads, 1k, causal).

    Args:
        problem: The forward's.
        sms: Multiprocessors of the GPU; 0 for fewer than there are blocks.
    """
    ordered = torch.are_deterministic_algorithms_enabled()
    if is_narrow_kernel(problem, 64):
        has_many = 2 * problem.heads_kv * problem.blocks_k(128) >= 3 * sms
        persistent = has_many and (ordered or _rows(problem) <= 4096)
        return GluonSm90BackwardConfig(64, 3, ordered, persistent=persistent)
    config = GluonSm90BackwardConfig(64, 2, ordered)
    is_few = problem.heads_kv * problem.blocks_k(64) <= sms
    return replace(config, wide=True) if is_few and is_192_kernel(problem, config) else config


def _rows(problem: AttentionProblem) -> int:
    """About how many rows see a block of keys, of all query heads of its key head."""
    rows = problem.len_q if problem.packed is None else problem.packed.total_q // problem.batch
    if problem.band.has_left and problem.band.has_right:
        left, right, left_bottom, right_bottom = problem.band.clamped(problem.len_q, problem.len_k)
        shift = problem.len_k - problem.len_q
        width = min(right, right_bottom + shift) - max(-left, shift - left_bottom)
        rows = min(rows, max(width, 0) + 128)
    elif problem.band.has_left or problem.band.has_right:
        rows //= 2
    return problem.heads_q // problem.heads_kv * rows
