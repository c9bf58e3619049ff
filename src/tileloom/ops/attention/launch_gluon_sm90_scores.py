"""How the Hopper backward is told of bias and mask, and how a bias's gradient is asked for.

A bias's gradient comes in one of three ways, all of them deterministic, none of them stored twice:

    an entry for each score      the main kernel writes dS, each number once (by TMA where it can)
    the same for every query     the main kernel sums dS over the queries in registers, to float32
                                 `[B, Hq, Lk]`; what is left to sum is summed from that
    any other broadcast          a pass of its own computes dS again and sums it in a fixed order
                                 (`kernel_triton_bwd_bias.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileloom.ops.attention.config_backward import triton_backward_rule
from tileloom.ops.attention.config_backward_sm90 import GluonSm90BackwardConfig
from tileloom.ops.attention.kernels_backward_sm90 import score_arguments
from tileloom.ops.attention.launch_triton_bwd import bind_attention_bwd, bind_row_weights
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.strides import is_shared, strides_of
from tileloom.target import target_of

NONE, KEYS, TILE, ANYWHERE = range(4)
"""The modes of `pieces_gluon_sm90_scores.py`."""

_TILES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Scores:
    """What one kind of call does about bias and mask.

    Attributes:
        bias: Mode of the bias.
        mask: Mode of the mask.
        dbias: Mode of the bias's gradient, as far as the main kernel writes it.
        slots: Tiles of bias and mask in flight.
        is_summed: Whether a pass of its own sums the bias's gradient.
        is_shared: Whether batches share the bias or the mask, and follow each other for it.
    """

    bias: int
    mask: int
    dbias: int
    slots: int
    is_summed: bool
    is_shared: bool

    @staticmethod
    def of(
        problem: AttentionProblem,
        config: GluonSm90BackwardConfig,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        dbias: torch.Tensor | None,
    ) -> Scores:
        """Choose the modes for real tensors, tiles as far as shared memory goes."""
        full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
        given = (bias, mask)
        modes = [NONE if tensor is None else _mode(tensor, full) for tensor in given]
        if problem.packed:  # TMA begins at multiples of 16 bytes, blocks anywhere
            modes = [ANYWHERE if mode == TILE else mode for mode in modes]
        tiles = [i for i in range(2) if modes[i] == TILE]
        sizes = [tensor.element_size() for tensor in given if tensor is not None]
        sizes = [size for size, mode in zip(sizes, (m for m in modes if m)) if mode == TILE]
        drops = problem.dropout_p > 0
        dims = (problem.head_dim, problem.head_dim_v)
        count, slots = config.score_tiles(*dims, sizes, drops=drops)
        for i in tiles[count:]:
            modes[i] = ANYWHERE
        written = NONE if dbias is None else _gradient_mode(problem, dbias)
        is_summed = dbias is not None and written == NONE
        shared = is_shared(problem, bias, mask)
        return Scores(modes[0], modes[1], written, slots, is_summed, shared)

    def constants(self) -> dict[str, int]:
        """Return the kernel's constants."""
        return {
            "BIAS": self.bias, "MASK": self.mask, "DBIAS": self.dbias, "SCORE_STAGES": self.slots,
            "SHARED": self.is_shared,
        }  # fmt: skip

    def arguments(
        self,
        problem: AttentionProblem,
        rows: int,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        dbias: torch.Tensor | None,
        example: torch.Tensor,
    ) -> tuple[list[Any], list[int]]:
        """Return bias, mask and dbias as the kernel takes them, and strides of the first two.

        Args:
            problem: The problem.
            rows: Queries of a tile.
            mask: Example of the mask, or None.
            bias: Example of the bias, or None.
            dbias: Example of its gradient, or None.
            example: A float32 tensor.
        """
        full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
        bits = None if mask is None else mask.view(torch.uint8)
        arguments: list[Any] = []
        steps: list[int] = []
        for tensor, mode in ((bias, self.bias), (bits, self.mask)):
            strides = (0, 0, 0, 0) if tensor is None else strides_of(tensor.expand(full))
            if tensor is not None and mode == TILE:
                arguments.append(score_descriptor(tensor, full, strides, rows))
                strides = (*(int(s > 0) for s in strides[:2]), 0, 0)
            else:
                arguments.append(tensor)
            steps += strides
        target = {NONE: None, KEYS: example}.get(self.dbias, dbias)
        if target is not None and self.dbias == TILE:
            target = score_descriptor(target, full, strides_of(target.reshape(full)), rows)
        return [*arguments, target], steps

    def tensors(
        self,
        problem: AttentionProblem,
        q: torch.Tensor,
        mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        dbias: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return what a launch takes of them: those that are there, dbias or what it is summed to.

        Blocks of scores that no block of the kernel comes to get zeros here.
        """
        given = [] if bias is None else [bias]
        if mask is not None:
            given.append(mask.view(torch.uint8))
        if self.dbias == KEYS:
            shape = (problem.batch, problem.heads_q, 1, problem.len_k)
            make = q.new_zeros if problem.packed else q.new_empty
            given.append(make(shape, dtype=torch.float32))
        elif self.dbias != NONE and dbias is not None:
            is_cut = problem.packed or problem.has_key_lengths or not problem.band.is_unbounded
            given.append(dbias.zero_() if is_cut else dbias)
        return given

    def bind_sum(
        self,
        problem: AttentionProblem,
        given: tuple[Any, ...],
        dbias: torch.Tensor | None,
        offsets: Offsets | None,
    ) -> Callable[..., None] | None:
        """Prepare what writes the gradient of a bias that broadcasts, after the main kernel.

        Args:
            problem: The problem.
            given: Examples of what the backward gets, from dout on.
            dbias: Example of the gradient.
            offsets: Of packed sequences.

        Returns:
            `finish(tensors, given, dbias, offsets)`, with what `tensors` has returned, or None.
        """
        if dbias is None or self.dbias in (TILE, ANYWHERE):
            return None
        if self.is_summed:
            config = triton_backward_rule(problem, target_of(dbias))
            rest: Any = (None, None, None, dbias, offsets)
            sum_up = bind_attention_bwd(problem, config, *given, *rest)
            return lambda _, given, dbias, offsets: sum_up(*given, None, None, None, dbias, offsets)
        shape = (*((1,) * (4 - dbias.dim())), *dbias.shape)
        sizes = (problem.batch, problem.heads_q, 1, problem.len_k)
        over = [d for d in range(4) if shape[d] < sizes[d]]

        def add_up(
            tensors: list[torch.Tensor],
            given: tuple[Any, ...],
            dbias: torch.Tensor,
            offsets: Offsets | None,
        ) -> None:
            sums = tensors[-1]
            dbias.copy_((sums.sum(over, keepdim=True) if over else sums).view(dbias.shape))

        return add_up


def _mode(tensor: torch.Tensor, full: tuple[int, int, int, int]) -> int:
    """Return how a bias or mask is read if shared memory does not matter."""
    *outer, step = strides_of(tensor.expand(full))
    if outer[2] == 0:
        return KEYS
    unit = 16 // tensor.element_size()
    is_regular = all(s % unit == 0 and s * tensor.element_size() < 2**40 for s in outer)
    is_tile = step == 1 and is_regular and tensor.data_ptr() % 16 == 0 and tensor.dtype in _TILES
    return TILE if is_tile else ANYWHERE


def _gradient_mode(problem: AttentionProblem, dbias: torch.Tensor) -> int:
    heads = problem.batch * problem.heads_q
    if dbias.numel() == heads * problem.len_q * problem.len_k:
        is_tile = dbias.dtype == problem.dtype and problem.len_k % 8 == 0 and not problem.packed
        return TILE if is_tile and dbias.data_ptr() % 16 == 0 else ANYWHERE
    return KEYS if dbias.dim() < 2 or dbias.shape[-2] == 1 else NONE


def score_descriptor(
    tensor: torch.Tensor, full: tuple[int, int, int, int], strides: tuple[int, ...], rows: int
) -> TensorDescriptor:
    """A TMA descriptor for boxes of 64 keys, with one entry where a dimension broadcasts."""
    sizes = [1 if s == 0 else n for n, s in zip(full, strides)]
    steps = [s or strides[2] for s in strides[:3]]
    layout = gl.NVMMASharedLayout(**score_arguments(tensor.element_size()))
    return TensorDescriptor(tensor, sizes, [*steps, 1], [1, 1, rows, 64], layout)


def bind_weights(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    offsets: Offsets | None,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Prepare what the main kernel is told of rows with a large LSE.

    Args:
        problem: The problem.
        q: Queries; like all tensors here an example.
        k: Keys.
        lse: The forward's log-sum-exp.
        mask: Bool tensor or None.
        bias: Floating tensor, or None: then it is told nothing.
        key_lengths: `[B]` or None.
        offsets: Of packed sequences.

    Returns:
        `launch(q, k, lse, mask, bias, key_lengths, offsets)`, which returns flags of tiles of 64
        rows, LSE and P's weights; see `kernel_triton_bwd_rows.py`.
    """
    if bias is None:
        return lambda *_: ()
    tile = replace(triton_backward_rule(problem, target_of(q)).dq, block_m=64)
    weigh = bind_row_weights(problem, tile, q, k, lse, mask, bias, key_lengths, offsets)

    def launch(*given: Any) -> tuple[torch.Tensor, ...]:
        weight, flags = weigh(*given)
        return flags, given[2], weight

    return launch
