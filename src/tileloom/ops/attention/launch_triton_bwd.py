"""Launches the kernels of the portable attention backward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from tileloom.launch.bound import Number
from tileloom.launch.launcher import prepared
from tileloom.ops.attention import kernel_triton_bwd_bias as bias_kernel
from tileloom.ops.attention import kernel_triton_bwd_rows as rows_kernel
from tileloom.ops.attention.config import padded_head_dim
from tileloom.ops.attention.config_backward import Tile, TritonBackwardConfig
from tileloom.ops.attention.kernel_triton_bwd import attention_dkv_kernel, attention_dq_kernel
from tileloom.ops.attention.philox import PhiloxState, dropout_arguments, dropout_values
from tileloom.ops.attention.problem import AttentionProblem, Offsets
from tileloom.ops.attention.strides import batch_strides, scores_arguments, vector_of

_LOG2_E = math.log2(math.e)
_ROWS = 64
"""Rows of a program that computes delta."""
_SHARED_PROGRAMS = 512
"""Programs below which several share the sum of one block of a bias's gradient."""


def bind_attention_bwd(
    problem: AttentionProblem,
    config: TritonBackwardConfig,
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
    """Prepare the launches for a problem that is not empty; dk and dv are both there, or neither.

    Args:
        problem: What `config.reasons_against` has passed.
        config: Tile sizes.
        dout: Gradient of O, `[B, Hq, Lq, Dv]`, unit stride in the last dimension; like all tensors
            here an example, which is not kept.
        dlse: Gradient of LSE, `[B, Hq, Lq]`, or None.
        q: Queries, `[B, Hq, Lq, D]`, any strides; k and v likewise.
        k: Keys, `[B, Hkv, Lk, D]`.
        v: Values, `[B, Hkv, Lk, Dv]`.
        out: The forward's output, `[B, Hq, Lq, Dv]`, unit stride in the last dimension.
        lse: The forward's log-sum-exp, `[B, Hq, Lq]`, float32, contiguous.
        mask: Bool, broadcastable to `[B, Hq, Lq, Lk]`, or None.
        bias: Floating, broadcastable to the same, or None.
        key_lengths: `[B]`, int32 or int64, or None.
        state: Seed and offset of dropout, or None.
        dq: `[B, Hq, Lq, D]`, unit stride in the last dimension, or None.
        dk: `[B, Hkv, Lk, D]`, unit stride in the last dimension, or None.
        dv: `[B, Hkv, Lk, Dv]`, unit stride in the last dimension, or None.
        dbias: Of bias's shape, contiguous but for the stride of its rows, or None.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(dout, dlse, q, k, v, out, lse, mask, bias, key_lengths, state, dq, dk, dv, dbias,
        offsets)`, which writes the gradients, for tensors of the same shapes, strides, types and
        alignments.

    Memory: `[B, Hq, Lq]` float32, twice with a bias or in float32; for the gradient of a bias that
        broadcasts up to 512 blocks of `dq.block_m * dq.block_n` float32.
    """
    rows = problem.batch * problem.len_q if problem.packed is None else problem.packed.total_q
    lines = problem.heads_q * rows
    example = q.new_empty(4, dtype=torch.float32)  # all that is asked of a workspace is its type
    is_weighted = _is_weighted(problem)
    tensors = {"do": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
    values = _arguments(problem, tensors, mask, bias, dlse, key_lengths)
    values |= {"lse": lse, "dlse": dlse, "lengths": key_lengths, "delta": example}
    values |= {"weight": example if is_weighted else None, "flags": None}
    values |= dict(zip(("cu_q", "cu_k"), offsets or (None, None)))
    dropout = dropout_arguments(problem, state)
    values |= dict(zip(("seed_at", "offset_at"), dropout.addresses))
    values |= dict(zip(("seed", "offset", "threshold", "keep_scale"), dropout.bound()))
    steps, sum_bias = _steps(problem, config, values, rows, dbias)
    is_cleared = dbias is not None and sum_bias is None and _is_hidden_somewhere(problem)

    def launch(
        dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None, state: PhiloxState | None,
        dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
        dbias: torch.Tensor | None, offsets: Offsets | None = None,
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {
            "do": dout, "dlse": dlse, "q": q, "k": k, "v": v, "out": out, "lse": lse, "bias": bias,
            "lengths": key_lengths, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias,
            "delta": q.new_empty(lines, dtype=torch.float32),
        }  # fmt: skip
        if is_weighted:
            given["weight"] = q.new_empty(lines, dtype=torch.float32)
        if mask is not None:
            given["mask"] = mask.view(torch.uint8)
        if offsets is not None:
            given["cu_q"], given["cu_k"] = offsets
        if state is not None:
            addresses, numbers = dropout_values(state)
            given |= dict(zip(("seed_at", "offset_at"), addresses))
            given |= dict(zip(("seed", "offset"), numbers))
        if is_cleared and dbias is not None:
            dbias.zero_()  # no program comes to blocks that are hidden
        for step in steps:
            step(given)
        if sum_bias is not None:
            sum_bias(given)

    return launch


Step = Callable[[dict[str, Any]], None]


def bind_row_weights(
    problem: AttentionProblem,
    tile: Tile,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    offsets: Offsets | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Prepare the launch of P's weights alone, for other backends.

    Args:
        problem: The problem.
        tile: Sizes.
        q: Queries; like all tensors here an example.
        k: Keys.
        lse: The forward's log-sum-exp.
        mask: Bool tensor or None.
        bias: Floating tensor.
        key_lengths: `[B]` or None.
        offsets: Of packed sequences, whose tensors have B = 1.

    Returns:
        `launch(q, k, lse, mask, bias, key_lengths, offsets)`, which returns float32 like LSE, and
        int32 `[B * Hq * tiles]`: whether a tile of `tile.block_m` rows has a weight that is not 1.
    """
    tiles = problem.heads_q * problem.blocks_q(tile.block_m)
    example = q.new_empty(4, dtype=torch.float32)
    values = _arguments(problem, {"q": q, "k": k}, mask, bias, None, key_lengths)
    values |= {"lse": lse, "lengths": key_lengths, "weight": example}
    values |= dict(zip(("cu_q", "cu_k"), offsets or (None, None)))
    values |= {"flags": example.view(torch.int32), "tiles": problem.blocks_q(tile.block_m)}
    values["tiles"] //= 1 if problem.packed else problem.batch
    kernel = rows_kernel.attention_weight_kernel
    step = _bound(kernel, (tiles,), values, constants(problem, tile), tile)

    def launch(
        q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
        bias: torch.Tensor | None, key_lengths: torch.Tensor | None,
        offsets: Offsets | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        weight = torch.empty_like(lse)
        flags = q.new_empty(tiles, dtype=torch.int32)
        given: dict[str, Any] = {
            "q": q, "k": k, "lse": lse, "bias": bias, "lengths": key_lengths, "weight": weight,
            "flags": flags,
        }  # fmt: skip
        if mask is not None:
            given["mask"] = mask.view(torch.uint8)
        if offsets is not None:
            given["cu_q"], given["cu_k"] = offsets
        step(given)
        return weight, flags

    return launch


def _steps(
    problem: AttentionProblem,
    config: TritonBackwardConfig,
    values: dict[str, Any],
    rows: int,
    dbias: torch.Tensor | None,
) -> tuple[list[Step], Step | None]:
    """Return what launches each kernel, and what sums the gradient of a bias that broadcasts."""
    fixed_rows, fixed_keys = constants(problem, config.dq), constants(problem, config.dkv)
    # To delta, which is a sum over each row by itself, packed sequences are one long one.
    batch = 1 if problem.packed else problem.batch
    heads_all = batch * problem.heads_q
    tiles = _ceil_div(rows // batch, _ROWS)
    own = {"tiles": tiles, "len_q": rows // batch}
    delta = rows_kernel.attention_delta_kernel
    steps = [_bound(delta, (tiles * heads_all,), values | own, fixed_rows)]
    row_tiles = problem.blocks_q(config.dq.block_m) // batch
    grid = (row_tiles * heads_all,)
    own = {"tiles": row_tiles}
    if values["weight"] is not None:
        weight = rows_kernel.attention_weight_kernel
        steps.append(_bound(weight, grid, values | own, fixed_rows, config.dq))
    if values["dk"] is not None:
        tiles = problem.blocks_k(config.dkv.block_n) // batch
        key_grid = (tiles * batch * problem.heads_kv,)
        for results in dkv_launches(problem):
            taken = values | {"tiles": tiles} | results
            steps.append(_bound(attention_dkv_kernel, key_grid, taken, fixed_keys, config.dkv))
    whole, sum_bias = dbias, None
    if dbias is not None and dbias.numel() < problem.scores:
        whole, sum_bias = None, _bias_step(problem, config.dq, values, dbias)
    if values["dq"] is not None or whole is not None:
        taken = values | own | _whole_bias(problem, whole) | {"HAS_DQ": values["dq"] is not None}
        steps.append(_bound(attention_dq_kernel, grid, taken, fixed_rows, config.dq))
    return steps, sum_bias


def _bound(
    kernel: Any, grid: tuple[int, ...], values: dict[str, Any], fixed: dict[str, Any],
    tile: Tile | None = None,
) -> Step:  # fmt: skip
    """Bind a launch to those of the values that the kernel takes."""
    every = values | fixed
    sizes = {} if tile is None else {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    names: list[str] = kernel.arg_names
    bound = prepared(kernel, **sizes).bind(grid, *(every[name] for name in names))
    varying = [n for n in names if isinstance(every[n], (torch.Tensor, Number))]
    return lambda given: bound.launch(*[given[name] for name in varying])


def _arguments(
    problem: AttentionProblem,
    tensors: dict[str, torch.Tensor | None],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    dlse: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
) -> dict[str, Any]:
    """Return what the kernels take of the problem and its tensors, by their parameters' names."""
    full = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    vector = vector_of(
        16 // problem.dtype.itemsize, *(t for t in tensors.values() if t is not None)
    )
    mask_mode, mask_vector, mask_strides = scores_arguments(mask, full)
    bias_mode, bias_vector, bias_strides = scores_arguments(bias, full)
    values: dict[str, Any] = {
        **tensors,
        "mask": None if mask is None else mask.view(torch.uint8),
        "bias": bias,
        "scale": problem.scale * (1.0 if _is_weighted(problem) else _LOG2_E),
        "scale_out": problem.scale,
        "heads": problem.heads_q,
        "group": problem.heads_q // problem.heads_kv,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "sequences": problem.batch,
        **dict(zip(("total_q", "total_k"), problem.packed.totals if problem.packed else (0, 0))),
        "lengths_b": 0 if key_lengths is None else key_lengths.stride(0),
        "VECTOR": vector,
        "MASK_VECTOR": mask_vector,
        "BIAS_VECTOR": bias_vector,
        "MASK_MODE": mask_mode,
        "BIAS_MODE": bias_mode,
    }
    for name, tensor in tensors.items():
        strides = (0, 0, 0, 0) if tensor is None else batch_strides(tensor, problem)
        values |= {f"{name}_{x}": s // (vector or 1) for x, s in zip("bhld", strides)}
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    values |= {f"dlse_{x}": s for x, s in zip("bhl", strides)}
    for name, strides in (("mask", mask_strides), ("bias", bias_strides)):
        values |= {f"{name}_{x}": s for x, s in zip("bhqk", strides)}
    bounds = problem.band.clamped(problem.len_q, problem.len_k)
    values |= dict(zip(("left_top", "right_top", "left_bottom", "right_bottom"), bounds))
    return values


def _is_hidden_somewhere(problem: AttentionProblem) -> bool:
    """Whether there are blocks of scores that no program comes to."""
    return bool(problem.packed or problem.has_key_lengths or not problem.band.is_unbounded)


def _whole_bias(problem: AttentionProblem, dbias: torch.Tensor | None) -> dict[str, Any]:
    """Return what the second kernel takes of a bias's gradient that has an entry for each score."""
    if dbias is None:
        return {"dbias": None, "dbias_l": 0, "DBIAS_VECTOR": 1, "BIAS_GRAD": False}
    vector = 16 // dbias.element_size()
    row = dbias.stride(-2) if dbias.dim() > 1 else problem.len_k
    vector = 1 if row % vector else vector
    own = {"dbias": dbias, "dbias_l": row // vector}
    return own | {"DBIAS_VECTOR": vector, "BIAS_GRAD": True}


def _bias_step(
    problem: AttentionProblem, tile: Tile, values: dict[str, Any], dbias: torch.Tensor
) -> Step:
    """Return what sums dS to the shape of a bias that broadcasts."""
    sizes = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    shape = (*((1,) * (4 - dbias.dim())), *dbias.shape)
    blocks = (1, 1, tile.block_m, tile.block_n)
    tiles = tuple(_ceil_div(n, block) for n, block in zip(sizes, blocks))
    is_summed = tuple(own < n for own, n in zip(shape, sizes))
    own = tuple(1 if summed else n for summed, n in zip(is_summed, tiles))
    over = tuple(n if summed else 1 for summed, n in zip(is_summed, tiles))
    programs, visits = math.prod(own), math.prod(over)
    parts = min(visits, max(1, _SHARED_PROGRAMS // programs))
    share = _ceil_div(visits, parts)
    parts = _ceil_div(visits, share)
    sums = dbias if parts == 1 else values["delta"]
    own_values = dict(zip(bias_kernel.BIAS_ARGUMENTS, (*own, *over, share))) | {"dbias": sums}
    fixed = constants(problem, tile) | {"SUM_ROWS": is_summed[2], "SUM_KEYS": is_summed[3]}
    kernel = bias_kernel.attention_dbias_kernel
    step = _bound(kernel, (programs, parts), values | own_values, fixed, tile)
    if parts == 1:
        return step

    def add_up(given: dict[str, Any]) -> None:
        whole = given["dbias"]
        sums = whole.new_empty((parts, *whole.shape), dtype=torch.float32)
        step(given | {"dbias": sums})
        whole.copy_(sums.sum(0))

    return add_up


def _is_weighted(problem: AttentionProblem) -> bool:
    return problem.has_bias or problem.dtype == torch.float32


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def dkv_launches(problem: AttentionProblem) -> tuple[dict[str, bool], ...]:
    """Return what each launch of the first kernel computes: both, or dV and then dK."""
    if max(problem.head_dim, problem.head_dim_v) <= 256:
        return ({"HAS_DK": True, "HAS_DV": True},)
    return {"HAS_DK": False, "HAS_DV": True}, {"HAS_DK": True, "HAS_DV": False}


def constants(problem: AttentionProblem, tile: Tile) -> dict[str, Any]:
    """Return the kernels' constants that follow from a problem and a tile alone."""
    block_d = padded_head_dim(problem.head_dim)
    block_dv = padded_head_dim(problem.head_dim_v)
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CHUNK_D": min(block_d, tile.chunk_d or block_d),
        "CHUNK_DV": min(block_dv, tile.chunk_d or block_dv),
        "HAS_LENGTHS": problem.has_key_lengths,
        "HAS_LEFT": problem.band.has_left,
        "HAS_RIGHT": problem.band.has_right,
        "WEIGHTED": _is_weighted(problem),
        "WEIGHS_ALL": problem.dtype == torch.float32,
        "ROWS": _ROWS,
        "DROPOUT": problem.dropout_p > 0,
    }


def parameters(module: str, kernel: str) -> tuple[str, ...]:
    """Return the names of a kernel's parameters."""
    return tuple(getattr(importlib.import_module(module), kernel).arg_names)
